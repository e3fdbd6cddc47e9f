"""Generates the CUDA C++ code that combines vectors: a kernel per op, dtype and count.

Sums and products are computed in the order of the sources, and never contracted (`OPTIONS`), so
that results are bitwise identical to those of `Reduction` on the host. Three things may differ: the
payload of a NaN, the sign of zero in max and min of two zeros, and the last bit of complex
products. NumPy contracts such products on some processors.
"""

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..memory.arrays import COMPLEX, FLOATING, INFINITY_BITS, SIXTEEN_BIT, dtype_name

OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256
PACK_BYTES = 16
# Loops over more sources are unrolled only partly, since compiling would take too long.
_UNROLLED = 16

_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}

# Conversions between the types T (in memory) and W (in arithmetic). Tests on the host lack the
# GPU's instructions.
_SIXTEEN = {"float16": """
#ifdef __CUDA_ARCH__
__device__ inline float widened(unsigned short x) {
    float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;
}
__device__ inline unsigned short narrowed(float x) {
    unsigned short y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
}
#endif
""", "bfloat16": """
__device__ inline float widened(unsigned short x) {
    return __uint_as_float((unsigned int)x << 16);
}
__device__ inline unsigned short narrowed(float x) {
    const unsigned int bits = __float_as_uint(x);
    // A carry could turn NaN into Inf or zero.
    return (unsigned short)(x != x ? bits >> 16 | 0x40u : bits + 0x7fffu + (bits >> 16 & 1u) >> 16);
}
"""}
_PLAIN = """
__device__ inline W widened(T x) { return (W)x; }
__device__ inline T narrowed(W x) { return (T)x; }
"""

# A kernel with an alarm writes a number to a word in host memory if a result is NaN or Inf.
_NO_ALARM = """
struct Alarm {};
__device__ inline bool is_finite(T x) { return true; }
__device__ inline void ring(const Alarm &alarm) {}
"""
_ALARM = """
struct Alarm { unsigned int *word, number; };
__device__ inline bool is_finite(T x) { return %s; }
__device__ inline void ring(const Alarm &alarm) { *alarm.word = alarm.number; }
"""

CONSTANT = """
// Without __grid_constant__, dynamically indexed parameters are copied to each thread's memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define MPIRING_CONSTANT __grid_constant__
#else
#define MPIRING_CONSTANT
#endif
"""

_COMBINE = CONSTANT + """
struct alignas(16) Pack { T lane[LANES]; };

struct Job : Alarm {
    const T *from[P];
    T *to[Q];
    long long n;        // elements
    long long head;     // those before the first pack
    long long packs;
    D divisor;
};

extern "C" __global__ void __launch_bounds__(%(threads)d)
%(name)s(const MPIRING_CONSTANT Job job) {
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    bool finite = true;
    for (long long i = first; i < job.packs; i += step) {
        W total[LANES];
        Pack pack = reinterpret_cast<const Pack *>(job.from[0] + job.head)[i];
        #pragma unroll
        for (int lane = 0; lane < LANES; ++lane) total[lane] = widened(pack.lane[lane]);
        #pragma unroll %(unrolled)d
        for (int k = 1; k < P; ++k) {
            pack = reinterpret_cast<const Pack *>(job.from[k] + job.head)[i];
            #pragma unroll
            for (int lane = 0; lane < LANES; ++lane)
                total[lane] = both(total[lane], widened(pack.lane[lane]));
        }
        #pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            pack.lane[lane] = narrowed(divided(total[lane], job.divisor));
            finite &= is_finite(pack.lane[lane]);
        }
        #pragma unroll %(unrolled)d
        for (int k = 0; k < Q; ++k) reinterpret_cast<Pack *>(job.to[k] + job.head)[i] = pack;
    }
    const long long packed = job.packs * LANES;
    for (long long j = first; j < job.n - packed; j += step) {
        const long long i = j < job.head ? j : j + packed;
        W total = widened(job.from[0][i]);
        #pragma unroll %(unrolled)d
        for (int k = 1; k < P; ++k) total = both(total, widened(job.from[k][i]));
        const T done = narrowed(divided(total, job.divisor));
        finite &= is_finite(done);
        #pragma unroll %(unrolled)d
        for (int k = 0; k < Q; ++k) job.to[k][i] = done;
    }
    if (!finite) ring(job);
}
"""

_building = threading.Lock()


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that accepts one struct by value; its name is unique to its source."""

    name: str
    source: str
    parameters: np.dtype[Any]

    @functools.cached_property
    def _opaque(self) -> np.dtype[Any]:
        # CuPy reads the description of a dtype; for a struct with names, this takes 30 µs.
        return np.dtype(f"V{self.parameters.itemsize}")

    def job(self, **values: Any) -> np.ndarray[Any, Any]:
        """Return the struct with these values, as a zero-dimensional array."""
        filled = np.zeros((), self.parameters)
        for name, value in values.items():
            filled[name] = value
        return filled

    def opaque(self, job: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the same memory, in the form that CuPy passes to a kernel."""
        return job.view(self._opaque)


_built: dict[tuple[Kernel, int], Any] = {}


def built(kernel: Kernel, cuda: Any, index: int) -> Any:
    """Return the function that launches a kernel on a GPU; compile it the first time.

    CuPy's RawKernel would cache it on disk, but flushes subnormal numbers to zero.

    Pass the same kernel each time. The GPU of this index must be current.
    """
    # If two threads compiled it, one of the kernels would be unloaded, perhaps while it runs.
    with _building:
        if (kernel, index) not in _built:
            code, _ = cuda.compiler.compile_using_nvrtc(
                kernel.source, OPTIONS, filename=f"{kernel.name}.cu")
            module = cuda.function.Module()
            module.load(code)
            _built[kernel, index] = module.get_function(kernel.name)
        return _built[kernel, index]


