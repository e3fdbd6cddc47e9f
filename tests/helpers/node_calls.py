"""The contract of collectives on a node, for all tests of rounds."""

import numpy as np

from mpiring.transport.node_call import slot_plan

COMBINE = "allreduce", "reduce_scatter"
KINDS = *COMBINE, "allgather", "broadcast", "barrier"


def plan_of(kind, n, rank, p):
    """Return the plan of a collective; the last rank is the root of broadcasts."""
    return slot_plan(kind, 0 if kind == "barrier" else n, rank, p,
                     *([p - 1] if kind == "broadcast" else []))


def check(kind, x, before, rank):
    """Fail unless a collective has the right result for `before`, the ranks' vectors."""
    n, p, total = x.size, len(before), np.sum(before, axis=0)
    chunk = slice(rank * n // p, (rank + 1) * n // p)
    if kind == "allreduce":
        assert np.array_equal(x, total)
    elif kind == "reduce_scatter":
        assert np.array_equal(x[chunk], total[chunk])
    elif kind == "allgather":
        parts = [before[r][r * n // p:(r + 1) * n // p] for r in range(p)]
        assert np.array_equal(x, np.concatenate(parts))
    else:
        assert np.array_equal(x, before[p - 1 if kind == "broadcast" else rank])
