"""Fragments of a model: their global weights, and an outer optimizer that updates them."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu.device import Device
from ..gpu.interface import DeviceVector, UserStream, await_event
from ..record.statistics import Statistics
from ..reducers.reducer import Reducer, ReducerSpec
from ..text import first_few
from ..training.averager import Averager
from ..training.fused import Fusion, Placement
from .optimizer import Optimizer
from .settings import Scheduled, values_at
from .sgd import SGD
from .slices import ModelSlices


@dataclass(frozen=True)
class OuterSettings:
    """Settings of local training; PeriodicAveraging and StreamingDiLoCo document each of them."""

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
    """Local weights, which belong to this rank's model, and global weights, equal on all ranks.

    Attributes:
        tensors: The trained tensors, in the order of the model.
        device: The GPU that holds them; None for host memory.
        stream: The stream on which the GPU writes tensors; None for CuPy's current stream.
        selected: Returns a context in which this GPU is the thread's current device.
    """

    tensors: Sequence[TensorSpec]
    device: Device | None
    stream: UserStream | None = None
    selected: Callable[[], AbstractContextManager[Any]] = nullcontext

    def vector(self, name: str) -> Any:
        """Return global weights as a vector that shares their memory."""

    def local(self, name: str) -> Any:
        """Return local weights: an array, or a detached tensor."""

    def subtract(self, name: str, out: Any, factor: float) -> None:
        """Write factor × (global - local) into a NumPy or CuPy array in C order."""

    def mix(self, name: str, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global."""

    def is_finite(self, name: str) -> bool:
        """Return whether local weights are finite."""

    def refuse_others(self) -> None:
        """Raise ConfigError if the trained tensors have changed."""

    def complete(self) -> None:
        """Synchronize the rest of the model, after all weights. Collective, blocking."""

    @contextmanager
    def with_global_weights(self) -> Iterator[None]:
        """Set all local weights to the global weights within a `with` block."""
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
    """Divide tensors, in their order, into fragments of similar size in bytes.

    Raises ConfigError if there are fewer tensors than fragments.
    """
    if count > len(tensors):
        raise ConfigError(f"fragments={count}, but the model has {len(tensors)} tensors, which "
                          f"are not cut; expected at most as many fragments")
    fragments, remaining_tensors = [], list(tensors)
    for remaining in range(count, 0, -1):
        nbytes = [tensor.padded_bytes for tensor in remaining_tensors]
        share, stop, size = sum(nbytes) / remaining, 1, nbytes[0]
        # A tensor belongs to a fragment if at least half of it fits into the fragment's share. Each
        # later fragment needs a tensor.
        while stop <= len(remaining_tensors) - remaining and size + nbytes[stop] / 2 <= share:
            size += nbytes[stop]
            stop += 1
        fragments.append(remaining_tensors[:stop])
        remaining_tensors = remaining_tensors[stop:]
    return fragments


class Fragment:
    """A part of a model that is synchronized at once, and its outer optimizer.

    A synchronization has four stages:

    1. `send` sends pseudo-gradients: global minus local weights, the changes by local steps.
    2. `update` updates the global weights with their mean.
    3. `receive` receives the global weights that other ranks have updated.
    4. `mix` mixes the global weights into the local weights.

    Weights and reducers are those of the complete model; settings are checked, and equal on all
    ranks. Collective, blocking.

    Attributes:
        gradients: Averager of the pseudo-gradients.
        since: Step of the last synchronization.
        due: Step at which to mix in the synchronization in flight; None if there is none.
    """

    def __init__(self, index: int, tensors: Sequence[TensorSpec], weights: LocalWeights,
                 comm: Communicator, settings: OuterSettings,
                 reducers: Mapping[str, Reducer]) -> None:
        self.index, self.comm, self._weights, self._settings = index, comm, weights, settings
        self.names = [tensor.name for tensor in tensors]
        # Each averager needs its own Reducers, because they keep state between steps.
        copied = copy.deepcopy({name: reducers[name] for name in self.names})
        # This is the order in earlier checkpoints.
        order = self.names[::-1]
        self.gradients = Averager(
            tensors, comm, Fusion(settings.bucket_bytes, copied, order=order, autotune=False),
            Placement(weights.device, weights.stream))
        self.optimizer = SGD(
            ModelSlices(self.gradients, comm, self.vector), settings.lr, settings.momentum,
            nesterov=bool(settings.momentum), sharded=settings.sharded)
        self.since, self.statistics = 0, Statistics()
        self.due: int | None = None
        # Whether updated weights are in flight.
        self._is_updated = False

    def vector(self, name: str) -> Any:
        """Return global weights as a vector that shares their memory, once it is ready."""
        vector = self._weights.vector(name)
        if isinstance(vector, DeviceVector) and vector.ready is not None:
            await_event(vector.ready)
        return vector

    def send(self, step: int, factor: float = 1.0) -> None:
        """Start to average the pseudo-gradients, with this rank's factor. Collective."""
        self._label(step)
        self.since = step
        # Buckets are filled from the last tensor to the first.
        for name in reversed(self.names):
            self._weights.subtract(name, self.gradients.views[name], factor)
            self.gradients.ready(name)

    def update(self, step: int) -> None:
        """Update the global weights if pseudo-gradients are in flight; otherwise, do nothing.

        Raises GradientError, which names them on all ranks, if weights of some rank are not finite.
        The global weights then remain unchanged. Collective, blocking.
        """
        if not self.gradients.step_started:
            return
        self._label(step)
        self._await(self.gradients.wait, self.gradients)
        self._is_updated = self.optimizer.begin_step()
        if not self._is_updated:
            self.due = None
            self._refuse_not_finite()

    def receive(self, step: int) -> None:
        """Return when the global weights are updated and complete. Collective, blocking.

        Raises the errors of `update`.
        """
        self.update(step)
        if self._is_updated:
            self._is_updated = False
            self._await(self.optimizer.end_step, self.optimizer)
            self.await_weights()

    def _label(self, step: int) -> None:
        """Label the next calls with the current step and the rates of its update."""
        rates = values_at({"lr": self._settings.lr, "momentum": self._settings.momentum},
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
        """Wait until the GPU has written the global weights and buckets, for use on any stream."""
        device = self._weights.device
        if device is not None:
            # Buckets are marked as junk on CuPy's stream.
            device.gpu.follow(device.event())
            await_event(device.gpu.mark())

    def mix(self, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global."""
        self.due = None
        for name in self.names:
            self._weights.mix(name, alpha)

    def _refuse_not_finite(self) -> None:
        names = [name for name in self.names if not self._weights.is_finite(name)]
        by_rank = {rank: names for rank, names in enumerate(self.comm.allgather_object(names))
                   if names} or self.gradients.nonfinite.by_rank
        places = "; ".join(f"rank {rank} in {first_few(names, 5)}"
                           for rank, names in by_rank.items())
        raise GradientError(
            f"rank {self.comm.rank}: the model has diverged: what was sent at inner step "
            f"{self.since} holds NaN or Inf, of the weights of "
            f"{places or 'no rank: differences overflow'}; the global parameters stay as they were."
            f" Go on from a checkpoint, with a lower rate of the inner optimizer, or synchronize "
            f"more often")
