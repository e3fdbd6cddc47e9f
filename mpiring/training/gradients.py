"""Averages an adapter's gradients: looks out for NaN and Inf, and counts what a step costs."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..buckets.bucket import Bucket, TensorSpec, usual_bytes
from ..communicator import Communicator
from ..engine.group import Build
from ..engine.handle import Handle
from ..errors import ConfigError
from ..gpu.device import Device, Event
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..record.recorder import Flight
from ..record.statistics import Statistics
from ..reducers.reducer import ReducerSpec
from ..reducers.compressor import Cost
from ..transport.base import Schedule, T
from .averager import Averager
from .nonfinite import NonFinite
from .weighing import Weighing


class Gradients(Averager):
    """An Averager of gradients.

    Args: see Averager. `bucket_bytes=None`: as `usual_bytes` says.
        weighing: That of earlier buckets.

    Attributes:
        nonfinite: Whose own gradients held NaN or Inf.
        statistics: What the operations of the last complete step cost; no others.
        tally: Counts those of a step. (Gradients that lie elsewhere may belong to it as well.)
        weighing: The factor by which gradients are to be multiplied before they are ready.
    """

    noun, holder, cycle = "gradient", "grads", "backward pass"

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, *,
                 bucket_bytes: int | None, reducer: ReducerSpec, deterministic: bool,
                 order: Sequence[str] | None = None, steps: int = 0,
                 moved: Callable[[str], None] | None = None, device: Device | None = None,
                 mark: Callable[[], Event] | None = None, weighing: Weighing | None = None,
                 hides_nothing: bool = False) -> None:
        self.nonfinite, self.tally = NonFinite(comm), Tally(comm)
        self.statistics, self.weighing = Statistics(), weighing or Weighing(comm)
        self._optimizer: weakref.ref[object] | None = None
        if bucket_bytes is None:
            bucket_bytes = usual_bytes(len(comm.memory_groups))
        super().__init__(tensors, comm, bucket_bytes=bucket_bytes, reducer=reducer,
                         deterministic=deterministic, order=order, steps=steps, moved=moved,
                         device=device, mark=mark, operations=self.tally,
                         hides_nothing=hides_nothing)

    def _send(self, bucket: Bucket) -> Handle[None] | None:
        self.nonfinite.look_at(bucket, last=bucket is self.buckets[-1])
        return super()._send(bucket)

    def wait(self, beside: Sequence[str] = (), *, finite: bool = True) -> None:
        """Return when every gradient is the mean over ranks, and end the step.

        Args:
            beside: Names of gradients of this rank that are in no bucket, and not finite.
            finite: Whether there are none of that kind, on all ranks.

        Raises:
            GradientError: Some gradients were not marked ready; names them.

        Collective: yes. Blocking: yes.
        """
        waited_s = time.monotonic()
        finite = self._await_means() and finite
        self.nonfinite.settle(self.steps, beside, self._bad_means, finite=finite)
        cost = sum((compressor.take_cost() for compressor in self.compressors), Cost())
        self.statistics = replace(
            self.tally.take(), dense_bytes=self._dense_bytes, encode_s=cost.encode_s,
            wire_s=cost.wire_s, decode_s=cost.decode_s)
        self._end_step(finite)
        self._comm.recorder.end_step(self._began_s, waited_s, self.weighing.end_step())

    def refuse_claim(self, *, scatters: bool) -> None:
        """Raise an error if `claim` is not possible.

        Args:
            scatters: As for `claim`.

        Raises:
            ConfigError: Another optimizer updates the tensors, or has done so with slices.
            GradientError: A step has begun.

        Collective: no.
        """
        other = self._optimizer() if self._optimizer is not None else None
        if other is not None:
            raise ConfigError(
                f"rank {self._comm.rank}: {other!r} updates this model already; give groups of "
                f"parameters settings of their own by groups=, or delete that optimizer first")
        if self.scatters and not scatters:
            raise ConfigError(
                f"rank {self._comm.rank}: this model's gradients are scattered, for a sharded "
                f"optimizer; pass sharded=True, or wrap the model anew")
        if scatters:
            self._refuse_amid("scatter()")

    def claim(self, optimizer: object, *, scatters: bool) -> None:
        """Let one optimizer update the tensors, once `refuse_claim` has passed on all ranks.

        Args:
            scatters: It updates slices; see `scatter`.

        Collective: yes. Blocking: no.
        """
        if scatters:
            self.scatter()
        self._optimizer = weakref.ref(optimizer)

    def _build(self, tensors: Sequence[TensorSpec]) -> None:
        super()._build(tensors)
        nodes = self._comm.memory_groups
        (sharers,) = [len(ranks) for ranks in nodes if self._comm.rank in ranks]
        # What this rank sends to other nodes in a step without compression.
        self._dense_bytes = sum(2 * (len(nodes) - 1) * bucket.flat.nbytes // len(nodes) // sharers
                                for bucket in self.buckets)


class Tally:
    """Cost of the operations submitted through it, whatever else is under way."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._flights: list[Flight] = []
        self._collectives: list[Collectives] = []

    def submit(self, call: Call, build: Build[T], *, device: Device | None = None,
               ready: Sequence[Event] = ()) -> Handle[T]:
        """Begin an operation that counts; see Communicator.submit."""
        handle = self._comm.submit(call, self._counted(build), device=device, ready=ready)
        self._flights.append(handle.flight)
        return handle

    def run(self, call: Call, build: Build[T], *, device: Device | None = None,
            ready: Sequence[Event] = ()) -> T:
        """Run an operation that counts; see Communicator.run."""
        began_s = time.monotonic()
        result = self._comm.run(call, self._counted(build), device=device, ready=ready)
        if self._comm.size > 1:
            now_s = time.monotonic()
            self._flights.append(Flight(call, 0, "", "", began_s, began_s, now_s, now_s - began_s))
        return result

    def _counted(self, build: Build[T]) -> Build[T]:
        def counted(collectives: Collectives) -> Schedule[T]:
            self._collectives.append(collectives)
            return build(collectives)

        return counted

    def take(self) -> Statistics:
        """Return the cost of those since the last call, which should all be complete."""
        flights = sorted((flight for flight in self._flights if flight.ended_s),
                         key=lambda flight: flight.started_s)
        seconds = until = 0.0
        for flight in flights:
            seconds += max(0.0, flight.ended_s - max(flight.started_s, until))
            until = max(until, flight.ended_s)
        total = Statistics(
            len(flights) if self._comm.size > 1 else 0,
            sum(collectives.bytes_sent for collectives in self._collectives), seconds,
            sum(flight.exposed_s for flight in flights))
        self._flights, self._collectives = [], []
        return total
