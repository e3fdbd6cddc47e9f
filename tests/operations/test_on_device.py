"""Holds the schedules on a GPU's memory to what they do on the host, on an adversarial GPU."""

from dataclasses import replace
from functools import partial

import contract
import numpy as np
import pytest
from cluster import run
from schedules import sent
from simulated_gpu import SimulatedGpu, Threads, content

from mpiring.collectives.operation import Tuning
from mpiring.gpu.device import Device
from mpiring.gpu.interface import DeviceVector
from mpiring.gpu.vectors import copy_to
from mpiring.memory.arrays import chunks_of
from mpiring.operations.exports import Exports
from mpiring.operations.on_device import GpuContext, in_context
from mpiring.operations.queue import MEMORY_BYTES, GpuQueue
from mpiring.simulated.network import SimulatedNetwork

NODES = {"one": [0], "one node": [0] * 3, "four": [0] * 4, "nodes of 2": [0, 0, 1, 1],
         "uneven": [0, 1, 0, 1, 1], "own nodes": [0, 1, 2, 3]}
ALGORITHMS = {"auto": ["one", "one node", "four"], "ring": NODES, "direct": NODES,
              "hierarchical": ["nodes of 2", "uneven"]}
# Arrays of this test's sizes take every path, in several pieces.
SMALL = Tuning(eager_bytes=100, chunk_bytes=16, short_bytes=40, slice_bytes=96, ring_bytes=24,
               direct_bytes=(8, 40), staged_bytes=96, rows_bytes=96, moved_bytes=200)


def cases(shift, *lengths):
    """Yield all ops, with one of the lengths in turn, and one of the dtypes that a GPU has."""
    for turn, op in enumerate(contract.OPS, shift):
        dtypes = [dtype for dtype in contract.OPS_OF[op] if dtype != "longdouble"]
        yield turn, lengths[turn % len(lengths)], op, dtypes[5 * turn % len(dtypes)]


class _Aware:
    """A network that takes a GPU's pointers, as a CUDA-aware MPI does."""

    def __init__(self, net):
        self._net = net
        self.rank, self.size, self.ranks = net.rank, net.size, net.ranks

    def lane(self, index):
        return _Aware(self._net.lane(index))

    def isend(self, array, dest):
        return self._net.isend(_bytes(array), dest)

    def irecv(self, array, source):
        return self._net.irecv(_bytes(array), source)


def _bytes(x):
    return content(x) if isinstance(x, DeviceVector) else x


def on_gpus(node_of, program, *, seed=0, direct=False, shared=None, slot_bytes=4096,
            host_bytes=0, queued=False):
    """Run a program on all ranks, each with a GPU of its own.

    Args:
        program: Takes a DeviceCollectives, and a function that puts an array on the GPU; its
            schedule returns vectors.
        direct: MPI takes GPUs' pointers.
        shared: What GPUs export to each other; None where they cannot.
        host_bytes: See Tuning.
        queued: If true, barriers are queued on the GPUs.
    """
    network = SimulatedNetwork(len(node_of), node_of=node_of, seed=seed)
    gpus = [SimulatedGpu(partial(network.later, 0, rank), shared=shared)
            for rank in range(len(node_of))]

    memory = [np.zeros(MEMORY_BYTES, np.uint8) for _ in node_of]
    slots = [gpu.allocate(2 * slot_bytes) for gpu in gpus]

    def on_rank(collectives):
        rank = collectives.rank
        device = Device(gpus[rank])
        context = GpuContext(device, Exports(collectives.windows), direct,
                             tuning=replace(SMALL, host_bytes=host_bytes),
                             queue=queue_of(collectives.node, device) if queued else None)
        if direct:
            collectives._net = _Aware(collectives.net)
        if collectives.node.size > 1:
            for slot in collectives.node.slots(np.dtype(np.uint8)):
                gpus[rank].pin(slot)
        vectors = yield from in_context(collectives, context, [], lambda on_gpu: program(
            on_gpu, lambda x: gpus[rank].vector(context.device, x)))
        if queued:
            yield (vectors.event,)
            vectors = vectors.settled()
        # Not later, when whatever is queued still has been done.
        return [content(x).copy() for x in vectors or ()]

    def queue_of(node, device):
        for part in memory:
            device.gpu.pin(part)
        return GpuQueue(device, node, memory, [replace(slot, device=device) for slot in slots])

    return run(node_of, on_rank, network=network, slot_bytes=slot_bytes)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("algorithm, place", [
    (algorithm, place) for algorithm, places in ALGORITHMS.items() for place in places])
def test_allreduce(algorithm, place, direct):
    node_of = NODES[place]
    p = len(node_of)
    for seed, n, op, dtype in cases(p + direct, 0, 1, p + 1, 129):
        def program(collectives, put):
            x = put(contract.contribution(collectives.rank, n, dtype))
            yield from collectives.allreduce(x, op=op, algorithm=algorithm)
            return [x]

        check(on_gpus(node_of, program, seed=seed, direct=direct)[0], p, op)


@pytest.mark.parametrize("place", NODES)
def test_short_vectors_are_combined_in_host_memory(place, monkeypatch):
    monkeypatch.setattr(Device, "combine", None)
    node_of = NODES[place]
    p = len(node_of)
    for seed, n, op, dtype in cases(p, 0, 1, p + 1, 129):
        def program(collectives, put):
            x = put(contract.contribution(collectives.rank, n, dtype))
            # One after the other, as in a Reducer.
            yield from collectives.allreduce(x[:0], op=op)
            yield from collectives.allreduce(x, op=op)
            return [x]

        check(on_gpus(node_of, program, seed=seed, host_bytes=4096)[0], p, op)


