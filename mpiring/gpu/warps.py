"""Generates the CUDA C++ kernels whose warps each process blocks of a vector.

A warp reads a tile of 32 columns, one for each lane, into registers. A row is one access of
adjacent elements, so vectors may begin at any element, unlike those of packs. All rows of a tile
are read at once, because a warp that waits for one row after the other would not use the memory's
bandwidth.

Each operation is rounded separately (`kernels.OPTIONS`), so results have the bits of the host.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .kernels import CONSTANT, THREADS, Kernel, floating_types

WARP = 32
# Largest number of rows in a tile. With more, registers limit the number of resident warps.
_ROWS = 8

_TEXT = """
constexpr long long BLOCK = %(block)d;
constexpr int ROWS = %(rows)d, TILE = 32 * ROWS;
// If a block has several tiles, a second pass reads them again, from the cache.
constexpr bool SEVERAL = BLOCK > TILE;

// Read the next tile of `left` elements; elements after the last one are zero.
template <class X> __device__ inline void load(X (&tile)[ROWS], const X *x, long long left) {
    const int lane = threadIdx.x %% 32, n = left < TILE ? (int)left : TILE;
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        tile[row] = 32 * row + lane < n ? x[32 * row + lane] : X();
}

template <class X> __device__ inline void store(X *x, const X (&tile)[ROWS], long long left) {
    const int lane = threadIdx.x %% 32, n = left < TILE ? (int)left : TILE;
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        if (32 * row + lane < n) x[32 * row + lane] = tile[row];
}

// Add up the lanes' numbers, in pairs; all lanes get the same bits.
template <class X> __device__ inline X sum_of_lanes(X x) {
    #pragma unroll
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

struct Job {
%(fields)s
    long long n;
};

extern "C" __global__ void __launch_bounds__(%(threads)d)
%(name)s(const MPIRING_CONSTANT Job job) {
    const int lane = threadIdx.x %% 32;
    const long long blocks = (job.n - 1) / BLOCK + 1;
    const long long warps = (long long)gridDim.x * blockDim.x / 32;
    long long block = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (; block < blocks; block += warps) {
        const long long start = block * BLOCK;
        const long long size = job.n - start < BLOCK ? job.n - start : BLOCK;
%(body)s    }
}
"""


@dataclass(frozen=True, eq=False)
class WarpKernel(Kernel):
    """A kernel for `Stream.launch`; a warp processes `block` elements at a time.

    The struct has the arguments, and then the length of the first one.
    """

    block: int


def warp_kernel(name: str, arguments: Mapping[str, str], body: str, *,
                block: int = WARP * _ROWS, declarations: str = "") -> WarpKernel:
    """Return a kernel, given the C++ types of its arguments and the statements for one block.

    The statements use `job`, the number `block` of the block, its `start` and `size`, and the
    thread's `lane`. A kernel without `block` is elementwise, and a block is one tile.
    """
    fields = "".join(f"    {kind} {argument};\n" for argument, kind in arguments.items())
    text = _TEXT % {"name": f"mpiring_{name}", "block": block, "threads": THREADS, "body": body,
                    "rows": min(-(-block // WARP), _ROWS), "fields": fields}
    parameters = np.dtype([*((argument, _dtype_of(kind)) for argument, kind in arguments.items()),
                           ("n", "i8")], align=True)
    return WarpKernel(f"mpiring_{name}", CONSTANT + declarations + text, parameters, block)


def _dtype_of(kind: str) -> str:
    return "u8" if kind.endswith("*") else {"unsigned int": "u4", "float": "f4", "double": "f8",
                                            "bool": "?"}[kind]


@functools.cache
def narrowing(of: str) -> WarpKernel:
    """Return the kernel that converts float32 to another floating dtype, to nearest.

    Its arguments are `x`, `lost`, `seed`, which it ignores, and `out`. Unless `lost` is None, it is
    overwritten by `x` minus the result.
    """
    arguments = {"x": "const float *", "lost": "float *", "seed": "unsigned int", "out": "T *"}
    return warp_kernel(f"{of}_from_float32", arguments, declarations=floating_types(of), body="""
        float x[ROWS];
        T code[ROWS];
        load(x, job.x + start, size);
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) code[row] = narrowed((W)x[row]);
        store(job.out + start, code, size);
        if (job.lost) {
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) x[row] -= (float)widened(code[row]);
            store(job.lost + start, x, size);
        }
""")


@functools.cache
def widening(of: str) -> WarpKernel:
    """Return the kernel that converts another floating dtype to float32.

    Its arguments are `out`, `adds` and `x`. If `adds`, it adds the result to `out`.
    """
    arguments = {"out": "float *", "adds": "bool", "x": "const T *"}
    return warp_kernel(f"float32_from_{of}", arguments, declarations=floating_types(of), body="""
        T x[ROWS];
        float out[ROWS];
        load(x, job.x + start, size);
        if (job.adds) load(out, job.out + start, size);
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float wide = (float)widened(x[row]);
            out[row] = job.adds ? out[row] + wide : wide;
        }
        store(job.out + start, out, size);
""")


@functools.cache
def multiplying() -> WarpKernel:
    """Return the kernel that multiplies the vector `x` of float32 by `factor`."""
    return warp_kernel("multiply", {"x": "float *", "factor": "float"}, """
        float x[ROWS];
        load(x, job.x + start, size);
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) x[row] *= job.factor;
        store(job.x + start, x, size);
""")
