"""Holds every algorithm x p x n x dtype x op against NumPy, on an adversarial network."""

import contract
import numpy as np
import pytest

from mpiring.collectives import chain, ring
from mpiring.collectives.agreement import Call, agreed
from mpiring.memory.arrays import chunks_of
from mpiring.memory.reduction import Reduction
from mpiring.transport.simulated import SimulatedNetwork


def by_ring(net, x, op):
    """Run allreduce itself."""
    inbox = np.empty(ring.inbox_size(x.size, net.size), x.dtype)
    yield from ring.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size))


def by_ring_halves(net, x, op):
    """Run reduce-scatter, then allgather."""
    chunks = chunks_of(x, net.size)
    inbox = np.empty(ring.inbox_size(x.size, net.size), x.dtype)
    mine = yield from ring.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size))
    assert mine is chunks[net.rank]
    yield from ring.allgather(net, chunks)


def by_agreed_ring(net, x, op):
    """Run what the communicator runs: the header first."""
    if net.size == 1:
        return (yield from by_ring(net, x, op))
    return (yield from agreed(net, Call("allreduce", op), 0, by_ring(net, x, op)))


ALGORITHMS = {"ring": by_ring, "ring halves": by_ring_halves, "agreed ring": by_agreed_ring}


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allreduce(algorithm, p):
    for n in sorted({0, 1, p - 1, p, p + 1, 3 * p + 2, 129}):
        for op in contract.OPS:
            for seed, dtype in enumerate(contract.OPS_OF[op]):
                xs = [contract.contribution(rank, n, dtype) for rank in range(p)]
                SimulatedNetwork(p, seed=seed).run(
                    lambda net: ALGORITHMS[algorithm](net, xs[net.rank], op))
                contract.check(xs[0], p, op)
                assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


@pytest.mark.parametrize("p", range(1, 17))
def test_broadcast(p):
    for root in {0, p // 2, p - 1}:
        for n in (0, 1, 100):
            xs = [np.arange(n, dtype="float32") + 1000 * rank for rank in range(p)]
            SimulatedNetwork(p, seed=n).run(
                lambda net: chain.broadcast(net, xs[net.rank], root, piece_bytes=64))
            assert all(np.array_equal(x, np.arange(n) + 1000 * root) for x in xs)


@pytest.mark.parametrize("p", range(1, 17))
def test_objects(p):
    texts = [np.frombuffer(b"x" * (rank * 37 % 50), np.uint8) for rank in range(p)]
    for root in {0, p // 2, p - 1}:
        found = SimulatedNetwork(p, seed=root).run(
            lambda net: chain.broadcast_bytes(net, texts[net.rank], root))
        assert all(np.array_equal(text, texts[root]) for text in found)
    for found in SimulatedNetwork(p, seed=p).run(
            lambda net: ring.allgather_bytes(net, texts[net.rank])):
        assert all(map(np.array_equal, found, texts))


@pytest.mark.parametrize("p", range(1, 17))
def test_nobody_leaves_a_barrier_before_the_last_has_come(p):
    came = []

    def program(net):
        came.append(net.rank)
        yield from chain.barrier(net)
        assert len(came) == p

    for seed in range(20):
        came.clear()
        SimulatedNetwork(p, seed=seed).run(program)


def test_ten_thousand_adversarial_deliveries():
    """All schedules at once, at random sizes, under 10,000 different networks."""
    for seed in range(10_000):
        random = np.random.default_rng(seed)
        p, n = int(random.integers(2, 6)), int(random.integers(0, 40))
        root, op = int(random.integers(p)), list(contract.OPS)[seed % 5]
        xs = [contract.contribution(rank, n, "float32") for rank in range(p)]
        zs = [contract.contribution(rank, n, "int16") for rank in range(p)]
        ys = [np.full(n, rank) for rank in range(p)]
        texts = [np.full(rank * n % 7, rank, np.uint8) for rank in range(p)]
        found = SimulatedNetwork(p, seed=seed, ranks_per_node=1 + seed % 3).run(
            lambda net: by_agreed_ring(net, xs[net.rank], op),
            lambda net: by_ring_halves(net, zs[net.rank], "sum"),
            lambda net: chain.broadcast(net, ys[net.rank], root, piece_bytes=32),
            lambda net: chain.broadcast_bytes(net, texts[net.rank], root),
            lambda net: ring.allgather_bytes(net, texts[net.rank]),
            lambda net: chain.barrier(net))
        contract.check(xs[0], p, op)
        contract.check(zs[0], p, "sum")
        assert all(x.tobytes() == xs[0].tobytes() for x in xs)
        assert all(z.tobytes() == zs[0].tobytes() for z in zs)
        assert all((y == root).all() for y in ys)
        for _, _, _, text, gathered, _ in found:
            assert np.array_equal(text, texts[root])
            assert all(map(np.array_equal, gathered, texts))
