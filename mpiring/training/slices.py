"""What this rank updates: its slices of all buckets, tensor by tensor, with optimiser state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import DTypeLike

from ..buckets.bucket import Bucket
from ..sharding.state import BucketStates, SliceState, Vectors
from ..communicator import Communicator
from ..engine.handle import Handle
from ..gpu import vectors as copying
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..transport.base import Schedule
from .averager import Averager, Tally


@dataclass(frozen=True)
class Piece:
    """A tensor, or the range of it that this rank updates.

    Attributes:
        name, shape: Of the tensor.
        offset: First element of the flattened tensor that is here.
        weights: Shape (n,); a view, to be updated in place.
        gradient: Shape (n,); a view of the bucket: the mean, once it has arrived.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    weights: Array
    gradient: Array
    _state: SliceState
    _range: slice

    def vector(self, name: str, dtype: DTypeLike) -> Any:
        """Return the piece of a state vector, zeros at first: shape (n,). Changes count at once."""
        return self._state.vector(name, dtype)[self._range]


class ModelSlices:
    """The pieces of a model that this rank updates, and the state that it keeps for them.

    Without `averager.scatter()` that is all of it, on every rank.

    Args:
        averager: Of the gradients.
        comm: The ranks.
        weights: Returns a tensor as a vector, by name; asked again when buckets are built anew.
        vectors: Returns the state's vectors in a bucket of this plan: dtypes by name, the same on
            all ranks. They follow tensors to other buckets.

    Attributes:
        states: The state, by bucket and slice.
        pieces: What `follow` has returned last.
        tally: Counts what `send` costs.

    Collective: no.
    """

    def __init__(self, averager: Averager, comm: Communicator,
                 weights: Callable[[str], Any], vectors: Vectors) -> None:
        self._averager, self._comm = averager, comm
        self._weights, self._vectors = weights, vectors
        self.states, self.tally = BucketStates(), Tally(comm)
        self._buckets: Sequence[Bucket] = ()
        self._version = 0
        self.pieces: list[list[Piece]] = []

    def follow(self) -> Sequence[Sequence[Piece]]:
        """Return this rank's pieces, per bucket in the order in which buckets leave.

        To be called on all ranks in the same steps; between them, buckets may have been built anew.

        Collective: yes. Blocking: yes, where they have been.
        """
        if self._version != self._averager.version:
            self._version, self._buckets = self._averager.version, self._averager.buckets
            names = {name for bucket in self._buckets for name in self._vectors(bucket.plan)}
            self._comm.submit(Call(
                "attach buckets", f"the optimizer's state in {len(self._buckets)} buckets: "
                f"{', '.join(sorted(names)) or 'none'}"), self._rebuilt).wait()
            self.pieces = [self._pieces_of(bucket) for bucket in self._buckets]
        return self.pieces

    def send(self, index: int, made_with: str) -> Handle[None]:
        """Begin to bring the weights in this rank's pieces of a bucket to all ranks.

        They take the place of the gradients, in the bucket.

        Args:
            index: Of the bucket, on all ranks in the same order.
            made_with: By what the weights were made, in words; compared across ranks.

        Collective: yes. Blocking: no.
        """
        bucket = self._buckets[index]
        for piece in self.pieces[index]:
            copying.copy_to(piece.gradient, piece.weights)
        bounds, device = self._averager.bounds(bucket), bucket.device
        return self.tally.submit(
            Call("allgather", f"weights of {self._averager.step_label} {made_with}",
                 bucket.label, bucket.flat.nbytes),
            lambda collectives: collectives.allgather(bucket.vector, bounds=bounds),
            device=device, ready=[] if device is None else [device.event()])

    def receive(self, index: int) -> None:
        """Write the weights that other ranks have updated, once `send` is complete.

        The bucket holds junk from then on; a NaN in each tensor tells.

        Collective: no.
        """
        bucket, start = self._buckets[index], 0
        local, vector = self._averager.own(bucket), bucket.vector
        for tensor in bucket.plan.tensors:
            stop = start + tensor.size
            for first, last in ((start, min(stop, local.start)), (max(start, local.stop), stop)):
                if first < last:
                    copying.copy_to(self._weights(tensor.name)[first - start:last - start],
                                    vector[first:last])
            start += tensor.padded_size
        if bucket.device is not None:
            bucket.device.gpu.follow(bucket.device.event())
        bucket.mark_as_junk()

    def end_step(self) -> None:
        """Count an update: what state there is follows its tensors from now on.

        Collective: no.
        """
        self.states.commit_step(True)

    def _rebuilt(self, collectives: Collectives) -> Schedule[None]:
        def gather(x: Array, bounds: Sequence[int]) -> Schedule[None]:
            # All ranks have all of it, unless it is scattered.
            if len(bounds) > 2:
                yield from collectives.allgather(x, bounds=bounds)

        yield ()
        index = collectives.rank if self._averager.scatters else 0
        yield from self.states.rebuild(
            self._buckets, self._vectors, self._averager.bounds, [index], gather)

    def _pieces_of(self, bucket: Bucket) -> list[Piece]:
        states = self.states.of(bucket)
        if states is None:
            return []
        (state,) = states.slices.values()
        gradient = bucket.vector[self._averager.own(bucket)]
        return [
            Piece(part.name, part.shape, part.offset,
                  self._weights(part.name)[slice(*part.ends)], gradient[part.elements], state,
                  part.elements)
            for part in state.ranges]
