"""Prints how many operations the first allreduce needed to find out what is fast."""

import numpy as np

import mpiring

with mpiring.init() as comm:
    counts = []
    for n in (10, 300_000, 10):
        before = comm.statistics.operations
        x = np.full(n, comm.rank, np.float32)
        assert (comm.allreduce(x) == comm.size * (comm.size - 1) / 2).all()
        counts.append(comm.statistics.operations - before)
    assert counts[1:] == [1, 1], counts
    if comm.rank == 0:
        print("tuned", counts[0] - 1, "operations", flush=True)
