"""Fragments of a model: global weights, and an outer optimiser that updates them, of each."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu.device import Device, DeviceVector, Event, await_event
from ..record.statistics import Statistics
from ..reducers.reducer import Reducer, ReducerSpec
from ..text import first_few
from ..training.averager import Averager
from ..training.fused import Fusion, Placement
from .optimizer import Optimizer
from .settings import Scheduled, at
from .sgd import SGD


@dataclass(frozen=True)
class OuterSettings:
    """When and how local models are synchronised; LocalSGD and DiLoCo document each value."""

    every: int
    start: int = 0
    lr: Scheduled = 1.0
    momentum: Scheduled = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float | None = 0.0
    reducer: ReducerSpec = None
    sharded: bool = False
    bucket_bytes: int = 25 << 20


class LocalWeights(Protocol):
    """The local weights, those of this rank's model, and the global ones, equal on all ranks.

    Attributes:
        tensors: Those that are trained, in the model's order.
        device: The GPU on which they lie; None for host memory.
        mark: Returns when a tensor that is ready on that GPU will have been written; None for
            CuPy's stream.
        selected: Returns a block in which that GPU is this thread's current one.
    """

    tensors: Sequence[TensorSpec]
    device: Device | None
    mark: Callable[[], Event] | None = None
    selected: Callable[[], AbstractContextManager[Any]] = nullcontext

    def vector(self, name: str) -> Any:
        """Return global weights as a vector that shares their memory."""

    def local(self, name: str) -> Any:
        """Return local weights: an array, or a tensor without a graph."""

    def subtract(self, name: str, out: Any, factor: float) -> None:
        """Write factor × (global - local) into an array of NumPy or CuPy, in C order."""

    def mix(self, name: str, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global."""

    def is_finite(self, name: str) -> bool:
        """Return whether local weights are finite."""

    def refuse_others(self) -> None:
        """Raise ConfigError where other tensors than at first are trained."""

    def complete(self) -> None:
        """Share what else the model has, once all of it was synchronised.

        Collective: yes. Blocking: yes.
        """

    @contextmanager
    def global_ones(self) -> Iterator[None]:
        """Set all local weights to the global ones, in a block."""
        with self.selected():
            before = {tensor.name: copy.deepcopy(self.local(tensor.name))
                      for tensor in self.tensors}
            for name in before:
                self.mix(name, 0.0)
        try:
            yield
        finally:
            with self.selected():
                for name, x in before.items():
                    self.local(name)[...] = x


