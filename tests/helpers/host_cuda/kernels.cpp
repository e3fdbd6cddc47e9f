// What CUDA C++ has beyond C++, on one processor: the warps take turns, and so do the threads of a
// warp, from one exchange of the warp to the next. Kernels follow, each in a namespace of its own.

#include <ucontext.h>

#define __global__
#define __device__
#define __launch_bounds__(threads)

// Kernels may run on several threads of the host at once.
struct Index { unsigned int x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Warp {
    ucontext_t scheduler, threads[32];
    char stacks[32][64 << 10];
    void (*kernel)(const void *);
    const void *job;
    // Lanes may be one exchange ahead of others.
    unsigned int words[2][32], exchanges[32];
    bool ended[32];
};
static thread_local Warp *warp;

static void run_thread() {
    warp->kernel(warp->job);
    warp->ended[threadIdx.x % 32] = true;
}

static void run_warp(unsigned int first) {
    for (int lane = 0; lane < 32; ++lane) {
        ucontext_t *thread = &warp->threads[lane];
        getcontext(thread);
        thread->uc_stack.ss_sp = warp->stacks[lane];
        thread->uc_stack.ss_size = sizeof warp->stacks[lane];
        thread->uc_link = &warp->scheduler;
        makecontext(thread, run_thread, 0);
        warp->exchanges[lane] = 0;
        warp->ended[lane] = false;
    }
    while (!warp->ended[31])
        for (int lane = 0; lane < 32; ++lane) {
            threadIdx.x = first + lane;
            swapcontext(&warp->scheduler, &warp->threads[lane]);
            // All threads of a warp take part in all exchanges.
            if (warp->ended[lane] != warp->ended[0]
                || warp->exchanges[lane] != warp->exchanges[0]) __builtin_trap();
        }
}

static void launch(void (*kernel)(const void *), const void *job, unsigned int blocks,
                   unsigned int size) {
    warp = new Warp;
    warp->kernel = kernel;
    warp->job = job;
    gridDim.x = blocks;
    blockDim.x = size;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (unsigned int first = 0; first < size; first += 32) run_warp(first);
    delete warp;
}

// Give a word to the other lanes, and return the words of all lanes.
static const unsigned int *exchanged(unsigned int word) {
    const int lane = threadIdx.x % 32;
    unsigned int *words = warp->words[warp->exchanges[lane]++ % 2];
    words[lane] = word;
    swapcontext(&warp->threads[lane], &warp->scheduler);
    return words;
}

static float __uint_as_float(unsigned int bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int b; __builtin_memcpy(&b, &x, 4); return b; }
static float sqrt(float x) { return __builtin_sqrtf(x); }
static double sqrt(double x) { return __builtin_sqrt(x); }
static int __float2int_rd(float x) { return x != x ? 0 : (int)__builtin_floorf(x); }

static unsigned int __shfl_xor_sync(unsigned int mask, unsigned int x, int other) {
    return exchanged(x)[threadIdx.x % 32 ^ other];
}
static float __shfl_xor_sync(unsigned int mask, float x, int other) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(x), other));
}
static double __shfl_xor_sync(unsigned int mask, double x, int other) {
    unsigned int halves[2];
    __builtin_memcpy(halves, &x, 8);
    for (unsigned int &half : halves) half = __shfl_xor_sync(mask, half, other);
    __builtin_memcpy(&x, halves, 8);
    return x;
}
static unsigned int __ballot_sync(unsigned int mask, int holds) {
    const unsigned int *all = exchanged(holds != 0);
    unsigned int bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= all[lane] << lane;
    return bits;
}

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
