"""The codecs in CUDA C++: one pass over memory, and the same bits as the host's loops.

Blocks that share a scale are done by one warp each: it finds the scale, and reads the block, which
the cache then holds, once more. All else goes element by element, in packs of four.
"""

import functools
from typing import Any, Protocol, cast

import numpy as np

from ...gpu.base import DeviceVector
from ...gpu.kernels import PACK_BYTES, SIXTEEN, THREADS, Kernel
from . import base, blocks
from .blocks import EightBit
from .halves import Halves
from .signs import Sign

# Those that have kernels.
Codec = EightBit | Sign | Halves

_LANES = 32
_PACKED = 4
_PARAMETERS = np.dtype([("x", "u8"), ("scales", "u8"), ("codes", "u8"), ("lost", "u8"),
                        ("n", "i8"), ("seed", "u4"), ("packed", "i4")], align=True)

_JOB = """
struct Job {
    float *x;           // what is encoded, or where it is decoded to
    float *scales;
    Code *codes;
    float *lost;
    long long n;
    unsigned int seed;
    int packed;         // all are aligned to packs, and each block has whole ones
};

template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T lane[N]; };

template <int N, typename T> __device__ inline Pack<T, N> read(const T *from, long long i) {
    return *reinterpret_cast<const Pack<T, N> *>(from + i);
}
template <int N, typename T> __device__ inline void write(T *to, long long i, Pack<T, N> pack) {
    *reinterpret_cast<Pack<T, N> *>(to + i) = pack;
}
"""

# What is done to N elements from i on, by every thread on its own.
_EACH = """
extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(const Job job) {
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long packs = job.packed ? job.n / 4 : 0;
    for (long long i = first; i < packs; i += step) part<4>(job, i * 4);
    for (long long i = packs * 4 + first; i < job.n; i += step) part<1>(job, i);
}
"""
# What is done to each block by the 32 threads of a warp.
_WARPS = """
extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(const Job job) {
    const int lane = threadIdx.x %% 32;
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const long long step = (long long)gridDim.x * blockDim.x / 32;
    for (long long b = first; b * BLOCK < job.n; b += step) {
        const long long start = b * BLOCK;
        const long long end = start + BLOCK < job.n ? start + BLOCK : job.n;
        if (job.packed && (end - start) %% 4 == 0) block<4>(job, b, start, end, lane);
        else block<1>(job, b, start, end, lane);
    }
}
"""

