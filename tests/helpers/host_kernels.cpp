// What CUDA C++ has beyond C++, on one processor: threads take turns. Kernels follow, each in a
// namespace of its own.
#include <algorithm>
#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;

static void launch(void (*kernel)(const void *), const void *job, unsigned int blocks,
                   unsigned int size) {
    gridDim.x = blocks;
    blockDim.x = size;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < size; ++threadIdx.x) kernel(job);
}

static float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int b; std::memcpy(&b, &x, 4); return b; }

// float16, where a kernel would have the processor convert it.
static float widened(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
        : std::ldexp((float)(mantissa + (exponent ? 1024 : 0)), std::max(exponent, 1) - 25);
    return bits >> 15 ? -size : size;
}
static unsigned short narrowed(float x) {
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (size != size) return 0x7fff;
    if (size >= 65520) return sign | 0x7c00;
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    return sign | ((exponent + 14) * 1024 + (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}
