"""Fragments of a model: global weights, and an outer optimiser that updates them, of each."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu.device import Device, DeviceVector, Event, await_event
from ..record.statistics import Statistics
from ..reducers.reducer import Reducer
from ..text import first_few
from ..training.gradients import Gradients
from .optimizer import Optimizer


class Weights(Protocol):
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
    mark: Callable[[], Event] | None
    selected: Callable[[], AbstractContextManager[Any]]

    def vector(self, name: str) -> Any:
        """Return global weights as a vector that shares their memory."""

    def subtract(self, name: str, out: Any, factor: float) -> None:
        """Write factor × (global - local) into an array of NumPy or CuPy, in C order."""

    def mix(self, name: str, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global."""

    def is_finite(self, name: str) -> bool:
        """Return whether local weights are finite."""

    def show_global(self) -> Callable[[], None]:
        """Set all local weights to the global ones; return what sets them back."""

    def refuse_others(self) -> None:
        """Raise ConfigError where other tensors than at first are trained."""

    def complete(self) -> None:
        """Share what else the model has, once all of it was synchronised.

        Collective: yes. Blocking: yes.
        """


def cut(tensors: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Cut tensors, in their order, into fragments of about as many bytes each.

    Raises:
        ConfigError: There are fewer tensors than fragments.
    """
    if count > len(tensors):
        raise ConfigError(f"fragments={count}, but the model has {len(tensors)} tensors, which "
                          f"are not cut; expected at most as many fragments")
    found, rest = [], list(tensors)
    for remaining in range(count, 0, -1):
        nbytes = [tensor.padded_bytes for tensor in rest]
        share, stop, size = sum(nbytes) / remaining, 1, nbytes[0]
        # What is half inside belongs to it; each later fragment needs a tensor.
        while stop <= len(rest) - remaining and size + nbytes[stop] / 2 <= share:
            size += nbytes[stop]
            stop += 1
        stop = stop if remaining > 1 else len(rest)
        found.append(rest[:stop])
        rest = rest[stop:]
    return found


class PseudoGradients(Gradients):
    """Averages global weights minus local ones: what the ranks' steps have changed, as a gradient.

    Args:
        tensors, comm, bucket_bytes, reducer, device, mark: See Averager.
        moment: Returns the present inner step, in words.
    """

    noun, holder, cycle = "pseudo-gradient", "pseudo-gradients", "synchronisation"

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, *, bucket_bytes: int,
                 reducer: Mapping[str, Reducer], device: Device | None,
                 mark: Callable[[], Event] | None, moment: Callable[[], str]) -> None:
        self._moment = moment
        super().__init__(tensors, comm, bucket_bytes=bucket_bytes, reducer=reducer,
                         deterministic=True, device=device, mark=mark)

    @property
    def moment(self) -> str:
        """The step at which it was sent; compared across ranks."""
        return self._moment()


class Fragment:
    """A part of a model that is synchronised at once: a model for an outer optimiser.

    A synchronisation: `send` pseudo-gradients; `update` the global weights with their mean;
    `receive` what other ranks have updated; `mix` the global weights into the local ones.

    Args:
        index: Of the fragment.
        weights: Of the whole model.
        gradients: Averages the pseudo-gradients of this fragment.
        comm: The ranks.

    Attributes:
        names: Of its tensors.
        since: The step of the last synchronisation.
        due: The step at which a synchronisation is to be mixed in; None where none is under way.
        optimizer: The outer one; set by whoever makes it.
        statistics: Costs so far.
    """

    optimizer: Optimizer

    def __init__(self, index: int, weights: Weights, gradients: Gradients,
                 comm: Communicator) -> None:
        self.index, self.comm, self.gradients = index, comm, gradients
        self.names, self._weights = list(gradients.tensors), weights
        self.since, self.statistics = 0, Statistics()
        self.due: int | None = None
        # What was sent is not used yet; weights are on their way.
        self._is_sent = self._is_updated = False

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
        self.since, self._is_sent = step, True
        # In the order in which buckets are filled.
        for name in reversed(self.names):
            self._weights.subtract(name, self.gradients.views[name], factor)
            self.gradients.ready(name)

    def update(self) -> None:
        """Update the global weights, if there is something new to update them with.

        Raises:
            GradientError: Weights of some rank are not finite; names them, on all ranks. The
                global weights stay as they were.

        Collective: yes. Blocking: yes.
        """
        if not self._is_sent:
            return
        self._is_sent = False
        began_s = time.monotonic()
        self.wait()
        waited_s = time.monotonic() - began_s
        self._is_updated = self.optimizer.begin_step()
        self.statistics += replace(self.gradients.statistics, exposed_s=waited_s)
        if not self._is_updated:
            self.due = None
            self._refuse_not_finite()

    def receive(self) -> None:
        """Return when the global weights are updated and complete.

        Raises: as `update`.

        Collective: yes. Blocking: yes.
        """
        self.update()
        if self._is_updated:
            self._is_updated = False
            began_s = time.monotonic()
            self.optimizer.end_step()
            waited_s = time.monotonic() - began_s
            self.statistics += replace(self.optimizer.statistics, exposed_s=waited_s)
            self.await_weights()

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
        mine = [name for name in self.names if not self._weights.is_finite(name)]
        everybodys = {rank: names for rank, names in enumerate(self.comm.allgather_object(mine))
                      if names} or self.gradients.nonfinite.found
        whose = "; ".join(f"rank {rank} in {first_few(names, 5)}"
                          for rank, names in everybodys.items())
        raise GradientError(
            f"rank {self.comm.rank}: the model has diverged: what was sent at inner step "
            f"{self.since} holds NaN or Inf, of the weights of "
            f"{whose or 'no rank: differences overflow'}; the global parameters stay as they were. "
            f"Go on from a checkpoint, with a lower rate of the inner optimizer, or synchronise "
            f"more often")
