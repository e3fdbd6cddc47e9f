// What mpiring calls of libnccl.so.2, as nccl.h declares it, for ranks of one host and their memory.
//
// A call does its work before it returns, and waits for the same call of the other ranks. If theirs
// differs, it waits for ever, as NCCL may; an abort ends it. Variables of a rank make it fail:
// FAKE_NCCL_VERSION, FAKE_NCCL_NO_ID, FAKE_NCCL_NO_INIT, FAKE_NCCL_HANGS, and FAKE_NCCL_FAILS, the
// number of calls after which it has an asynchronous error.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <functional>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE };
enum { RANKS = 8, SLOT = 64 << 10 };
// Tests end before launching.py ends their job without a reason.
static const int DEADLINE_S = 150;

typedef struct { unsigned char bytes[128]; } Identity;

struct Shared {
    std::atomic<long> attached, arrived[RANKS];
    std::atomic<bool> failed;
    std::atomic<size_t> signature[RANKS], filled[RANKS][RANKS];  // filled: bytes on their way
    unsigned char slot[RANKS][SLOT], mail[RANKS][RANKS][SLOT / 8];
};

struct Communicator {
    Shared *shared;
    int rank, size;
    long barriers = 0, calls = 0;
    std::atomic<bool> aborted{false}, busy{false};
};

static bool flag(const char *name) { return getenv(name) != nullptr; }

// Wait, and return false if the communicator is aborted.
static bool wait_until(Communicator *c, const char *what, std::function<bool()> holds) {
    const timespec pause = {0, 20000};
    const time_t end = time(nullptr) + DEADLINE_S;
    while (!holds()) {
        if (c->aborted) return false;
        if (time(nullptr) > end) {
            fprintf(stderr, "nccl.cpp: rank %d has waited %d s for %s\n", c->rank, DEADLINE_S, what);
            _exit(70);
        }
        nanosleep(&pause, nullptr);
    }
    return true;
}

static bool barrier(Communicator *c) {
    const long number = ++c->barriers;
    c->shared->arrived[c->rank] = number;
    return wait_until(c, "a barrier", [=] {
        return std::all_of(c->shared->arrived, c->shared->arrived + c->size,
                           [=](auto &other) { return other >= number; });
    });
}

template <class T> static void reduce_as(T *out, const T *x, size_t n, int op) {
    for (size_t i = 0; i < n; ++i)
        out[i] = op == 0 ? out[i] + x[i] : op == 1 ? out[i] * x[i] : op == 2 ? std::max(out[i], x[i])
                                                                             : std::min(out[i], x[i]);
}

static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 0, 4, 8};
    return type >= 0 && type < 9 ? widths[type] : 0;
}

static void reduce(void *out, const void *x, size_t n, int type, int op) {
    switch (type) {
#define CASE(number, T) case number: return reduce_as((T *)out, (const T *)x, n, op)
        CASE(0, signed char); CASE(1, unsigned char); CASE(2, int); CASE(3, unsigned int);
        CASE(4, long); CASE(5, unsigned long); CASE(7, float); CASE(8, double);
    }
}

// Copy a vector of rank `root`, or combine those of all ranks if `op` is not negative, into `out`
// of one rank, or of all if `to` is negative.
static void collect(Communicator *c, const void *x, void *out, size_t n, int type, int op, int root,
                    int to) {
    const size_t step = SLOT / width(type), size = width(type);
    for (size_t start = 0; start < n; start += step) {
        const size_t count = std::min(step, n - start), from = start * size;
        if (op >= 0 || c->rank == root)
            memcpy(c->shared->slot[c->rank], (const char *)x + from, count * size);
        if (!barrier(c)) return;
        if (to < 0 || c->rank == to) {
            memcpy((char *)out + from, c->shared->slot[op < 0 ? root : 0], count * size);
            for (int rank = 1; op >= 0 && rank < c->size; ++rank)
                reduce((char *)out + from, c->shared->slot[rank], count, type, op);
        }
        if (!barrier(c)) return;
    }
}

struct Message { void *x; size_t bytes; int peer; bool sends; };
static thread_local int depth = 0;
static thread_local std::vector<std::function<void()>> calls;
static thread_local std::vector<Message> messages;
static thread_local Communicator *sender;

static int later(std::function<void()> call) {
    if (depth) calls.push_back(call);
    else call();
    return SUCCESS;
}

// Run a call that all ranks make with the same numbers.
static int together(Communicator *c, std::vector<size_t> numbers, std::function<void()> call) {
    return later([=] {
        if (c->busy.exchange(true)) { fprintf(stderr, "two threads are in NCCL\n"); _exit(71); }
        size_t signature = ++c->calls;
        for (size_t number : numbers) signature = signature * 1000003 + number;
        c->shared->signature[c->rank] = signature;
        if (barrier(c) && wait_until(c, "the same call of other ranks", [=] {
            return std::all_of(c->shared->signature, c->shared->signature + c->size,
                               [=](auto &other) { return other == signature; });
        })) call();
        barrier(c);
        c->busy = false;
    });
}

