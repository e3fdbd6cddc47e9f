"""Optimizers that follow a model: steps after averaging, clipping across ranks, and state."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..arguments import number, truth
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu.interface import await_event
from ..memory.arrays import dtype_name
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics
from ..sharding.sliced import Sliced, whole
from ..training.averager import Averager
from .method import Method, UpdateRule
from .settings import Groups, Settings, described, summarized
from .slices import BareTensors, ModelSlices, StateView, gathered

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class TrainedModel(Protocol):
    """Interface that an optimizer needs of a model; mpiring.numpy.DataParallel implements it."""

    @property
    def comm(self) -> Communicator:
        """Communicator whose ranks train the model."""

    @property
    def gradients(self) -> Averager:
        """Averager of the gradients."""

    def vector(self, name: str) -> Any:
        """Return a parameter's memory as a vector in C order; on a GPU, as a DeviceVector."""

    def wait(self) -> None:
        """Complete the current step of the gradients. Collective, blocking."""


# A model, or tensors without a model, for which an optimizer is made.
Trained = TrainedModel | BareTensors


class Scaler(Protocol):
    """Interface that an optimizer needs of a scaler; mpiring.numpy.LossScaler implements it."""

    @property
    def scale(self) -> float:
        """Factor of the gradients of the current step."""

    def step(self) -> bool:
        """Set the scale of the next step; return whether to update, the same on all ranks."""