_ENCODE_HALVES = """
template <int N> __device__ inline void part(const Job &job, long long i) {
    Pack<float, N> x = read<N>(job.x, i);
    Pack<Code, N> codes;
    for (int k = 0; k < N; ++k) codes.lane[k] = narrowed(x.lane[k]);
    write(job.codes, i, codes);
    if (LOST) {
        for (int k = 0; k < N; ++k) x.lane[k] -= widened(codes.lane[k]);
        write(job.lost, i, x);
    }
}
"""
_DECODE_HALVES = "return widened(codes.lane[k]);"
_DECODE_BYTES = "return (float)codes.lane[k] * job.scales[i / BLOCK];"
_DECODE = """
template <int N> __device__ inline float decoded(
        const Job &job, const Pack<Code, N> &codes, long long i, int k) { %s }

template <int N> __device__ inline void part(const Job &job, long long i) {
    const Pack<Code, N> codes = read<N>(job.codes, i);
    Pack<float, N> x;
    if (ADDS) x = read<N>(job.x, i);
    for (int k = 0; k < N; ++k) {
        const float y = decoded<N>(job, codes, i, k);
        x.lane[k] = ADDS ? x.lane[k] + y : y;
    }
    write(job.x, i, x);
}
"""
_DECODE_SIGNS = """
template <int N> __device__ inline void part(const Job &job, long long i) {
    const unsigned int scale = __float_as_uint(job.scales[i / BLOCK]);
    const unsigned int signs = job.codes[i / 32] >> i % 32;
    Pack<float, N> x;
    if (ADDS) x = read<N>(job.x, i);
    for (int k = 0; k < N; ++k) {
        const float y = __uint_as_float(scale ^ (signs >> k) << 31);
        x.lane[k] = ADDS ? x.lane[k] + y : y;
    }
    write(job.x, i, x);
}
"""
_ENCODE_BYTES = """
constexpr int ROUNDS = 4;

template <int N> __device__ inline void store_codes(
        const Job &job, long long i, Pack<float, N> x, float scale, float inverse) {
    Pack<Code, N> codes;
    for (int k = 0; k < N; ++k) {
        unsigned int h = (unsigned int)(i + k) * GOLDEN + job.seed;
        h = (h ^ h >> 16) * FIRST;
        h = (h ^ h >> 15) * SECOND >> 9;
        const float u = (float)(int)h * FRACTION;
        codes.lane[k] = inverse > 0 ? (Code)(int)floorf(x.lane[k] * inverse + u) : (Code)0;
        x.lane[k] -= (float)codes.lane[k] * scale;
    }
    write(job.codes, i, codes);
    if (LOST) write(job.lost, i, x);
}

template <int N> __device__ inline void block(
        const Job &job, long long b, long long start, long long end, int lane) {
    unsigned int peak = 0;
    #pragma unroll 4
    for (long long i = start + lane * N; i < end; i += 32 * N) {
        const Pack<float, N> x = read<N>(job.x, i);
        for (int k = 0; k < N; ++k) {
            const unsigned int bits = __float_as_uint(x.lane[k]) & 0x7fffffffu;
            peak = bits > peak ? bits : peak;
        }
    }
    for (int half = 16; half; half /= 2) {
        const unsigned int other = __shfl_xor_sync(0xffffffffu, peak, half);
        peak = other > peak ? other : peak;
    }
    const float largest = __uint_as_float(peak);
    float scale = largest / STEPS, inverse = 0;
    if (scale > LARGEST) scale = LARGEST;
    if (peak >= 0x7f800000u) scale = __uint_as_float(0x7fc00000u);
    else if (scale < SMALLEST) scale = 0;
    else inverse = JUST_BELOW / largest;
    if (lane == 0) job.scales[b] = scale;
    for (long long first = start + lane * N; first < end; first += ROUNDS * 32 * N) {
        // All of them before the first is stored: the compiler would not dare to.
        Pack<float, N> x[ROUNDS];
        #pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const long long i = first + r * 32 * N;
            if (i < end) x[r] = read<N>(job.x, i);
        }
        #pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const long long i = first + r * 32 * N;
            if (i < end) store_codes<N>(job, i, x[r], scale, inverse);
        }
    }
}
"""
# The order of the sum is the host's: 32 lanes, in the order of the elements, and then by halves.
_ENCODE_SIGNS = """
constexpr int ROUNDS = BLOCK < 256 ? BLOCK / 32 : 8;

__device__ inline void read_rounds(
        const Job &job, long long first, long long end, float (&x)[ROUNDS]) {
    #pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const long long i = first + r * 32;
        x[r] = i < end ? job.x[i] : 0.0f;
    }
}

template <int N> __device__ inline void block(
        const Job &job, long long b, long long start, long long end, int lane) {
    if (N > 1) return block<1>(job, b, start, end, lane);
    float sum = 0, x[ROUNDS];
    for (long long from = start; from < end; from += ROUNDS * 32) {
        // All of them before the first is stored: the compiler would not dare to.
        read_rounds(job, from + lane, end, x);
        #pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            sum += fabsf(x[r]);
            const unsigned int signs = __ballot_sync(0xffffffffu, __float_as_uint(x[r]) >> 31);
            if (lane == 0 && from + r * 32 < end) job.codes[from / 32 + r] = signs;
        }
    }
    for (int half = 16; half; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
    float scale = __shfl_sync(0xffffffffu, sum, 0) / (float)(end - start);
    if (scale != scale) scale = __uint_as_float(0x7fc00000u);
    if (lane == 0) job.scales[b] = scale;
    for (long long first = start + lane; LOST && first < end; first += ROUNDS * 32) {
        read_rounds(job, first, end, x);
        #pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (first + r * 32 < end)
                job.lost[first + r * 32] = x[r] - (__float_as_uint(x[r]) >> 31 ? -scale : scale);
    }
}
"""


class Launching(Protocol):
    """A stream that takes kernels."""

    def launch(self, kernel: Kernel, work: int, **values: object) -> None:
        """Queue a kernel; see gpu.base.Stream."""


def at(codec: base.Codec, x: Any) -> base.Codec:
    """Return the codec for vectors in the memory that `x` is in."""
    return OnDevice(cast(Codec, codec), x.device) if isinstance(x, DeviceVector) else codec


