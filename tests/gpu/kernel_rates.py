"""Measures how near sums come to the rate of a copy on the GPU; prints JSON.

    python tests/gpu/kernel_rates.py
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

from mpiring.gpu import cuda  # noqa: E402

# Far more than a GPU's cache.
NBYTES = 256 << 20
ROUNDS = 20


def rate(stream, queue, nbytes):
    """Return the GB/s at which something moves so many bytes; the median of its times."""
    cupy, times = cuda.cupy(), []
    for number in range(ROUNDS + 3):
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(stream._stream)
        queue()
        last.record(stream._stream)
        last.synchronize()
        if number >= 3:
            times.append(cupy.cuda.get_elapsed_time(first, last) / 1e3)
    return nbytes / statistics.median(times) / 1e9


def combining(stream, device):
    """Yield names and rates of sums and means."""
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
        for p, q in [(2, 1), (4, 1), (4, 4), (8, 1)]:
            xs = [device.allocate(NBYTES // 4).view(dtype) for _ in range(max(p, q))]
            for op, divisor in [("sum", 1), ("mean", p), ("mean", 3)]:
                name = f"{op} of {p} to {q}, {np.dtype(dtype).name}, over {divisor}"
                yield name, rate(stream, lambda: stream.combine(op, xs[:p], divisor, xs[:q]),
                                 (p + q) * xs[0].nbytes)


def main():
    device = cuda.device(0)
    stream = device.gpu.stream()
    a, b = (device.allocate(NBYTES) for _ in range(2))
    bound = rate(stream, lambda: stream.combine("sum", [a], 1, [b]), 2 * NBYTES)
    found = {name: {"GB/s": round(speed, 1), "of a copy": round(speed / bound, 3)}
             for name, speed in combining(stream, device)}
    print(json.dumps({"gpu": repr(device), "versions": cuda.versions(),
                      "copy GB/s": round(bound, 1), "kernels": found}, indent=1))


if __name__ == "__main__":
    main()