class Optimizer:
    """An optimizer of complete tensors, or of this rank's slices of them.

    Subclasses document their arguments.

    Attributes:
        settings: Settings of each tensor, by its name. They may be changed between steps, equally
            on all ranks; a write checks the value. If settings differ between ranks, a sharded
            optimizer raises BufferMismatchError in this step; other optimizers raise it with the
            next gradients.
        steps: Number of updates so far.
        sharded: Whether each rank updates only its slices.
        statistics: Cost of sending the updated weights to all ranks in the last complete step.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, a parameter cannot be updated,
            or another optimizer updates this model.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, dp: Trained, rule: UpdateRule, *, groups: Groups | None,
                 no_decay: Sequence[str], max_norm: float | None, sharded: bool) -> None:
        _refuse_other_than_models(dp)
        self._dp: Any = dp
        self._comm = dp.comm
        with same_on_all(self._comm, type(self).__name__,
                         remedy="give it the same arguments on every rank") as same:
            same["sharded"] = self.sharded = truth("sharded", sharded)
            same["max_norm"] = self._max_norm = None if max_norm is None else number(
                "max_norm", max_norm, lambda x: 0 < x < math.inf,
                "a finite number above 0, or None")
            self._slices: Any = dp if isinstance(dp, BareTensors) else ModelSlices(
                dp.gradients, self._comm, dp.vector)
            self._refuse_other_dtypes()
            self.method = Method(type(self).__name__, rule, self._slices.tensors, groups=groups,
                                 no_decay=no_decay)
            same |= {**described(self.method.settings), **rule.extra(self.method.settings)}
            if isinstance(self._slices, ModelSlices):
                self._gradients.refuse_claim(scatters=self.sharded)
        self.settings, self.statistics = self.method.settings, Statistics()
        # Without a model, the caller runs `method` on parts of the tensors.
        if isinstance(self._slices, ModelSlices):
            self._slices.claim(self, scatters=self.sharded)
            # Number of the last step of the gradients that was applied or skipped.
            self._last_step = self._gradients.steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…, sharded={self.sharded})"

    def step(self, scaler: Scaler | None = None) -> bool:
        """Wait for the gradients and update the weights; return whether they were updated.

        If a gradient on any rank is not finite, the call returns False and changes nothing on any
        rank. Without a scaler, rank 0 then warns once per series of such steps, unless the program
        reads `dp.finite`.

        Args:
            scaler: A LossScaler. The gradients are divided by its scale, and its `step` is called.

        Raises:
            GradientError: There are no new gradients, or some were not marked ready. Errors of
                `dp.wait()` and `scaler.step()` are also raised.
            ConfigError: A parameter was replaced by another array.
            BufferMismatchError: Ranks have updated with different settings or scales. A sharded
                optimizer raises it here, others raise it with the next gradients.

        Collective: yes. Blocking: yes.
        """
        is_done = self.begin_step(scaler)
        self.end_step()
        return is_done

    def begin_step(self, scaler: Scaler | None = None) -> bool:
        """Do the first half of `step`: update the weights and start to send them.

        Return whether the weights were updated. Call `end_step` next; do not read or write the
        weights before it returns. Raises the errors of `step`. Collective; blocks until the
        gradients have arrived.
        """
        self._await_gradients("step()")
        if self._gradients.replicas is not None:
            self._gradients.replicas.begin_update()
        scale = 1.0 if scaler is None else 1 / scaler.scale
        self._last_step, compared = self._gradients.steps, self._gradients.compared
        if not (self._gradients.finite if scaler is None else scaler.step()):
            compared["optimizer"] = "after no update"
            return False
        settings = self.method.current
        compared["optimizer"] = f"after update {self.steps} with {summarized(settings)}"
        made_with = ", ".join(compared.values())
        with self._comm.recorder.phase("optimizer"):
            self.update(lambda index: self._slices.send(index, made_with), settings, scale)
        return True

    def end_step(self) -> None:
        """Return when the updated weights of other ranks have arrived. Collective, blocking."""
        self.statistics = self._slices.receive()

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return self.method.steps

    @property
    def elementwise(self) -> bool:
        """Whether each element is updated independently, without any norm."""
        return self._max_norm is None and self.method.rule.layerwise is None

    def update(self, done: Callable[[int], None], settings: Mapping[str, Settings] | None = None,
               scale: float = 1.0, *, last_first: bool = False) -> None:
        """Update this rank's parts with the averaged gradients, which must be finite.

        For callers that send the weights themselves. The gradients must have arrived. Except for
        clipping, the arguments are those of `Method.update`. Collective, blocking.
        """
        self._await_users_stream()
        slices = self._slices
        if self._max_norm is not None:
            total = scale * self.method.gradient_norm(slices.parts, slices.share, slices.add)
            scale *= min(1.0, self._max_norm / total) if total else 1.0
        self.method.update(
            slices.buckets, self.method.current if settings is None else settings, scale,
            share=slices.share, add=slices.add, done=done, last_first=last_first)

    def grad_norm(self) -> float:
        """Wait for the averaged gradients, and return the norm of all of them together.

        Call it before `step`. With a LossScaler, the result is the norm of the scaled gradients.

        Raises:
            GradientError: There are no new gradients.

        Collective: yes. Blocking: yes.
        """
        self._await_gradients("grad_norm()")
        self._await_users_stream()
        return self.method.gradient_norm(self._slices.parts, self._slices.share, self._slices.add)

    # The state

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """This rank's current state vectors, by tensor and name, in host memory.

        Unless the optimizer is sharded, they are equal on all ranks, and can be compared by
        `dp.watch(optimizer=optimizer.state)`.
        """
        return StateView(self._slices, self.method.vectors)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete state by tensor, equal on all ranks.

        Collective: if sharded. Blocking: yes.
        """
        saved = self.method.saved(self._slices.parts)
        return {**saved, "tensors": gathered(self._comm, saved["tensors"]) if self.sharded
                else whole(saved["tensors"])}

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a copy of the ranges of the state that this rank saves.

            checkpoints.save(step, replicated={"params": params},
                             sharded=optimizer.sharded_state_dict())

        Collective: no. Blocking: yes.
        """
        return self.method.saved(self._slices.parts, self._slices.share)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a complete or sharded state; the number of ranks may have changed.

        Args:
            state_dict: Result of `state_dict`, or `Saved.sharded` of a checkpoint. With the same
                ranks and buckets, the result of `sharded_state_dict` is also accepted. The state
                does not include the weights.

        Raises:
            ConfigError: The state is of another model or optimizer, or differs between ranks.
                Nothing has changed on any rank. For ranges of tensors (`Sliced`), a sharded
                optimizer compares only shapes and dtypes, because ranks read different ranges.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self._comm, f"the state of {type(self).__name__}",
                         remedy="load the same state on every rank") as same:
            content = self.method.checked(state_dict, self._slices.parts)
            same["steps"], _, contents = content
            same["tensors"] = {
                name: {vector: x if isinstance(x, Sliced) else np.asarray(x)
                       for vector, x in leaves.items()}
                for name, leaves in state_dict["tensors"].items()} if self.sharded else {
                part.name: vectors for part, vectors in contents}
        self.method.load(content)
        self._last_step = self._gradients.steps

    def follow(self, gradients: Averager) -> None:
        """Move the state to other buckets of the same tensors. Collective, blocking."""
        saved = self.state_dict()
        self._slices.averager = gradients
        self._slices.claim(self, scatters=self.sharded)
        self.method.load(self.method.checked(saved, self._slices.parts))

    # The step

    @property
    def _gradients(self) -> Any:
        return self._slices.averager

    def _await_gradients(self, call: str) -> None:
        if self._gradients.step_started:
            self._dp.wait()
        if self._gradients.steps == self._last_step:
            raise GradientError(
                f"rank {self._comm.rank}: {call} without new gradients; compute them, and mark "
                f"each as ready, before each optimizer.step(), which is called once per step")

    def _await_users_stream(self) -> None:
        """Wait until the GPU has written the results of earlier CuPy calls."""
        if self._slices.device is not None:
            await_event(self._slices.device.gpu.mark())

    def _refuse_other_dtypes(self) -> None:
        for tensor in self._slices.tensors.values():
            if dtype_name(tensor.dtype) not in _DTYPES:
                raise ConfigError(
                    f"rank {self._comm.rank}: parameter {tensor}: optimizers update "
                    f"{', '.join(_DTYPES)}; update others by hand, without an optimizer")


def _refuse_other_than_models(dp: object) -> None:
    if not isinstance(dp, BareTensors) and not all(
            hasattr(dp, name) for name in ("comm", "gradients", "vector", "wait")):
        raise ConfigError(f"dp is a {type(dp).__name__}; pass a DataParallel of mpiring.numpy "
                          f"(for a model of PyTorch, see mpiring.torch.Sharded)")