class OnDevice:
    """A codec of vectors that lie on a GPU; see `base.Codec`. Its work is queued there.

    Args:
        codec: One of those that have kernels.
        stream: Takes the work: a Device, or a stream of it.
    """

    def __init__(self, codec: Codec, stream: Launching) -> None:
        self._codec, self._stream = codec, stream

    @property
    def alignment(self) -> int:
        """Vectors may be cut at multiples of this."""
        return self._codec.alignment

    def payload_size(self, n: int) -> int:
        """Return the bytes that n elements take."""
        return self._codec.payload_size(n)

    def encode(self, x: Any, payload: Any, lost: Any, key: int) -> None:
        """See `base.Codec.encode`."""
        codec = self._codec
        seed = base.mixed(key) if isinstance(codec, EightBit) else 0
        work = x.size if isinstance(codec, Halves) else -(-x.size // codec.alignment) * _LANES
        self._launch(encoder(codec, lost is not None), work, x, payload, lost, seed)

    def decode(self, payload: Any, out: Any, *, adds: bool = False) -> None:
        """See `base.Codec.decode`."""
        self._launch(decoder(self._codec, adds), out.size, out, payload, None, 0)

    def is_finite(self, payload: Any, n: int) -> bool:
        """Return True: to look would be to wait. What is decoded shows it."""
        return True

    def _launch(self, kernel: Kernel, work: int, x: DeviceVector, payload: DeviceVector,
                lost: DeviceVector | None, seed: int) -> None:
        codec = self._codec
        base.check_size(cast(Any, payload), x.size, codec.payload_size(x.size))
        if not x.size:
            return
        scales = 0 if isinstance(codec, Halves) else 4 * -(-x.size // codec.alignment)
        codes = payload.address + scales
        addresses = [x.address] if lost is None else [x.address, lost.address]
        each = 4 if isinstance(codec, Sign) else _PACKED * _code_bytes(codec)
        packed = (all(address % PACK_BYTES == 0 for address in addresses) and codes % each == 0
                  and (isinstance(codec, Halves) or codec.alignment % _PACKED == 0))
        self._stream.launch(
            kernel, work, x=x.address, scales=payload.address, codes=codes,
            lost=0 if lost is None else lost.address, n=x.size, seed=seed, packed=packed)


def _code_bytes(codec: Codec) -> int:
    return {EightBit: 1, Halves: 2, Sign: 4}[type(codec)]


@functools.lru_cache(maxsize=256)
def encoder(codec: Codec, lost: bool) -> Kernel:
    """Return the kernel that encodes.

    Args:
        codec: One of those that have kernels.
        lost: It also stores what is lost.
    """
    name = f"mpiring_encode_{_name(codec)}{'_and_lost' * lost}"
    body = {EightBit: _ENCODE_BYTES + _WARPS, Sign: _ENCODE_SIGNS + _WARPS,
            Halves: _ENCODE_HALVES + _EACH}[type(codec)]
    constants = f"constexpr bool LOST = {str(lost).lower()};\n"
    if isinstance(codec, EightBit):
        constants += _constants_of_bytes()
    return _kernel(name, codec, constants, body)


@functools.lru_cache(maxsize=256)
def decoder(codec: Codec, adds: bool) -> Kernel:
    """Return the kernel that decodes.

    Args:
        codec: One of those that have kernels.
        adds: It adds what it decodes.
    """
    name = f"mpiring_{'add' if adds else 'decode'}_{_name(codec)}"
    body = {EightBit: _DECODE % _DECODE_BYTES, Sign: _DECODE_SIGNS,
            Halves: _DECODE % _DECODE_HALVES}[type(codec)]
    return _kernel(name, codec, f"constexpr bool ADDS = {str(adds).lower()};\n", body + _EACH)


def _name(codec: Codec) -> str:
    if isinstance(codec, Halves):
        return codec.dtype
    return f"{type(codec).__name__.lower()}_{codec.block}"


def _kernel(name: str, codec: Codec, constants: str, body: str) -> Kernel:
    code = {EightBit: "signed char", Halves: "unsigned short", Sign: "unsigned int"}[type(codec)]
    text = f"typedef {code} Code;\n{constants}"
    if isinstance(codec, Halves):
        text += SIXTEEN[codec.dtype]
    else:
        text += f"constexpr long long BLOCK = {codec.alignment};\n"
    # Not by %: the sources have others.
    tail = body.replace("%(threads)d", str(THREADS)).replace("%(name)s", name).replace("%%", "%")
    return Kernel(name, text + _JOB + tail, _PARAMETERS)


def _constants_of_bytes() -> str:
    """Return the constants of the host's codec, exactly."""
    floats = {"STEPS": blocks.STEPS, "LARGEST": blocks.LARGEST, "SMALLEST": blocks.SMALLEST,
              "JUST_BELOW": blocks.JUST_BELOW, "FRACTION": blocks.FRACTION}
    numbers = {"GOLDEN": blocks.GOLDEN, "FIRST": blocks.FIRST, "SECOND": blocks.SECOND}
    return "".join(
        [*(f"constexpr float {name} = {float(value).hex()}f;\n" for name, value in floats.items()),
         *(f"constexpr unsigned int {name} = {int(value):#x}u;\n"
           for name, value in numbers.items())])
