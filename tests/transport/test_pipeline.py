"""Long private vectors on a node, by compiled code, by Python, and by both at once."""

import random

import contract
import numpy as np
import pytest

from mpiring.collectives import shared
from mpiring.memory.reduction import reduction
from mpiring.record.counter import OperationCounter
from mpiring.transport import compiled, waiting
from mpiring.transport.base import HEADER_BYTES, Task
from mpiring.transport.layout import NODE_MEMORY_BYTES
from mpiring.transport.node_memory import NodeMemory


def combined(xs, op, piece_bytes, codes):
    """Combine vectors of ranks that come late in turns; `codes` says which have the code."""
    p, dice = len(xs), random.Random(xs[0].size)
    segments = [np.zeros(NODE_MEMORY_BYTES, np.uint8) for _ in range(p)]
    memories = [NodeMemory(segments, rank, range(p), OperationCounter())
                for rank in range(p)]
    nodes = [memory.node(0, bytes(HEADER_BYTES), 7) for memory in memories]

    def program(rank):
        yield (nodes[rank].barrier(),)
        compiled.code = codes[rank]
        yield from shared.staged(nodes[rank], xs[rank], reduction(op, xs[0].dtype, p), piece_bytes)

    tasks = {rank: Task(program(rank)) for rank in range(p)}
    while tasks:
        rank = dice.choice(sorted(tasks))
        # Read when the schedule begins to combine; no other rank steps meanwhile.
        compiled.code = codes[rank]
        for _ in range(dice.choice([1, 1, 5])):
            tasks[rank].step()
        if tasks[rank].done:
            del tasks[rank]
    return [node.count for node in nodes]


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_ways_give_the_same_bits_in_as_many_barriers(dtype, p, monkeypatch):
    code = compiled.code
    monkeypatch.setattr(compiled, "code", code)
    monkeypatch.setattr(waiting, "PIECE_POLLS", 2)
    assert code("sum", dtype, p) is not None
    ways = {"Python": [lambda *_: None] * p, "compiled": [code] * p,
            "either": [code if rank % 2 else lambda *_: None for rank in range(p)]}
    for op in ("sum", "mean"):
        for n in (1, p, 1000, 4097, 120_001):
            # A call of compiled code ends after 32 pieces.
            for piece_bytes in (1024, 1 << 20) if n < 10_000 else (1 << 20,):
                counts, expected = set(), None
                for codes in ways.values():
                    xs = [contract.contribution(rank, n, dtype) for rank in range(p)]
                    counts.add(tuple(combined(xs, op, piece_bytes, codes)))
                    expected = expected or xs[0].tobytes()
                    assert all(x.tobytes() == expected for x in xs)
                    contract.check(xs[0], p, op)
                assert len(counts) == 1


@pytest.mark.usefixtures("machine_code")
def test_the_order_of_ranks_decides_and_nan_passes():
    for values, result in (((1e8, -1e8, 1.0), 1.0), ((1e8, 1.0, -1e8), 0.0),
                           ((np.inf, 1.0, -np.inf), np.nan), ((3e38, 3e38, 1.0), np.inf)):
        xs = [np.full(5000, value, np.float32) for value in values]
        combined(xs, "sum", 4096, [compiled.code] * 3)
        for x in xs:
            np.testing.assert_array_equal(x, np.float32(result))
