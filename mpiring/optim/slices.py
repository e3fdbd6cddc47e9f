"""The slices of all buckets that this rank updates, part by part, with the optimizer's state."""

from collections.abc import Callable, Sequence
from typing import Any

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..engine.handle import Handle
from ..gpu import vectors
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..sharding.state import BucketStates, Vectors, ranges_in
from ..training.averager import Averager, Tally
from ..transport.base import Schedule
from .parts import Part


class ModelSlices:
    """The parts of a model that this rank updates, and the state that it keeps for them.

    Without `averager.scatter()`, each rank has all parts.

    Args:
        averager: Averager of the gradients.
        comm: Communicator whose ranks train the model.
        weights: Function that returns the vector of a tensor, given its name; called again when
            buckets are rebuilt.
        state_vectors: Function that returns the dtypes of a bucket's state vectors by name, given
            its plan; the same on all ranks. The vectors follow tensors to other buckets.

    Attributes:
        states: The state, by bucket and slice.
        parts: The last result of `current_parts`.
        tally: Counts the cost of `send`.

    Collective: no.
    """

    def __init__(self, averager: Averager, comm: Communicator,
                 weights: Callable[[str], Any], state_vectors: Vectors) -> None:
        self._averager, self._comm = averager, comm
        self._weights, self._vectors = weights, state_vectors
        self.states, self.tally = BucketStates(), Tally(comm)
        self._buckets: Sequence[Bucket] = ()
        self._version = 0
        self.parts: list[list[Part]] = []

    def current_parts(self) -> Sequence[Sequence[Part]]:
        """Return this rank's parts, per bucket, in the order in which buckets are sent.

        All ranks must call it in the same steps. It moves the state if buckets were rebuilt
        since the last call.

        Collective: yes. Blocking: yes, if buckets were rebuilt.
        """
        if self._version != self._averager.version:
            self._version, self._buckets = self._averager.version, self._averager.buckets
            names = {name for bucket in self._buckets for name in self._vectors(bucket.plan)}
            self._comm.submit(Call(
                "attach buckets", f"the optimizer's state in {len(self._buckets)} buckets: "
                f"{', '.join(sorted(names)) or 'none'}"), self._rebuilt).wait()
            self.parts = [self._parts_of(bucket) for bucket in self._buckets]
        return self.parts

    def send(self, index: int, made_with: str) -> Handle[None]:
        """Start to send the weights in this rank's parts of a bucket to all ranks.

        The weights replace the gradients in the bucket.

        Args:
            index: Index of the bucket; all ranks send buckets in the same order.
            made_with: Description of the update of the weights; compared across ranks.

        Collective: yes. Blocking: no.
        """
        bucket = self._buckets[index]
        for part in self.parts[index]:
            vectors.copy_to(part.gradient, part.weights)
        bounds, device = self._averager.bounds(bucket), bucket.device
        return self.tally.submit(
            Call("allgather", f"weights of {self._averager.step_label} {made_with}",
                 bucket.label, bucket.flat.nbytes),
            lambda collectives: collectives.allgather(bucket.vector, bounds=bounds),
            device=device, ready=[] if device is None else [device.event()])

    def receive(self, index: int) -> None:
        """Write the weights that other ranks have updated, once `send` is complete.

        The content of the bucket is undefined afterwards; each tensor in it begins with a NaN.

        Collective: no.
        """
        bucket = self._buckets[index]
        local, vector = self._averager.own_slice(bucket), bucket.vector
        for first, last in (0, local.start), (local.stop, bucket.plan.size):
            for tensor in ranges_in(bucket.plan, first, last):
                vectors.copy_to(self._weights(tensor.name)[slice(*tensor.ends)],
                                vector[first:last][tensor.elements])
        if bucket.device is not None:
            bucket.device.gpu.follow(bucket.device.event())
        bucket.mark_as_junk()

    def end_step(self) -> None:
        """Count an update: the state follows its tensors to other buckets from now on.

        Collective: no.
        """
        self.states.commit_step(True)

    def _rebuilt(self, collectives: Collectives) -> Schedule[None]:
        def gather(x: Array, bounds: Sequence[int]) -> Schedule[None]:
            # If there is only one slice, all ranks have the complete vector.
            if len(bounds) > 2:
                yield from collectives.allgather(x, bounds=bounds)

        yield ()
        index = collectives.rank if self._averager.scatters else 0
        yield from self.states.rebuild(
            self._buckets, self._vectors, self._averager.bounds, [index], gather)

    def _parts_of(self, bucket: Bucket) -> list[Part]:
        states = self.states.of(bucket)
        if states is None:
            return []
        (state,) = states.slices.values()
        gradient = bucket.vector[self._averager.own_slice(bucket)]
        return [Part(tensor.name, tensor.offset, self._weights(tensor.name)[slice(*tensor.ends)],
                     gradient[tensor.elements], state, tensor.elements) for tensor in state.ranges]