def cut(tensors: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Cut tensors, in their order, into fragments of about as many bytes each.

    Raises:
        ConfigError: There are fewer tensors than fragments.
    """
    if count > len(tensors):
        raise ConfigError(f"fragments={count}, but the model has {len(tensors)} tensors, which "
                          f"are not cut; expected at most as many fragments")
    fragments, left = [], list(tensors)
    for remaining in range(count, 0, -1):
        nbytes = [tensor.padded_bytes for tensor in left]
        share, stop, size = sum(nbytes) / remaining, 1, nbytes[0]
        # What is half inside belongs to it; each later fragment needs a tensor.
        while stop <= len(left) - remaining and size + nbytes[stop] / 2 <= share:
            size += nbytes[stop]
            stop += 1
        stop = stop if remaining > 1 else len(left)
        fragments.append(left[:stop])
        left = left[stop:]
    return fragments


class Fragment:
    """A part of a model that is synchronised at once: a model for an outer optimiser.

    A synchronisation: `send` pseudo-gradients (global weights minus local ones: what the ranks'
    steps have changed); `update` the global weights with their mean; `receive` what other ranks
    have updated; `mix` the global weights into the local ones.

    Args:
        index: Of the fragment.
        tensors: Of the fragment.
        weights: Of the whole model.
        comm: The ranks.
        settings: How it is synchronised; checked, and equal on all ranks.
        reducers: Of all tensors of the model.

    Attributes:
        names: Of its tensors.
        gradients: Averages the pseudo-gradients.
        optimizer: The outer one.
        since: The step of the last synchronisation.
        due: The step at which a synchronisation is to be mixed in; None where none is in flight.
        statistics: Costs so far.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, index: int, tensors: Sequence[TensorSpec], weights: LocalWeights,
                 comm: Communicator, settings: OuterSettings,
                 reducers: Mapping[str, Reducer]) -> None:
        self.index, self.comm, self._weights, self._settings = index, comm, weights, settings
        self.names = [tensor.name for tensor in tensors]
        # A Reducer serves one averager, and remembers what that sends.
        copied = copy.deepcopy({name: reducers[name] for name in self.names})
        self.gradients = Averager(
            tensors, comm, Fusion(settings.bucket_bytes, copied, deterministic=True),
            Placement(weights.device, weights.mark))
        self.optimizer = SGD(self, settings.lr, settings.momentum,
                             nesterov=bool(settings.momentum), sharded=settings.sharded)
        self.since, self.statistics = 0, Statistics()
        self.due: int | None = None
        # Weights are on their way.
        self._is_updated = False

    def vector(self, name: str) -> Any:
        """Return global weights as a vector that shares their memory, and is ready."""
        vector = self._weights.vector(name)
        if isinstance(vector, DeviceVector) and vector.ready is not None:
            await_event(vector.ready)
        return vector

    def wait(self) -> None:
        """Return when the means are there. Collective, blocking."""
        self.gradients.wait()

    def send(self, step: int, factor: float = 1.0) -> None:
        """Begin to average the pseudo-gradients.

        Args:
            step: The present one.
            factor: Of this rank's, in the mean.

        Collective: yes. Blocking: no.
        """
        self._label(step)
        self.since = step
        # In the order in which buckets are filled.
        for name in reversed(self.names):
            self._weights.subtract(name, self.gradients.views[name], factor)
            self.gradients.ready(name)

    def update(self, step: int) -> None:
        """Update the global weights, if there is something new to update them with.

        Args:
            step: The present one.

        Raises:
            GradientError: Weights of some rank are not finite; names them, on all ranks. The
                global weights stay as they were.

        Collective: yes. Blocking: yes.
        """
        if not self.gradients.under_way:
            return
        self._label(step)
        self._await(self.gradients.wait, self.gradients)
        self._is_updated = self.optimizer.begin_step()
        if not self._is_updated:
            self.due = None
            self._refuse_not_finite()

    def receive(self, step: int) -> None:
        """Return when the global weights are updated and complete.

        Args, raises: as `update`.

        Collective: yes. Blocking: yes.
        """
        self.update(step)
        if self._is_updated:
            self._is_updated = False
            self._await(self.optimizer.end_step, self.optimizer)
            self.await_weights()

    def _label(self, step: int) -> None:
        """Let calls have the present step in words, and the rates of its update."""
        rates = at({"lr": self._settings.lr, "momentum": self._settings.momentum},
                   self.optimizer.steps)
        self.gradients.label = (
            f"inner step {step} (every={self._settings.every}, fragment {self.index}, "
            f"lr={rates['lr']!r}, momentum={rates['momentum']!r})")

    def _await(self, wait: Callable[[], None], source: Averager | Optimizer) -> None:
        began_s = time.monotonic()
        wait()
        waited_s = time.monotonic() - began_s
        self.statistics += replace(source.statistics, exposed_s=waited_s)

    def await_weights(self) -> None:
        """Return when a GPU has written the global weights, and buckets: others use any stream.

        Collective: no. Blocking: yes.
        """
        device = self._weights.device
        if device is not None:
            # CuPy's stream marks buckets as junk.
            device.gpu.follow(device.event())
            await_event(device.gpu.mark())

    def mix(self, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global.

        Collective: no.
        """
        self.due = None
        for name in self.names:
            self._weights.mix(name, alpha)

    def _refuse_not_finite(self) -> None:
        names = [name for name in self.names if not self._weights.is_finite(name)]
        by_rank = {rank: names for rank, names in enumerate(self.comm.allgather_object(names))
                   if names} or self.gradients.nonfinite.by_rank
        whose = "; ".join(f"rank {rank} in {first_few(names, 5)}"
                          for rank, names in by_rank.items())
        raise GradientError(
            f"rank {self.comm.rank}: the model has diverged: what was sent at inner step "
            f"{self.since} holds NaN or Inf, of the weights of "
            f"{whose or 'no rank: differences overflow'}; the global parameters stay as they were. "
            f"Go on from a checkpoint, with a lower rate of the inner optimizer, or synchronise "
            f"more often")
