"""Runs short operations, each rank by rounds, schedules or handles as it likes; checks all results.

    mpiexec -n 4 python tests/programs/rounds.py 5000 [python|auto]

The ranks agree on the operations, and on nothing else: which way each takes, and when, is chance.
Rounds alone, at their full speed, are a million a minute: 10,000,000 show how well the flags hold.
"""

import random
import sys
import time

import numpy as np
from mpi4py import MPI

import mpiring

LENGTHS = 1, 2, 17, 333, 2000, 4096
DTYPES = "float32", "int64"
OTHERS = "allgather", "broadcast", "reduce_scatter"


def wrong(x, want):
    """End the job unless all of `x` is as it must be."""
    if not (x == want).all():
        print(f"rank {MPI.COMM_WORLD.rank}: WRONG: {x[:5]} … {x[-5:]}, not {want}", flush=True)
        MPI.COMM_WORLD.Abort(1)


def other(comm, kind, x, value):
    """Run a collective that is no allreduce on the ranks' multiples of a value, and check it."""
    p = comm.size
    if kind == "reduce_scatter":
        wrong(comm.reduce_scatter(x), p * (p + 1) // 2 * value)
    elif kind == "broadcast":
        wrong(comm.broadcast(x, root=value % p), (value % p + 1) * value)
    else:
        comm.allgather(x)
        for r in range(p):
            wrong(x[r * x.size // p:(r + 1) * x.size // p], (r + 1) * value)


def main():
    total, how = int(sys.argv[1]), (sys.argv[2:] or ["auto"])[0]
    world = MPI.COMM_WORLD
    comm = mpiring.Communicator(world, config=mpiring.Config(rounds=how, operations_in_flight=3))
    together, mine = random.Random(total), random.Random(100 + comm.rank)
    # Compiled now, if numba is installed, and not on disk.
    comm.prepare()
    arrays = [np.zeros(n, dtype) for n in LENGTHS for dtype in DTYPES]
    ranks_sum, waiting, started = comm.size * (comm.size + 1) // 2, [], []
    ordinary = comm._group.short
    # In long runs most are rounds, and sleep rarely.
    often = min(1, 20_000 / total)
    for step in range(total):
        x, value = together.choice(arrays), step % 1000
        x.fill((comm.rank + 1) * value)
        if together.random() < 0.01 * often:
            y = np.full(20_000, comm.rank + 1 + step, np.float64)
            waiting.append((comm.iallreduce(y), ranks_sum + comm.size * step))
        if mine.random() < 0.01 * often:
            time.sleep(mine.random() * 0.002)
        comm._short = None if mine.random() < 0.3 * often else ordinary
        if together.random() < 0.3:
            other(comm, together.choice(OTHERS), x, value)
        elif together.random() < 0.3:
            # Started, and perhaps finished behind the others of this kind.
            started.append((comm.iallreduce(x.copy()), ranks_sum * value))
        else:
            comm.allreduce(x)
            wrong(x, ranks_sum * value)
        while started and mine.random() < 0.3:
            handle, want = started.pop(mine.randrange(len(started)))
            wrong(handle.wait(), want)
        if waiting and (len(waiting) > 3 or together.random() < 0.05):
            handle, want = waiting.pop(0)
            wrong(handle.wait(), want)
    for handle, want in waiting + started:
        wrong(handle.wait(), want)
    codes = {a.begin is not None for a, _ in ordinary._rounds.values()}
    form = {True: "compiled", False: "in Python"}
    print(f"rank {comm.rank}: {total} right, {comm._group.sharing.ledger.rounds} of them rounds, "
          f"{' or '.join(sorted(form[code] for code in codes))}", flush=True)
    comm.close()


main()