def check(results, p, op):
    xs = [x for x, *_ in results]
    contract.check(xs[0], p, op)
    assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


def placed(collectives, put, which, n, dtype):
    """Return what a rank contributes; on all ranks, or some, in memory that is open to the node."""
    x = put(contract.contribution(collectives.rank, n, dtype))
    y = yield from collectives.empty((n,), dtype)
    if which == "some" and collectives.rank % 2 == 0:
        return x
    copy_to(y, x)
    return y


@pytest.mark.parametrize("place", NODES)
@pytest.mark.parametrize("which", ["all", "some"])
def test_allreduce_in_memory_that_is_open_to_the_node(place, which):
    node_of = NODES[place]
    p = len(node_of)
    for seed, n, op, dtype in cases(p + len(which), 1, p + 1, 129):
        def program(collectives, put):
            x = yield from placed(collectives, put, which, n, dtype)
            yield from collectives.allreduce(x, op=op)
            return [x]

        check(on_gpus(node_of, program, seed=seed, shared=Threads())[0], p, op)


@pytest.mark.parametrize("place", NODES)
@pytest.mark.parametrize("which", ["all", "some"])
def test_slices(place, which):
    node_of = NODES[place]
    p = len(node_of)
    for seed, (op, dtype) in enumerate([("sum", "float32"), ("mean", "float16"), ("max", "int8")]):
        n = (0, 129, 301)[seed]
        bounds = [0, *(n // 2 * (rank > 1) for rank in range(1, p)), n]

        def program(collectives, put):
            rank = collectives.rank
            x = yield from placed(collectives, put, which, n, dtype)
            own_slice = yield from collectives.reduce_scatter(x, op=op, bounds=bounds)
            assert own_slice.size == bounds[rank + 1] - bounds[rank]
            yield from collectives.allgather(x, bounds=bounds)
            return [x]

        check(on_gpus(node_of, program, seed=seed, shared=Threads())[0], p, op)


@pytest.mark.parametrize("place", ["one", "one node", "four"])
@pytest.mark.parametrize("which", ["all", "some", "none"])
def test_queued_operations(place, which):
    """The host waits for no GPU: the work of several collectives is queued at once."""
    node_of = NODES[place]
    p = len(node_of)
    for seed, n, op, dtype in cases(p + len(which), 0, 1, p + 1, 129, 1001):
        def program(collectives, put):
            rank, xs = collectives.rank, []
            for turn in range(3):
                x = put(contract.contribution(rank, n, dtype)) if which == "none" else (
                    yield from placed(collectives, put, which, n, dtype))
                yield from collectives.allreduce(x, op=op)
                y = put(contract.contribution(rank, n, dtype))
                yield from collectives.reduce_scatter(y, op=op)
                yield from collectives.allgather(y)
                z = put(np.arange(n, dtype="float32") + 1000 * rank)
                yield from collectives.broadcast(z, turn % p)
                xs += [x, y, z]
            return xs

        results = on_gpus(node_of, program, seed=seed, shared=Threads(), queued=True)[0]
        for turn in range(3):
            for which_x in range(2):
                check([xs[3 * turn + which_x:] for xs in results], p, op)
            for xs in results:
                assert np.array_equal(xs[3 * turn + 2], np.arange(n) + 1000 * (turn % p))


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("place", NODES)
def test_other_collectives(place, direct):
    node_of = NODES[place]
    p = len(node_of)
    root = p // 2
    for seed, n in enumerate((p + 1, 129) if direct else (0, 1, 129)):
        def program(collectives, put):
            rank = collectives.rank
            x = put(np.arange(n, dtype="float32") + 1000 * rank)
            yield from collectives.broadcast(x, root)
            y = put(contract.contribution(rank, p * n, "int32"))
            part = yield from collectives.reduce_scatter(y)
            z = put(contract.contribution(rank, p * n, "int32"))
            yield from collectives.reduce(z, root)
            copy_to(chunks_of(z, p)[rank], part)
            yield from collectives.allgather(z)
            sends = [put(sent(rank, dest, p)) for dest in range(p)]
            receives = [put(np.zeros_like(sent(source, rank, p))) for source in range(p)]
            yield from collectives.all_to_all(sends, receives)
            return z, x, *receives

        results = on_gpus(node_of, program, seed=seed, direct=direct)[0]
        check(results, p, "sum")
        for rank, (_, x, *receives) in enumerate(results):
            assert np.array_equal(x, np.arange(n) + 1000 * root)
            for source, y in enumerate(receives):
                assert np.array_equal(y, sent(source, rank, p))


def test_memory_is_freed_when_no_rank_has_it_open():
    """Rank 2 holds on to the first window for a while."""
    shared = Threads()

    def program(collectives, put):
        kept = []
        for number in range(5):
            x = yield from collectives.empty((100,), "float32")
            if collectives.rank == 2 and number == 0:
                kept.append(x)
            if number == 3:
                kept.clear()
            yield from collectives.allreduce(x)
            alive = [memory() is not None for memory in shared.exported]
            del x
            yield from collectives.barrier()
            # Per window, of all three ranks.
            assert sum(alive) == 3 * (1 if number in (0, 4) else 2)
            assert {memory().opened for memory in shared.exported if memory()} == {2}

    on_gpus([0] * 3, program, shared=shared)
