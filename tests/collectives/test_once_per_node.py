"""Trains weights that lie once per node: no rank may ever read them half-updated."""

import numpy as np
import pytest
from cluster import NODES, run

from mpiring.collectives.operation import Tuning
from mpiring.errors import BufferMismatchError, ConfigError
from mpiring.memory import window
from mpiring.memory.arrays import aligned_bounds, bounds_of
from mpiring.simulated.network import SimulatedNetwork

# Arrays of these tests' sizes take several pieces and lanes.
SMALL = Tuning(slice_bytes=48, chunk_bytes=1, ring_bytes=24)
BOUNDS = {
    "equal": bounds_of,
    "aligned": lambda n, p: aligned_bounds(n, 4, p),
    "rank 0 has all": lambda n, p: [0] + [n] * p,
    "uneven": lambda n, p: [0, *sorted(n * rank * rank // (p * p) for rank in range(1, p)), n]}
N, STEPS = 100, 2


class TornRead(AssertionError):
    """A rank has read weights that were not those of its step."""


class Late:
    """A pause of this rank; other ranks and messages go on meanwhile."""

    def __init__(self, network, rank):
        self.complete = False
        network.later(0.0, rank, lambda: setattr(self, "complete", True))

    def test(self):
        return self.complete


class Over:
    """A wait that was dropped: it takes for complete what may not be."""

    def test(self):
        return True


class Dropping:
    """A channel or a node's meeting place, of whose requests one is not waited for.

    Args:
        inner: The channel or meeting place.
        count: Numbers the requests of all that belong to the operation.
        dropped: The number of the one that is dropped.
    """

    def __init__(self, inner, count, dropped):
        self._inner, self._count, self._dropped = inner, count, dropped

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _perhaps(self, request):
        self._count.append(request)
        return Over() if len(self._count) - 1 == self._dropped else request

    def lane(self, index):
        return Dropping(self._inner.lane(index), self._count, self._dropped)

    def isend(self, x, dest):
        return self._perhaps(self._inner.isend(x, dest))

    def irecv(self, x, source):
        return self._perhaps(self._inner.irecv(x, source))

    def barrier(self, *numbers):
        return self._perhaps(self._inner.barrier(*numbers))


def trained(node_of, bounds, seed, *, meets=True):
    """Train: every rank reads all weights, all ranks meet, each updates its own slice; and so on.

    The weights of step s are s, everywhere. A rank reads them at several times in each step, and
    updates its slice in two halves, with pauses of any length between all of that.

    Args:
        meets: Whether all ranks meet between reading and updating.
    """
    network = SimulatedNetwork(len(node_of), node_of=node_of, seed=seed)

    def program(collectives):
        rank = collectives.rank
        weights = yield from collectives.node_array(N, "float32")
        own_slice = weights[bounds[rank]:bounds[rank + 1]]
        for step in range(STEPS):
            # Forward and backward.
            for _ in range(3):
                if not (weights == step).all():
                    raise TornRead(f"rank {rank} in step {step}: {weights}")
                yield (Late(network, rank),)
            if meets:
                yield from collectives.allreduce(np.zeros(1, bool), op="max", algorithm="ring")
            for half in np.array_split(own_slice, 2):
                half[...] = step + 1
                yield (Late(network, rank),)
            yield from collectives.allgather_once(weights, bounds=bounds)

    run(node_of, program, network=network, slot_bytes=2048, tuning=SMALL)


@pytest.mark.parametrize("p", range(1, 8))
@pytest.mark.parametrize("nodes", NODES)
def test_weights_are_never_read_half_updated(nodes, p):
    node_of = NODES[nodes](p)
    for seed in [p, p + 1][:1 + (p < 6)]:
        trained(node_of, list(BOUNDS.values())[seed % len(BOUNDS)](N, p), seed)


@pytest.mark.parametrize("node_of", [[0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
def test_an_update_before_all_ranks_have_read_is_seen(node_of):
    torn = 0
    for seed in range(10):
        try:
            trained(node_of, bounds_of(N, len(node_of)), seed, meets=False)
        except TornRead:
            torn += 1
    assert torn > 5


def gathered(node_of, seed, dropped, dropping_rank):
    """Hold one allgather, in one piece, to its contract; return how many requests a rank waits for.

    Until this rank calls it, other nodes' slices are old; when it returns, all are new; and what
    was sent may be overwritten.

    Args:
        dropped: Number of the request of rank `dropping_rank` that is not waited for.
    """
    network, bounds = SimulatedNetwork(len(node_of), node_of=node_of, seed=seed), bounds_of(
        N, len(node_of))
    count = []

    def program(collectives):
        rank, node = collectives.rank, collectives.node
        weights = yield from collectives.node_array(N, "float32")
        weights[bounds[rank]:bounds[rank + 1]] = 1
        for _ in range(2):
            for other, (start, stop) in enumerate(zip(bounds, bounds[1:])):
                if other not in node.ranks and weights[start:stop].any():
                    raise TornRead(f"rank {rank}: the slice of rank {other} came early")
            yield (Late(network, rank),)
        if rank == dropping_rank:
            collectives.node = Dropping(node, count, dropped)
            collectives._net = Dropping(collectives.net, count, dropped)
        yield from collectives.allgather_once(weights, bounds=bounds)
        if not (weights == 1).all():
            raise TornRead(f"rank {rank}: {weights}")
        yield (node.barrier(),)
        weights[...] = 77
        yield (Late(network, rank),)

    run(node_of, program, network=network, slot_bytes=2048)
    return len(count)


@pytest.mark.parametrize("node_of", [[0, 0], [0, 0, 1, 1, 2, 2]])
def test_no_wait_can_be_left_out(node_of):
    """Each request of each rank is dropped in turn, until a seed shows it."""
    for rank in (0, len(node_of) - 1):
        count = gathered(node_of, 0, -1, rank)
        assert count == (1 if len(node_of) == 2 else 6)
        for dropped in range(count):
            for seed in range(200):
                try:
                    gathered(node_of, seed, dropped, rank)
                except (TornRead, BufferMismatchError):
                    break
            else:
                pytest.fail(f"rank {rank} need not wait for its request {dropped}")


@pytest.mark.parametrize("node_of", [
    [0] * 4, [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 1, 1, 2]])
def test_each_slice_comes_to_each_node_once_and_nothing_moves_on_a_node(node_of):
    p, nodes, n = len(node_of), len(set(node_of)), 600 * len(node_of)

    def program(collectives):
        weights = yield from collectives.node_array(n, "float32")
        yield from collectives.barrier()
        if gathers:
            yield from collectives.allgather_once(weights, bounds=bounds_of(n, p))

    sent = []
    for gathers in (False, True):
        _, network = run(node_of, program, tuning=SMALL)
        sent.append(np.array([sum(network.bytes_sent), *network.bytes_between.values()]))
    everywhere, *by_node = sent[1] - sent[0]
    # To the next node around the ring go all slices but its own.
    assert by_node == [4 * (n - 600 * node_of.count((node + 1) % nodes)) * (nodes > 1)
                       for node in range(nodes)]
    assert everywhere == sum(by_node) == 4 * n * (nodes - 1)


def test_memory_that_one_rank_cannot_have_is_an_error_on_all(monkeypatch):
    one_array = window.one_array

    def limited(descriptor, rank, size, nbytes):
        if rank == 1:
            raise OSError(12, "Cannot allocate memory")
        return one_array(descriptor, rank, size, nbytes)

    monkeypatch.setattr(window, "one_array", limited)
    results, _ = run([0, 1, 0, 2, 1, 2, 2], lambda collectives: collectives.node_array(9, "int16"),
                     return_errors=True)
    for rank, error in enumerate(results):
        assert isinstance(error, ConfigError)
        assert f"rank {rank}: rank 2 cannot allocate 18 bytes" in str(error)
        assert "(Cannot allocate memory)" in str(error)


def test_an_array_without_elements():
    results, _ = run([0, 0, 1], lambda collectives: collectives.node_array(0, "float32"))
    assert [x.size for x in results] == [0, 0, 0]
