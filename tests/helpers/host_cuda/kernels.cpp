// What CUDA C++ has beyond C++, on one processor: threads take turns. Kernels follow, each in a
// namespace of its own.

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index { unsigned int x; };
// Several threads of the host may launch kernels.
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

static void launch(void (*kernel)(const void *), const void *job, unsigned int blocks,
                   unsigned int size) {
    gridDim.x = blocks;
    blockDim.x = size;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < size; ++threadIdx.x) kernel(job);
}

static float __uint_as_float(unsigned int bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int b; __builtin_memcpy(&b, &x, 4); return b; }

// float16, where a kernel would have the processor convert it.
static float widened(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
        : __builtin_ldexpf((float)(mantissa + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -size : size;
}
static unsigned short narrowed(float x) {
    const unsigned short sign = __builtin_signbit(x) ? 0x8000 : 0;
    const float size = __builtin_fabsf(x);
    if (size != size) return 0x7fff;
    if (size >= 65520) return sign | 0x7c00;
    const int exponent = size < 0x1p-14f ? -14 : __builtin_ilogbf(size);
    return sign | ((exponent + 14) * 1024 + (int)__builtin_nearbyintf(__builtin_ldexpf(size, 10 - exponent)));
}
