// What mpiring calls of libcuda.so.1, as cuda.h declares it: a stream is the thread that queues work.

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;
enum { SUCCESS = 0, INVALID_VALUE = 1, WAIT_VALUE_32 = 1, WRITE_VALUE_32 = 2 };

typedef union {
    int operation;
    struct {
        int operation;
        CUdeviceptr address;
        union { uint32_t value; uint64_t value64; };
        unsigned int flags;
        CUdeviceptr alias;
    } memory;
    uint64_t pad[6];
} CUstreamBatchMemOpParams;

// Tests end before launching.py ends their job without a reason.
static const int DEADLINE_S = 150;

static void wait_for(const uint32_t *word, uint32_t value) {
    const timespec pause = {0, 20000};
    const time_t end = time(nullptr) + DEADLINE_S;
    while ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) {
        if (time(nullptr) > end) {
            fprintf(stderr, "host_cuda: a stream of process %d has waited %d s for %u in a word that "
                    "is %u\n", (int)getpid(), DEADLINE_S, value, *word);
            _exit(70);
        }
        nanosleep(&pause, nullptr);
    }
}

extern "C" int cuStreamBatchMemOp_v2(void *stream, unsigned int count,
                                     CUstreamBatchMemOpParams *operations, unsigned int flags) {
    if (!stream || !count || count >= 256 || flags) return INVALID_VALUE;
    for (unsigned int i = 0; i < count; ++i) {
        const auto &x = operations[i].memory;
        if (!x.address || x.address % 4 || x.flags) return INVALID_VALUE;
        if (x.operation != WAIT_VALUE_32 && x.operation != WRITE_VALUE_32) return INVALID_VALUE;
    }
    for (unsigned int i = 0; i < count; ++i) {
        const auto &x = operations[i].memory;
        if (x.operation == WAIT_VALUE_32) wait_for((const uint32_t *)x.address, x.value);
        else __atomic_store_n((uint32_t *)x.address, x.value, __ATOMIC_RELEASE);
    }
    return SUCCESS;
}
