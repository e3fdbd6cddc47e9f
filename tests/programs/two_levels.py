"""Combines arrays in all memories over several hosts of several ranks, also uneven ones."""

import numpy as np

import mpiring
from mpiring.memory.arrays import bounds_of
from mpiring.operations.agreement import Call


def check(comm, n, dtype, op, in_window):
    x = np.empty(n, dtype)
    window = comm.empty(n, dtype)
    if in_window(comm.rank):
        x = window
    x[...] = np.arange(n) % 5 + comm.rank
    comm.allreduce(x, op=op, algorithm="hierarchical")
    ranks = np.arange(comm.size)
    want = np.arange(n) % 5 + (ranks.max() if op == "max" else ranks.mean())
    want *= comm.size if op == "sum" else 1
    assert np.array_equal(x, want.astype(dtype)), (n, dtype, op, x, want)


def check_once_per_node(comm, n):
    bounds = bounds_of(n, comm.size)
    x = comm.run(Call("weights"), lambda collectives: collectives.node_array(n, np.float32))
    for step in range(1, 4):
        x[bounds[comm.rank]:bounds[comm.rank + 1]] = comm.rank + 10 * step
        comm.run(Call("gather"), lambda collectives: collectives.allgather_once(x, bounds=bounds))
        want = np.repeat(np.arange(comm.size) + 10 * step, np.diff(bounds))
        assert np.array_equal(x, want), (n, step, x, want)
        comm.barrier()


with mpiring.init() as comm:
    largest = comm.split(0 if comm.rank < 3 else None)
    for group in (comm, largest):
        if group is None:
            continue
        nodes = group.allgather_object(group.node_rank)
        for n in (1, 3000, 300_003):
            for in_window in (lambda rank: True, lambda rank: False, lambda rank: rank % 2,
                              lambda rank: nodes[rank]):
                check(group, n, np.float32, "sum", in_window)
                check(group, n, np.float64, "max", in_window)
                check(group, n, np.float16, "sum", in_window)
            check_once_per_node(group, n)
        handles = [group.iallreduce(np.full(200_000, i, np.float32), algorithm="hierarchical")
                   for i in range(9)]
        for i, handle in enumerate(handles):
            assert (handle.wait() == i * group.size).all()
        if group.rank == 0:
            print("checked", nodes, flush=True)
    if largest is not None:
        largest.close()
