"""The slices of all buckets that this rank updates, part by part, with the optimizer's state."""

from collections.abc import Callable
from typing import Any

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..engine.handle import Handle
from ..engine.prepared import Pattern, Prepared
from ..gpu import vectors
from ..operations.agreement import Call
from ..record.flight import Flight
from ..sharding.state import SliceState, ranges_in
from ..training.averager import Averager
from .parts import Part


class ModelSlices:
    """The parts of a model that this rank updates, and the state that it keeps for them.

    Without `averager.scatter()`, each rank has all parts. `weights` returns the vector of a tensor,
    given its name. `parts` are this rank's parts per bucket, in the order in which buckets are
    sent. `costs` are the records of complete operations of `send`.
    """

    def __init__(self, averager: Averager, comm: Communicator,
                 weights: Callable[[str], Any]) -> None:
        self._comm, self._weights = comm, weights
        self.costs: list[Flight] = []
        self.cut(averager)

    def cut(self, averager: Averager) -> None:
        """Cut the buckets of an averager into parts, with a new state."""
        self._averager = averager
        self.parts = [self._parts_of(bucket) for bucket in averager.buckets]
        self._operations = [self._operation(bucket) for bucket in averager.buckets]

    def _operation(self, bucket: Bucket) -> Prepared:
        """Return the operation that sends the weights in each rank's parts to all ranks."""
        call, plan, device = Call("allgather", "weights", bucket.label), bucket.plan, bucket.device
        bounds = self._averager.bounds(bucket)
        if device is None:
            return self._comm.prepared(
                call, Pattern("allgather", None, plan.dtype, plan.size, bounds=bounds))
        return self._comm.prepared(
            call, build=lambda collectives: collectives.allgather(bucket.vector, bounds=bounds),
            device=device, ready=lambda: [device.event()])

    def send(self, index: int, made_with: str) -> Handle[None]:
        """Start to send the weights in this rank's parts of a bucket to all ranks. Collective.

        The weights replace the gradients in the bucket. All ranks send buckets in the same order,
        and compare `made_with`, the description of the update.
        """
        bucket = self._averager.buckets[index]
        for part in self.parts[index]:
            vectors.copy_to(part.gradient, part.weights)
        return self._operations[index].start(
            bucket.flat, None, Call("allgather", f"weights of {self._averager.step_label} "
                                    f"{made_with}", bucket.label, bucket.plan.nbytes))

    def receive(self, index: int) -> None:
        """Write the weights that other ranks have updated, once `send` is complete.

        The content of the bucket is undefined afterwards; each tensor in it begins with a NaN.
        """
        bucket = self._averager.buckets[index]
        local, vector = self._averager.own_slice(bucket), bucket.vector
        for first, last in (0, local.start), (local.stop, bucket.plan.size):
            for tensor in ranges_in(bucket.plan, first, last):
                vectors.copy_to(self._weights(tensor.name)[slice(*tensor.ends)],
                                vector[first:last][tensor.elements])
        if bucket.device is not None:
            bucket.device.gpu.follow(bucket.device.event())
        bucket.mark_as_junk()

    def _parts_of(self, bucket: Bucket) -> list[Part]:
        own = self._averager.own_slice(bucket)
        state, gradient = (SliceState(bucket.plan, own.start, own.stop, bucket.device),
                           bucket.vector[own])
        return [Part(tensor.name, tensor.offset, self._weights(tensor.name)[slice(*tensor.ends)],
                     gradient[tensor.elements], state, tensor.elements) for tensor in state.ranges]
