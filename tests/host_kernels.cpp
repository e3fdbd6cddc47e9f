// What CUDA C++ has beyond C++, on one processor: threads of a block take turns, and one that waits
// for its warp gives way. Kernels follow, each in a namespace of its own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;

struct Thread { ucontext_t context; std::vector<char> stack; bool over; };
static std::vector<Thread> threads;
static std::vector<unsigned int> said, arrived, met;
static ucontext_t scheduler;
static void (*of_thread)(const void *);
static const void *job_of_threads;

static void run_thread() {
    of_thread(job_of_threads);
    threads[threadIdx.x].over = true;
}

static void launch(void (*kernel)(const void *), const void *job, unsigned int blocks,
                   unsigned int size) {
    of_thread = kernel;
    job_of_threads = job;
    gridDim.x = blocks;
    blockDim.x = size;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        threads = std::vector<Thread>(size);
        said.assign(size, 0);
        arrived.assign(size / 32, 0);
        met.assign(size / 32, 0);
        for (Thread &thread : threads) {
            thread.stack.resize(32 << 10);
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data();
            thread.context.uc_stack.ss_size = thread.stack.size();
            thread.context.uc_link = &scheduler;
            makecontext(&thread.context, run_thread, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned int i = 0; i < size; ++i)
                if (!threads[i].over) {
                    any = true;
                    threadIdx.x = i;
                    swapcontext(&scheduler, &threads[i].context);
                }
        }
    }
}

static void meet_warp() {
    const unsigned int warp = threadIdx.x / 32, time = met[warp];
    if (++arrived[warp] == 32) {
        arrived[warp] = 0;
        ++met[warp];
    }
    while (met[warp] == time) swapcontext(&threads[threadIdx.x].context, &scheduler);
}

template <typename T> static T said_by(T mine, unsigned int lane) {
    const unsigned int warp = threadIdx.x / 32;
    std::memcpy(&said[threadIdx.x], &mine, 4);
    meet_warp();
    std::memcpy(&mine, &said[warp * 32 + lane], 4);
    meet_warp();
    return mine;
}

template <typename T> static T __shfl_xor_sync(unsigned int, T mine, int by) {
    return said_by(mine, threadIdx.x % 32 ^ by);
}
template <typename T> static T __shfl_down_sync(unsigned int, T mine, int by) {
    return said_by(mine, std::min(threadIdx.x % 32 + by, 31u));
}
template <typename T> static T __shfl_sync(unsigned int, T mine, int lane) {
    return said_by(mine, lane);
}
static unsigned int __ballot_sync(unsigned int, int mine) {
    const unsigned int warp = threadIdx.x / 32;
    said[threadIdx.x] = mine != 0;
    meet_warp();
    unsigned int all = 0;
    for (unsigned int lane = 0; lane < 32; ++lane) all |= said[warp * 32 + lane] << lane;
    meet_warp();
    return all;
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
