"""Runs operations, each rank by rounds, schedules or handles as it likes; checks all results.

    mpiexec -n 4 python tests/programs/rounds.py 5000 [python|auto]

The ranks agree on the operations, and on nothing else: which way each takes, when, and often where
its vector lies, is chance. Rounds alone, at their full speed, are a million a minute: 10,000,000
show how well the flags hold.
"""

import random
import sys
import time

import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.transport.layout import GATE_TRACED

LENGTHS = 1, 2, 17, 333, 2000, 4096
# In windows: from here on ordinary calls are combined in place, and what is persistent is before.
LONG, LONGEST = 17_000, 150_000
MIDDLE = 2000, 16_000
DTYPES = "float32", "int64", "float16", ml_dtypes.bfloat16
OTHERS = "allgather", "broadcast", "reduce_scatter"


def added(x, *numbers):
    """Return the sum of what the ranks have contributed to `x`: each was rounded, and so is it."""
    return np.array(numbers, x.dtype).astype(np.float64).sum().astype(x.dtype)


def wrong(x, want):
    """End the job unless all of `x` is as it must be."""
    if not (x == want).all():
        print(f"rank {MPI.COMM_WORLD.rank}: WRONG: {x[:5]} … {x[-5:]}, not {want}", flush=True)
        MPI.COMM_WORLD.Abort(1)


class Program:
    """What one rank does.

    Args:
        comm: Its communicator.
        total: How many operations.
    """

    def __init__(self, comm, total):
        self.comm, self.total = comm, total
        self.counter = comm._group.sharing.counter
        self.together, self.dice = random.Random(total), random.Random(100 + comm.rank)
        # In long runs most are rounds, and sleep rarely.
        self.often = min(1, 20_000 / total)
        self.short = [np.zeros(n, dtype) for n in LENGTHS for dtype in DTYPES]
        # Per dtype, two windows and private memory.
        self.memories = {dtype: [
            comm.empty(LONGEST, dtype), comm.empty(LONGEST, dtype), np.zeros(LONGEST, dtype)]
            for dtype in DTYPES}
        vectors = [comm.empty(n, dtype) for n in (5, *MIDDLE, LONG) for dtype in DTYPES]
        self.persistent = [(comm.persistent_allreduce(x), x) for x in vectors]
        # What each of these must be when it is waited for.
        self.under_way, self.started, self.waiting = {}, [], []

    def chance(self, probability):
        """Return whether this rank alone does something."""
        return self.dice.random() < probability * self.often

    def sum_of(self, x, value):
        """Return the sum that `x` becomes if rank r's numbers are (r + 1) * value."""
        return added(x, *[(r + 1) * value for r in range(self.comm.size)])

    def run(self):
        for step in range(self.total):
            value = step % 1000
            if self.together.random() < 0.01 * self.often:
                y = np.full(20_000, self.comm.rank + 1 + step, np.float64)
                self.waiting.append(
                    (self.comm.iallreduce(y), self.sum_of(y, 1) + self.comm.size * step))
            if self.chance(0.01):
                time.sleep(self.dice.random() * 0.002)
            self.counter.open(GATE_TRACED)
            if self.chance(0.3):
                # By a schedule.
                self.counter.close(GATE_TRACED)
            self.one_of_many(self.together.random(), value)
            while self.started and self.dice.random() < 0.3:
                handle, want = self.started.pop(self.dice.randrange(len(self.started)))
                wrong(handle.wait(), want)
            if self.waiting and (len(self.waiting) > 3 or self.together.random() < 0.05):
                handle, want = self.waiting.pop(0)
                wrong(handle.wait(), want)
        for handle, want in self.waiting + self.started:
            wrong(handle.wait(), want)
        for operation in list(self.under_way):
            self.wait(operation)

    def one_of_many(self, kind, value):
        """Run or start one operation; `kind` is from 0 to 1."""
        x = self.together.choice(self.short)
        if kind < 0.1:
            x = self.somewhere()
        elif kind < 0.3:
            self.again(*self.together.choice(self.persistent), value)
            return
        elif kind < 0.5:
            self.other(self.together.choice(OTHERS), x, value)
            return
        x.fill((self.comm.rank + 1) * value)
        if kind < 0.7 and x.size < LONG:
            # Started, and perhaps finished behind the others of this kind.
            self.started.append((self.comm.iallreduce(x.copy()), self.sum_of(x, value)))
        else:
            wrong(self.comm.allreduce(x), self.sum_of(x, value))

    def other(self, kind, x, value):
        """Run a collective that is no allreduce."""
        p = self.comm.size
        x.fill((self.comm.rank + 1) * value)
        if kind == "reduce_scatter":
            wrong(self.comm.reduce_scatter(x), self.sum_of(x, value))
        elif kind == "broadcast":
            wrong(self.comm.broadcast(x, root=value % p), added(x, (value % p + 1) * value))
        else:
            self.comm.allgather(x)
            for r in range(p):
                wrong(x[r * x.size // p:(r + 1) * x.size // p], added(x, (r + 1) * value))

    def somewhere(self):
        """Return a long vector, mostly at the same place as the others'."""
        dtype, n = self.together.choice(DTYPES), LONG
        if self.together.random() < 0.05:
            n = self.together.randrange(LONG, LONGEST)
        memory, offset = self.together.choice((0, 0, 1)), self.together.choice((0, 0, LONG))
        if self.chance(0.1):
            memory, offset = self.dice.choice((0, 1, 2)), self.dice.choice((1, 3000))
        return self.memories[dtype][memory][offset:offset + n][:LONGEST - LONG]

    def again(self, operation, x, value):
        """Call a persistent operation, or start it, while others may do the other."""
        self.wait(operation)
        x.fill((self.comm.rank + 1) * value)
        if self.dice.random() < 0.8:
            wrong(operation(), self.sum_of(x, value))
        else:
            operation.start()
            self.under_way[operation] = self.sum_of(x, value)
        for other in list(self.under_way):
            if self.dice.random() < 0.5:
                self.wait(other)

    def wait(self, operation):
        """Wait for a persistent operation if it is under way."""
        if operation in self.under_way:
            want = self.under_way.pop(operation)
            wrong(operation.wait(), want)


def main():
    total, how = int(sys.argv[1]), (sys.argv[2:] or ["auto"])[0]
    comm = mpiring.Communicator(
        MPI.COMM_WORLD, config=mpiring.Config(rounds=how, operations_in_flight=3))
    # Compiled now, if numba is installed, and not on disk.
    comm.prepare(DTYPES)
    Program(comm, total).run()
    known = [a for prepared in comm._group.fast_calls.prepared for a in (
        prepared.node_call, *prepared._at_positions.values(), *prepared._started) if a]
    codes, places = {a.code is not None for a in known}, sum(a.by_slices for a in known)
    form = {True: "compiled", False: "in Python"}
    count = comm._group.sharing.counter.fast_calls
    print(f"rank {comm.rank}: {total} right, {count} of them fast, "
          f"{' or '.join(sorted(form[code] for code in codes))}, {places} places", flush=True)
    comm.close()


main()
