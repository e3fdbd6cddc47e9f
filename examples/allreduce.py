"""Sums a vector over ranks while they compute: mpirun -n 4 python examples/allreduce.py"""
import numpy as np

import mpiring

with mpiring.init() as comm:
    x = np.full(1_000_000, comm.rank, np.float32)
    handle = comm.iallreduce(x, op="sum")
    norm = np.linalg.norm(np.random.default_rng(comm.rank).random((500, 500)))
    total = handle.wait()[0]
    print(f"rank {comm.rank} of {comm.size}: the ranks add up to {total:.0f}; norm {norm:.1f}")
