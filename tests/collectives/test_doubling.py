"""Tests the collectives that take log2 p messages: what they count, in which order they combine."""

import math

import contract
import ml_dtypes
import numpy as np
import pytest
from cluster import run

from mpiring.collectives.operation import Tuning
from mpiring.simulated.network import SimulatedNetwork

MANY = Tuning(direct_nodes=1)
P = 2, 3, 4, 7, 8, 13, 32


def counted(p, program):
    """Run a program between nodes of one rank; return the messages of each but for the header."""
    network = SimulatedNetwork(p)
    run(range(p), program, network=network, tuning=MANY)
    return [count - 1 for count in network.messages_sent]


@pytest.mark.parametrize("p", P)
def test_messages(p):
    def allreduce(collectives):
        x = contract.contribution(collectives.rank, 50, "float32")
        yield from collectives.allreduce(x, algorithm="ring")
        contract.check(x, p, "sum")

    def allgather(collectives):
        x = np.where(np.arange(2 * p) // 2 == collectives.rank, np.arange(2 * p), -1)
        yield from collectives.allgather(x)
        assert np.array_equal(x, np.arange(2 * p))

    def broadcast(collectives):
        x = np.full(5, collectives.rank)
        yield from collectives.broadcast(x, p // 2)
        assert (x == p // 2).all()

    steps = math.ceil(math.log2(p))
    # Beyond a power of two, a rank also stands for another one.
    assert max(counted(p, allreduce)) == int(math.log2(p)) + (p & p - 1 > 0)
    assert set(counted(p, allgather)) == {steps}
    # A binomial tree, and the barrier that confirms.
    messages = counted(p, broadcast)
    assert sum(messages) == p - 1 + p * steps and max(messages) == 2 * steps


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("node_of", [range(13), [0, 0, 0, 1, 2, 2, 3]])
def test_sixteen_bits_are_rounded_once_between_nodes(node_of, dtype):
    rows = np.random.default_rng(0).standard_normal((len(node_of), 40)).astype(dtype)
    ops = ["sum", "mean"]
    if len(set(node_of)) < len(node_of):
        # Numbers of which a node's sum is exact; a node's mean is not.
        rows, ops = np.round(rows.astype("float32") * 4).astype(dtype), ["sum"]
    for op in ops:
        want = contract.rounded_once(rows, op)
        xs = run(node_of, lambda collectives: _copied(collectives, rows, op), tuning=MANY)[0]
        assert all(contract.same_bits(x, want) for x in xs)


def _copied(collectives, rows, op):
    x = rows[collectives.rank].copy()
    yield from collectives.allreduce(x, op=op)
    return x


@pytest.mark.parametrize("p", [3, 8, 13])
def test_each_pair_combines_in_the_order_of_its_ranks(p):
    rows = np.random.default_rng(p).standard_normal((p, 30)).astype("float32")
    doubled = 1 << p.bit_length() - 1
    first = 2 * (p - doubled)
    blocks = [rows[i] + rows[i + 1] for i in range(0, first, 2)] + list(rows[first:])
    while len(blocks) > 1:
        blocks = [a + b for a, b in zip(blocks[::2], blocks[1::2])]

    def program(collectives):
        x = rows[collectives.rank].copy()
        yield from collectives.allreduce(x, algorithm="ring")
        return x

    assert all(x.tobytes() == blocks[0].tobytes()
               for x in run(range(p), program, tuning=MANY, seed=p)[0])