// Exchange the messages of a group, piece by piece.
static void exchange() {
    auto open = messages;
    Shared *shared = sender->shared;
    wait_until(sender, "messages", [&] {
        for (auto &m : open) {
            auto &filled = m.sends ? shared->filled[sender->rank][m.peer]
                                   : shared->filled[m.peer][sender->rank];
            auto *mail = m.sends ? shared->mail[sender->rank][m.peer]
                                 : shared->mail[m.peer][sender->rank];
            const size_t n = m.sends ? std::min(m.bytes, (size_t)SLOT / 8) : filled.load();
            if (!m.bytes || (m.sends ? filled != 0 : !n)) continue;
            if (n > m.bytes) return false;  // more than was expected
            if (m.sends) memcpy(mail, m.x, n);
            else memcpy(m.x, mail, n);
            filled = m.sends ? n : 0;
            m.x = (char *)m.x + n, m.bytes -= n;
        }
        return std::all_of(open.begin(), open.end(), [](auto &m) { return !m.bytes; });
    });
}

extern "C" {

int ncclGetVersion(int *version) {
    const char *text = getenv("FAKE_NCCL_VERSION");
    *version = text ? atoi(text) : 22809;
    return SUCCESS;
}

int ncclGetUniqueId(Identity *identity) {
    static std::atomic<int> count{0};
    if (flag("FAKE_NCCL_NO_ID")) return SYSTEM_ERROR;
    // The first byte of a real identity may be 0, too.
    memset(identity, 0, sizeof *identity);
    snprintf((char *)identity->bytes + 1, 120, "/fake-nccl-%d-%d", (int)getpid(), ++count);
    return SUCCESS;
}

int ncclCommInitRank(Communicator **communicator, int size, Identity identity, int rank) {
    if (size > RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    const char *name = (const char *)identity.bytes + 1;
    const int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return SYSTEM_ERROR;
    auto *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    auto *c = *communicator = new Communicator{(Shared *)memory, rank, size};
    const bool fails = flag("FAKE_NCCL_NO_INIT");
    if (fails) c->shared->failed = true;
    ++c->shared->attached;
    while (flag("FAKE_NCCL_HANGS")) sleep(1);
    wait_until(c, "the other ranks", [=] { return c->shared->attached >= size; });
    shm_unlink(name);
    return fails ? INTERNAL_ERROR : c->shared->failed ? REMOTE : SUCCESS;
}

int ncclCommDestroy(Communicator *c) { munmap(c->shared, sizeof(Shared)); return SUCCESS; }
int ncclCommAbort(Communicator *c) { c->aborted = true; return SUCCESS; }

int ncclCommGetAsyncError(Communicator *c, int *status) {
    const char *text = getenv("FAKE_NCCL_FAILS");
    *status = text && c->calls >= atoi(text) ? REMOTE : SUCCESS;
    return SUCCESS;
}

const char *ncclGetErrorString(int status) { return status == REMOTE ? "remote process exited" : "a fault"; }
const char *ncclGetLastError(Communicator *c) { return "in a test"; }

int ncclAllReduce(void *x, void *out, size_t n, int type, int op, Communicator *c, void *stream) {
    if (!width(type) || op < 0 || op > 3) return INVALID_ARGUMENT;
    return together(c, {1, n, (size_t)type, (size_t)op},
                    [=] { collect(c, x, out, n, type, op, 0, -1); });
}

int ncclReduceScatter(void *x, void *out, size_t n, int type, int op, Communicator *c, void *stream) {
    if (!width(type) || op < 0 || op > 3) return INVALID_ARGUMENT;
    return together(c, {2, n, (size_t)type, (size_t)op}, [=] {
        for (int rank = 0; rank < c->size; ++rank)
            collect(c, (char *)x + rank * n * width(type), out, n, type, op, 0, rank);
    });
}

int ncclReduce(void *x, void *out, size_t n, int type, int op, int root, Communicator *c, void *stream) {
    if (!width(type) || op < 0 || op > 3) return INVALID_ARGUMENT;
    return together(c, {3, n, (size_t)type, (size_t)op, (size_t)root},
                    [=] { collect(c, x, out, n, type, op, 0, root); });
}

int ncclAllGather(void *x, void *out, size_t n, int type, Communicator *c, void *stream) {
    if (!width(type)) return INVALID_ARGUMENT;
    return together(c, {4, n, (size_t)type}, [=] {
        for (int rank = 0; rank < c->size; ++rank)
            collect(c, x, (char *)out + rank * n * width(type), n, type, -1, rank, -1);
    });
}

int ncclBroadcast(void *x, void *out, size_t n, int type, int root, Communicator *c, void *stream) {
    if (!width(type)) return INVALID_ARGUMENT;
    return together(c, {5, n, (size_t)type, (size_t)root},
                    [=] { collect(c, x, out, n, type, -1, root, -1); });
}

int ncclGroupStart() { ++depth; return SUCCESS; }

int ncclGroupEnd() {
    if (--depth) return SUCCESS;
    for (auto &call : calls) call();
    if (!messages.empty()) exchange();
    calls.clear(), messages.clear();
    return SUCCESS;
}

static int message(void *x, size_t n, int type, int peer, Communicator *c, bool sends) {
    if (!width(type) || peer == c->rank) return INVALID_ARGUMENT;
    ncclGroupStart();
    sender = c;
    messages.push_back({x, n * width(type), peer, sends});
    return ncclGroupEnd();
}

int ncclSend(void *x, size_t n, int type, int peer, Communicator *c, void *stream) {
    return message(x, n, type, peer, c, true);
}

int ncclRecv(void *x, size_t n, int type, int peer, Communicator *c, void *stream) {
    return message(x, n, type, peer, c, false);
}

}