@dataclass(frozen=True)
class Packing:
    """Division of vectors of n elements into packs of 16 bytes; see Job in the source.

    `head` elements precede the first pack. Those not in packs are processed one by one. `work` is
    the largest useful number of threads.
    """

    head: int
    packs: int
    work: int


def packing(addresses: Sequence[int], n: int, itemsize: int) -> Packing:
    """Return the packing of vectors at these addresses; no packs unless alignments are equal."""
    offset, *others = {address % PACK_BYTES for address in addresses}
    if offset % itemsize or others:
        return Packing(0, 0, n)
    head = min(-offset % PACK_BYTES // itemsize, n)
    packs = (n - head) * itemsize // PACK_BYTES
    return Packing(head, packs, max(packs, n - packs * PACK_BYTES // itemsize))


def division(dtype: DTypeLike, divisor: float) -> tuple[str, float]:
    """Return how to divide ("none", "over" a divisor or "times" a factor), and the number.

    A division by a power of two is replaced with a multiplication, which takes fewer instructions.
    """
    if divisor == 1:
        return "none", 1.0
    if dtype_name(dtype) not in COMPLEX and math.frexp(divisor)[0] == 0.5:
        return "times", 1 / divisor
    return "over", divisor


@functools.lru_cache(maxsize=1024)
def combine(op: str, dtype: np.dtype[Any], sources: int, outs: int, divides: str,
            alarm: bool = False) -> Kernel:
    """Return the kernel that combines vectors elementwise, and stores the result in others.

    A mean is a sum with a division, whose kind comes from `division`. A kernel accepts about 500
    vectors, of any dtype except long doubles. With an alarm, results must not be integers.
    """
    of = dtype_name(dtype)
    name = f"mpiring_{op}_{of}_{sources}_to_{outs}_{divides}{'_alarm' if alarm else ''}"
    divisor = np.dtype("f8" if of in ("float64", "complex128") else "f4")
    fields = [("word", "u8"), ("number", "u4")] if alarm else []
    parameters = np.dtype([*fields, ("sources", "u8", (sources,)), ("outs", "u8", (outs,)),
                           ("n", "i8"), ("head", "i8"), ("packs", "i8"), ("divisor", divisor)],
                          align=True)
    constants = (f"constexpr int P = {sources}, Q = {outs}, "
                 f"LANES = {PACK_BYTES // dtype.itemsize};\n"
                 f"typedef {'double' if divisor.itemsize == 8 else 'float'} D;\n")
    unrolled = _UNROLLED if max(sources, outs) <= _UNROLLED else _UNROLLED // 2
    body = _COMBINE % {"name": name, "threads": THREADS, "unrolled": unrolled}
    return Kernel(name, constants + _types(op, dtype) + _both(op, of) + _divided(of, divides)
                  + (_ALARM % _finite(of) if alarm else _NO_ALARM) + body, parameters)


def floating_types(of: str) -> str:
    """Return the types T and W of a floating dtype, and the conversions between them."""
    if of in SIXTEEN_BIT:
        return f"typedef unsigned short T;\ntypedef float W;\n{_SIXTEEN[of]}"
    kind = "float" if of == "float32" else "double"
    return f"typedef {kind} T;\ntypedef {kind} W;\n{_PLAIN}"


def _types(op: str, dtype: np.dtype[Any]) -> str:
    """Return the types T and W, and the conversions between them."""
    of, size = dtype_name(dtype), dtype.itemsize
    if of in FLOATING:
        return floating_types(of)
    if of in COMPLEX:
        part = "float" if size == 8 else "double"
        return f"struct T {{ {part} re, im; }};\ntypedef T W;\n{_PLAIN}"
    if op in ("sum", "prod"):
        # Unsigned, and no narrower than int, so that overflow wraps, as C++ guarantees.
        kind, wide = _UNSIGNED[size], _UNSIGNED[max(size, 4)]
    else:
        kind = wide = (_SIGNED if dtype.kind == "i" else _UNSIGNED)[size]
    return f"typedef {kind} T;\ntypedef {wide} W;\n{_PLAIN}"


def _both(op: str, of: str) -> str:
    if of == "bool":
        op = {"max": "bor", "min": "band"}.get(op, op)
    if of in COMPLEX:
        value = {"sum": "{ a.re + b.re, a.im + b.im }",
                 "prod": "{ a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re }"}[op]
    else:
        # If b is NaN, the comparison is false, which selects b; the second test selects a NaN in a.
        nan = " || a != a" if of in FLOATING else ""
        value = {"sum": "a + b", "prod": "a * b", "band": "a & b", "bor": "a | b",
                 "bxor": "a ^ b", "max": f"a >= b{nan} ? a : b",
                 "min": f"a <= b{nan} ? a : b"}[op]
    return f"__device__ inline W both(W a, W b) {{ return {value}; }}\n"


def _divided(of: str, divides: str) -> str:
    if divides == "none":
        text = "return x;"
    elif of in COMPLEX:
        # NumPy divides by a complex number, whose imaginary part is zero in a mean.
        text = ("const D ratio = 0 / by, scale = 1 / (by + 0 * ratio); "
                "return { (x.re + x.im * ratio) * scale, (x.im - x.re * ratio) * scale };")
    else:
        text = f"return x {'*' if divides == 'times' else '/'} by;"
    return f"__device__ inline W divided(W x, D by) {{ {text} }}\n"


def _finite(of: str) -> str:
    if of in SIXTEEN_BIT:
        return f"(x & {INFINITY_BITS[of]}u) != {INFINITY_BITS[of]}u"
    return "x.re - x.re == 0 && x.im - x.im == 0" if of in COMPLEX else "x - x == 0"
