"""Compiles all kernels with NVIDIA's compiler, which needs no GPU."""

import ctypes
import importlib.metadata
import re

import kernel_cases as cases
import pytest
from launching import missing

from mpiring.gpu import kernels

OPS = sorted({op for op, _ in cases.CASES})
# Turing to Blackwell.
ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]


@pytest.fixture(scope="module")
def nvrtc():
    try:
        files = importlib.metadata.files("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        missing("no NVRTC: pip install nvidia-cuda-nvrtc")
    (path,) = [file for file in files if re.match(r"libnvrtc\.so", file.name)]
    return ctypes.CDLL(path.locate())


def compiled(nvrtc, kernel, architecture):
    """Return the machine code of a kernel, or its PTX for an architecture like compute_90."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), kernel.source.encode(),
                                    f"{kernel.name}.cu".encode(), 0, None, None) == 0
    # CuPy adds the second option.
    options = [*kernels.OPTIONS, "--device-as-default-execution-space",
               f"--gpu-architecture={architecture}"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(
        *[option.encode() for option in options]))
    kind = "ProgramLog" if status else "PTX" if architecture.startswith("compute") else "CUBIN"
    assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
    content = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{kind}")(program, content) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, content.value.decode()
    return content.raw


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_compiles(nvrtc, op):
    for number, kernel in enumerate(cases.kernels_of(op)):
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        assert compiled(nvrtc, kernel, architecture).startswith(b"\x7fELF")


def test_kernels_of_warps_compile_and_round_each_operation(nvrtc):
    for number, kernel in enumerate(cases.warp_kernels()):
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        assert compiled(nvrtc, kernel, architecture).startswith(b"\x7fELF")
        text = compiled(nvrtc, kernel, "compute_90").decode()
        assert not re.findall(r"\bfma\.|\.ftz|\.approx|\.local", text), kernel.name


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "bfloat16", "float16"])
def test_sums_round_each_operation_and_move_16_bytes_at_a_time(nvrtc, name):
    for kernel in cases.kernels_of("mean", name):
        text = compiled(nvrtc, kernel, "compute_90").decode()
        assert not re.findall(r"\bfma\.|\.ftz|\.approx|\.local", text), kernel.name
        assert re.search(r"ld\.\w+\.v(4\.\w32|2\.\w64)", text), kernel.name
        assert re.search(r"st\.global\.v(4\.\w32|2\.\w64)", text), kernel.name
