"""The slices of all buckets that this rank updates, part by part, with the optimizer's state."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..buckets.bucket import Bucket, TensorSpec
from ..communicator import Communicator
from ..engine.handle import Handle
from ..engine.prepared import Pattern, Prepared
from ..gpu import vectors
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..record.statistics import Statistics, statistics_of
from ..sharding.sliced import Leaves, gather
from ..sharding.state import SliceState, ranges_in
from ..training.averager import Averager
from .parts import Part, parts_of, state_dtypes


@dataclass
class BareTensors:
    """Tensors, by name, for which an optimizer can be made without a model; see Optimizer."""

    comm: Communicator
    tensors: Mapping[str, TensorSpec]


class ModelSlices(BareTensors):
    """The parts of a model that this rank updates, and the state that it keeps for them.

    Attributes:
        weights_of: Function that returns the vector of a tensor, given its name.
        averager: Averager of the gradients. Without `averager.scatter()`, each rank has all parts.
        buckets: This rank's parts per bucket, in the order in which buckets are sent.
    """

    def __init__(self, averager: Averager, comm: Communicator,
                 weights: Callable[[str], Any]) -> None:
        super().__init__(comm, averager.tensors)
        self.averager = averager
        self.weights_of = weights
        # Handles of weights in flight, by the index of the bucket.
        self._in_flight: dict[int, Handle[None]] = {}
        self._cut()

    def _cut(self) -> None:
        """Cut the buckets into parts, with a new state."""
        self.device = self.averager.device
        self.buckets: list[list[Part]] = []
        self._operations = [self._operation(bucket) for bucket in self.averager.buckets]
        for bucket in self.averager.buckets:
            own = self.averager.own_slice(bucket)
            state = SliceState(bucket.plan, own.start, own.stop, bucket.device)
            self.buckets.append(parts_of(state, bucket.vector[own], (
                self.weights(tensor.name)[slice(*tensor.ends)] for tensor in state.ranges)))

    def weights(self, name: str) -> Any:
        """Return the vector of a tensor, on the device of the buckets."""
        vector = self.weights_of(name)
        return vector if self.device is None else replace(vector, device=self.device)

    def _operation(self, bucket: Bucket) -> Prepared:
        """Return the operation that sends the weights in each rank's parts to all ranks."""
        call, plan, device = Call("allgather", "weights", bucket.label), bucket.plan, bucket.device
        bounds = self.averager.bounds(bucket)
        if device is None:
            return self.comm.prepared(
                call, Pattern("allgather", None, plan.dtype, plan.size, bounds=bounds))
        return self.comm.prepared(
            call, build=lambda collectives: collectives.allgather(bucket.vector, bounds=bounds),
            device=device, is_agreed=True)

    def claim(self, optimizer: object, *, scatters: bool) -> None:
        """Let an optimizer update this rank's parts of the current buckets. Collective."""
        self.averager.claim(optimizer, scatters=scatters)
        self._cut()

    def wait(self) -> None:
        """Complete the current step of the gradients. Collective, blocking."""
        self.averager.wait()

    @property
    def parts(self) -> list[Part]:
        """This rank's parts of all buckets."""
        return [part for parts in self.buckets for part in parts]

    @property
    def share(self) -> tuple[int, int]:
        """Number of this rank among the ranks that have the same parts, and their number."""
        return (0, 1) if self.averager.scatters else (self.comm.rank, self.comm.size)

    def add(self, sums: Array) -> None:
        """Add the sums of all ranks, in place, for norms of complete tensors. Collective."""
        self.comm.run(Call("norms", f"of {self.averager.step_label}"),
                      lambda collectives: collectives.allreduce(sums))

    def send(self, index: int, made_with: str) -> None:
        """Start to send the weights in this rank's parts of a bucket, if other ranks lack them.

        The weights replace the gradients in the bucket. All ranks send buckets in the same order,
        and compare `made_with`, the description of the update. Collective.
        """
        if not self.averager.scatters:
            return
        bucket = self.averager.buckets[index]
        for part in self.buckets[index]:
            vectors.copy_to(part.gradient, part.weights)
        detail = f"weights of {self.averager.step_label} {made_with}"
        self._in_flight[index] = self._operations[index].start(
            bucket.flat, None, Call("allgather", detail, bucket.label, bucket.plan.nbytes))

    def receive(self) -> Statistics:
        """Return the cost when the updated weights of other ranks have arrived.

        The content of the buckets is undefined afterwards; each tensor in it begins with a NaN.
        Collective, blocking.
        """
        flights = []
        while self._in_flight:
            index = next(iter(self._in_flight))
            handle = self._in_flight.pop(index)
            handle.wait()
            flights.append(handle.flight)
            self._write(index)
        if self.device is not None:
            # Later CuPy calls wait for the updated weights.
            self.device.gpu.follow(self.device.event())
        return statistics_of(flights, self.comm.size)

    def _write(self, index: int) -> None:
        """Write the weights that other ranks have updated."""
        bucket = self.averager.buckets[index]
        local, vector = self.averager.own_slice(bucket), bucket.vector
        for first, last in (0, local.start), (local.stop, bucket.plan.size):
            for tensor in ranges_in(bucket.plan, first, last):
                vectors.copy_to(self.weights(tensor.name)[slice(*tensor.ends)],
                                vector[first:last][tensor.elements])
        if bucket.device is not None:
            bucket.device.gpu.follow(bucket.device.event())
        bucket.mark_as_junk()


class StateView(Mapping[str, Mapping[str, Any]]):
    """A view of the named state vectors by tensor and name, up to date at each access."""

    def __init__(self, slices: ModelSlices, names: Sequence[str]) -> None:
        self._slices, self._names = slices, names

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        part = self._parts()[name]
        return {vector: part.vector(vector)
                for vector in state_dtypes(self._names, part.weights.dtype)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts())

    def __len__(self) -> int:
        return len(self._parts())

    def _parts(self) -> dict[str, Part]:
        return {part.name: part for part in self._slices.parts}


def gathered(comm: Communicator, leaves: Leaves) -> Leaves:
    """Return complete tensors from the ranges of all ranks. Collective, blocking."""
    slices = [leaf for by_vector in leaves.values() for leaf in by_vector.values()]
    tensors = iter(comm.run(Call("gather", f"state in {len(slices)} vectors"),
                            functools.partial(gather, slices=slices)))
    return {name: {vector: next(tensors) for vector in by_vector}
            for name, by_vector in leaves.items()}
