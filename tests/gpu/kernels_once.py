"""Runs all that GPUs compute on small vectors, and checks it; made for NVIDIA's checkers.

    compute-sanitizer --tool memcheck python tests/gpu/kernels_once.py
    compute-sanitizer --tool racecheck python tests/gpu/kernels_once.py
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import kernel_cases as cases  # noqa: E402
from gpu_memory import GpuMemory  # noqa: E402

from mpiring.gpu import cuda  # noqa: E402


def main():
    device = cuda.device(0)
    memory = GpuMemory(device)
    for op, name in cases.CASES:
        cases.check_combine(device, memory, op, name)
    for name in cases.ALARMED:
        cases.check_alarm(device, memory, name)
    for names in cases.CONVERSIONS:
        cases.check_convert(memory, names)
    for codec in cases.CODECS:
        cases.check_codec(memory, codec)
    cases.check_elementwise(memory)
    print(f"all kernels agree with the host on {device}")


if __name__ == "__main__":
    main()
