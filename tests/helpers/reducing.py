"""Runs Reducers step by step on a simulated cluster, as the adapters do."""

import numpy as np
from cluster import run
from simulated_gpu import SimulatedGpu

from mpiring.buckets.bucket import Bucket, TensorSpec, plan
from mpiring.gpu.device import Device
from mpiring.operations.agreement import Call
from mpiring.operations.exports import Exports
from mpiring.operations.on_device import GpuContext, in_context
from mpiring.reducers import Compressor
from mpiring.reducers.reducer import scatter_of
from mpiring.simulated.network import SimulatedNetwork

SHAPES = {"momentum": (40, 30), "b1": (30,), "conv": (8, 3, 5, 5), "residual": (7,), "scale": ()}


class Model:
    """The gradients of every rank of a cluster, in one bucket, and a Reducer for each rank.

    Args:
        make: Function that returns a Reducer.
        node_of: Node of each rank.
        shapes: Shapes of the tensors.
        seed: Seed of the simulated network.
        states: State that the Reducer of each rank loads first.
        scatters: If true, each rank reduces its slice, and slices are gathered afterwards.
    """

    def __init__(self, make, node_of, shapes=SHAPES, dtype="float32", seed=None, states=None,
                 scatters=False):
        self.node_of, self.seed, self.scatters = node_of, seed, scatters
        self.reducers = [make() for _ in node_of]
        self.network = None
        tensors = [TensorSpec(name, shape, np.dtype(dtype)) for name, shape in shapes.items()]
        if states:
            for reducer, state in zip(self.reducers, states):
                reducer.load_state_dict(state)
        self.use([tensors])

    def use(self, groups):
        """Move to new buckets, one for each group of tensors."""
        plans = [plan(tensors, 1 << 30)[0] if tensors else None for tensors in groups]
        self.buckets = [[self.bucket(rank, i, bucket_plan) for i, bucket_plan in enumerate(plans)]
                        for rank in range(len(self.node_of))]
        order = [tensor.name for tensors in groups for tensor in tensors]

        def program(collectives):
            reducer = self.reducers[collectives.rank]
            if isinstance(reducer, Compressor):
                yield from reducer.attach_buckets(
                    collectives, self.buckets[collectives.rank], order)
            yield ()

        run(self.node_of, program, slot_bytes=2048)

    def bucket(self, rank, index, plan):
        """Return a rank's memory for a plan."""
        return Bucket(index, plan, np.empty)

    def step(self, rows, taken=None, index=0):
        """Reduce a bucket, given each rank's vector; return each rank's result.

        Args:
            rows: Elements of the tensors; padding stays zero.
            taken: Whether the step counts; by default, if all elements are finite.
        """
        for buckets, row in zip(self.buckets, rows):
            fill(buckets[index], row)

        self.network = SimulatedNetwork(len(self.node_of), node_of=self.node_of, seed=self.seed)
        run(self.node_of, lambda collectives: self.reduce(collectives, index), slot_bytes=2048,
            network=self.network, algorithm="ring", call=lambda rank: Call("reduce", ""))
        if self.scatters:
            run(self.node_of, lambda collectives: self.gather(collectives, index))
        ended = [buckets[index] for buckets in self.buckets]
        finite = [bucket.holds_finite(bucket.flat) if bucket.finite is None else bucket.finite
                  for bucket in ended]
        assert len(set(finite)) == 1, "ranks do not agree whether all is finite"
        self.settle(finite[0] if taken is None else taken)
        return [values(buckets[index]) for buckets in self.buckets]

    def reduce(self, collectives, index):
        """Return the schedule that reduces a bucket on one rank."""
        rank = collectives.rank
        reducer, bucket = self.reducers[rank], self.buckets[rank][index]
        if self.scatters:
            return scatter_of(reducer, collectives, bucket)
        return reducer.reduce(collectives, bucket)

    def gather(self, collectives, index):
        """Return the schedule that only gathers the slices of all ranks."""
        bucket = self.buckets[collectives.rank][index]
        bounds = bucket.bounds(collectives.size)
        own_slice = slice(*bounds[collectives.rank:collectives.rank + 2])
        others = np.delete(np.arange(bucket.flat.size), own_slice)
        bucket.flat[others], bucket.finite = np.nan, None
        return collectives.allgather(bucket.vector, bounds=bounds)

    def settle(self, taken):
        for reducer in self.reducers:
            if isinstance(reducer, Compressor):
                reducer.commit_step(taken)

    def residual(self, index=0):
        """Return the unsent part of the mean over ranks."""
        nodes = len(set(self.node_of))
        sizes = {tensor.name: tensor.size for tensor in self.buckets[0][index].plan.tensors}
        totals = {name: np.zeros(size) for name, size in sizes.items()}
        for state in self.states():
            for name, total in totals.items():
                for piece in state["tensors"][name]["pieces"]:
                    # The padding of a tensor is after it.
                    here = total[piece["start"]:piece["stop"]]
                    if "residual" in piece["vectors"]:
                        here += piece["vectors"]["residual"][:here.size] / nodes
        return np.concatenate([*totals.values()])

    def states(self):
        return [reducer.state_dict() for reducer in self.reducers]


class ModelOnGpus(Model):
    """The same, with the buckets on simulated GPUs, one for each rank.

    `simulated_gpu.installed` must have been called before.
    """

    def __init__(self, make, node_of, *args, **kwargs):
        self.devices = [Device(SimulatedGpu(seed=rank)) for rank in range(len(node_of))]
        super().__init__(make, node_of, *args, **kwargs)

    def bucket(self, rank, index, plan):
        device = self.devices[rank]
        return Bucket(index, plan, lambda n, dtype: device.gpu.array(
            device.allocate(n * dtype.itemsize).view(dtype), (n,)), device)

    def reduce(self, collectives, index):
        rank, device = collectives.rank, self.devices[collectives.rank]
        if collectives.node.size > 1:
            for slot in collectives.node.slots(np.dtype(np.uint8)):
                device.gpu.pin(slot)
        context = GpuContext(device, Exports(collectives.windows))
        with device.gpu.on(self.network, rank):
            yield from in_context(collectives, context, [], lambda on_gpu: super(
                ModelOnGpus, self).reduce(on_gpu, index))


def fill(bucket, row):
    bucket.finite, start = None, 0
    for view in bucket.views.values():
        part = row[start:start + view.size].reshape(view.shape)
        if bucket.device is None:
            view[...] = part
        else:
            view.set(part)
        start += view.size


def values(bucket):
    views = [view if bucket.device is None else view.get() for view in bucket.views.values()]
    return np.concatenate([view.reshape(-1) for view in views])


def count(shapes=SHAPES):
    return sum(int(np.prod(shape)) for shape in shapes.values())
