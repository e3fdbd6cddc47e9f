"""What all optimisers share: a step, settings, the way back of updated weights, and state."""

import math
from abc import ABC, abstractmethod
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..arguments import number
from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu import vectors
from ..engine.handle import Handle
from ..gpu.base import await_event
from ..memory.arrays import dtype_name
from ..memory.nests import mapped
from ..record.statistics import Statistics
from ..training.slices import Means, Slices
from . import masters, state
from .norms import norms
from .parts import MASTER, Part, wide
from .settings import Groups, Settings, at, described, refuse_different, settings_of

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Gradients(Means, Protocol):
    """What an optimiser needs of training.gradients.Gradients, or of what stands in its place."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """All tensors that are to be updated, by name, in order."""

    @property
    def under_way(self) -> bool:
        """Whether a step has begun."""

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite."""

    def claim(self, optimizer: object, *, scatters: bool) -> None:
        """Let one optimizer update the tensors, or slices of them. Collective."""


class Model(Protocol):
    """What an optimiser needs of a model: a mpiring.numpy.DataParallel, or another adapter's."""

    @property
    def comm(self) -> Communicator:
        """The ranks."""

    @property
    def gradients(self) -> Gradients:
        """What averages the gradients."""

    def vector(self, name: str) -> Any:
        """Return a parameter as a vector that shares its memory: shape (n,), in C order.

        On a GPU, a DeviceVector. Asked again whenever buckets are built anew.
        """

    def wait(self) -> None:
        """Complete the step of the gradients that is under way. Collective, blocking."""


class Scaler(Protocol):
    """What is needed of a mpiring.numpy.LossScaler."""

    @property
    def scale(self) -> float:
        """Factor of the gradients of the present step."""

    def step(self) -> bool:
        """Return whether to update, the same on all ranks, and set the next step's scale."""


class Optimizer(ABC):
    """An optimiser of a model's tensors, or of this rank's slices of them.

    One of a published method says which vectors it remembers (`vectors`), and has `_update`, and
    `_prepare` where it must know about all tensors first.

    Args:
        dp: The model.
        defaults: The settings, by name.
        groups: By a tensor's name or pattern, settings that differ.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.
        max_norm: Gradients are scaled down to this norm of all of them together; None for never.
        sharded: Update only this rank's slices, and gather the weights.

    Attributes:
        settings: By tensor; may be changed between steps, alike on all ranks.
        steps: Updates so far.
        sharded: As given.
        statistics: What bringing the updated weights to all ranks cost in the last complete step.

    Raises:
        ConfigError: An argument is wrong, or differs between ranks; a parameter cannot be updated;
            or another optimiser updates this model.

    Collective: yes. Blocking: yes.
    """

    vectors: Sequence[str] = ()

    def __init__(self, dp: Model, defaults: Settings, *, groups: Groups | None,
                 no_decay: Sequence[str], max_norm: float | None, sharded: bool) -> None:
        _refuse_other_than_models(dp)
        self._dp, self._comm, self._gradients = dp, dp.comm, dp.gradients
        self.sharded, self.steps, self._max_norm = bool(sharded), 0, max_norm
        if max_norm is not None:
            self._max_norm = number("max_norm", max_norm, lambda x: 0 < x < math.inf,
                                    "a finite number above 0, or None")
        self._names = list(self._gradients.tensors)
        self._refuse_other_tensors()
        self.settings = settings_of(self._names, defaults, groups, no_decay)
        refuse_different(self._comm, type(self).__name__, {
            "class": type(self).__name__, "sharded": self.sharded, "max_norm": self._max_norm,
            **described(self.settings), **self._more()})
        self._gradients.claim(self, scatters=self.sharded)
        # Not itself, so that it ends when its user deletes it.
        itself = weakref.proxy(self)
        self._slices = Slices(self._gradients, self._comm, dp.vector,
                              lambda plan: itself._vectors_of(plan.dtype))
        self._device = self._gradients.buckets[0].device
        # The last step of the gradients that was looked at.
        self._seen = self._gradients.steps
        # Weights on their way to all ranks, by the index of the bucket.
        self._sent: dict[int, Handle[None]] = {}
        self.statistics = Statistics()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…, sharded={self.sharded})"

    def step(self, scaler: Scaler | None = None) -> bool:
        """Update the weights, once the gradients are there; return whether it was done.

        Where a gradient of any rank was not finite, nothing changes on any rank, and the result is
        False; without a scaler rank 0 warns, once for several such steps in a row, unless
        `dp.finite` is read.

        Args:
            scaler: A LossScaler, by whose scale the gradients are divided; its `step` is called
                here.

        Raises:
            GradientError: There are no new gradients, or not all were marked ready; and what
                `dp.wait()` and `scaler.step()` raise.
            ConfigError: A parameter was replaced by another array.

        Collective: yes. Blocking: yes.
        """
        is_done = self.begin_step(scaler)
        self.end_step()
        return is_done

    def begin_step(self, scaler: Scaler | None = None) -> bool:
        """Do the first half of `step`: update, and send; `end_step` has to follow.

        Weights may be read and written again after `end_step`.

        Args, returns, raises: as `step`.

        Collective: yes. Blocking: until the gradients are there.
        """
        self._await_gradients("step()")
        scale = 1.0 if scaler is None else 1 / scaler.scale
        self._seen = self._gradients.steps
        if not (self._gradients.finite if scaler is None else scaler.step()):
            return False
        used = {str(at(its, self.steps)): None for its in self.settings.values()}
        made_with = f"updated with {'; '.join(used)}"

        def send(index: int) -> None:
            if self.sharded:
                self._sent[index] = self._slices.send(index, made_with)

        self.update(scale, send)
        return True

    def end_step(self) -> None:
        """Return when the weights that other ranks have updated are there.

        Collective: yes. Blocking: yes.
        """
        while self._sent:
            index = next(iter(self._sent))
            self._sent.pop(index).wait()
            self._slices.receive(index)
        self.statistics = self._slices.tally.take()
        self._before_users_work()

    @property
    def elementwise(self) -> bool:
        """Whether each element is updated for itself: no norm of anything is asked for."""
        return self._max_norm is None and type(self)._prepare is Optimizer._prepare

    def update(self, scale: float, done: Callable[[int], None], *,
               last_first: bool = False, rate: float = 1.0) -> None:
        """Update this rank's parts with the means that have arrived, which are finite.

        For `step`, and for adapters that hand out the weights in their own way.

        Args:
            scale: Factor of the gradients.
            done: Called with the index of each bucket when it is updated.
            last_first: Begin with the last bucket.
            rate: Factor of the learning rates.

        Collective: yes. Blocking: yes.
        """
        self._after_users_work()
        buckets = self._parts(rate)
        parts = [part for bucket in buckets for part in bucket]
        if self._max_norm is not None:
            total = scale * self._norm_of_gradients(parts)
            scale *= min(1.0, self._max_norm / total) if total else 1.0
        for part in parts:
            part.begin()
        self._prepare(parts, scale)
        indices = range(len(buckets))
        for index in reversed(indices) if last_first else indices:
            for part in buckets[index]:
                self._update(part, scale)
                part.end()
            done(index)
        self.steps += 1
        self._slices.end_step()

    def grad_norm(self) -> float:
        """Return the norm of all averaged gradients together, before `step`; waits for them.

        With a LossScaler it is that of the scaled gradients.

        Raises:
            GradientError: There are no new gradients.

        Collective: yes. Blocking: yes.
        """
        self._await_gradients("grad_norm()")
        self._after_users_work()
        return self._norm_of_gradients([part for bucket in self._parts() for part in bucket])

    # The state

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """The vectors of this rank, by tensor and name, as they are at present; in host memory.

        For `dp.watch(optimizer=optimizer.state)`, where it is not sharded: they are equal on all
        ranks.
        """
        return state.Present(
            lambda: {piece.name: piece for pieces in self._slices.pieces for piece in pieces},
            self._vectors_of)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state, by tensor: equal on all ranks.

        Collective: if sharded. Blocking: yes.
        """
        mine = self._saved(0, 1)
        return {**mine, "tensors": state.gathered(self._comm, mine["tensors"]) if self.sharded
                else mapped(mine["tensors"], lambda leaf: leaf.whole())}

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state that this rank is to save: ranges of tensors.

            checkpoints.save(step, replicated={"params": params},
                             sharded=optimizer.sharded_state_dict())

        Collective: no, but where buckets have been built anew. Blocking: yes.
        """
        return self._saved(self._comm.rank, self._comm.size)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state: sharded or not, and saved by any number of ranks.

        Args:
            state_dict: Of `state_dict`, or `Saved.sharded` of a checkpoint, or, with the same
                ranks and buckets, of `sharded_state_dict`. Weights are not in it.

        Raises:
            ConfigError: It is of another model or optimiser, or differs between ranks.

        Collective: yes. Blocking: yes.
        """
        contents, problem, steps = [], "", 0
        parts = [part for bucket in self._parts() for part in bucket]
        try:
            steps, leaves = state.checked(state_dict, type(self).__name__, self._gradients.tensors,
                                          self._dtypes())
            contents = state.of_parts(leaves, parts)
        except ConfigError as error:
            problem = str(error)
        state.refuse_problem(self._comm, problem)
        refuse_different(self._comm, f"the state of {type(self).__name__}", {"steps": steps})
        for vector, x in contents:
            vectors.copy_to(vector, vectors.moved(x, self._device))
        self.steps, self._seen = steps, self._gradients.steps
        self._slices.end_step()

    def _saved(self, rank: int, size: int) -> dict[str, Any]:
        parts = [part for bucket in self._parts() for part in bucket]
        share = (0, 1) if self.sharded else (rank, size)
        return {"optimizer": type(self).__name__, "steps": self.steps,
                "tensors": state.sliced(self._gradients.tensors, parts, self._dtypes(), share)}

    def _dtypes(self) -> dict[str, dict[str, "np.dtype[Any]"]]:
        """Return the dtypes of each tensor's vectors, by name."""
        return {name: self._vectors_of(tensor.dtype)
                for name, tensor in self._gradients.tensors.items()}

    # What methods have

    def _more(self) -> Mapping[str, Any]:
        """Return further settings that ranks must share."""
        return {}

    def _prepare(self, parts: Sequence[Part], scale: float) -> None:
        """Look at all of this rank's parts before any is updated.

        Args:
            scale: Factor of the gradients.

        Collective: yes. Blocking: yes.
        """

    @abstractmethod
    def _update(self, part: Part, scale: float) -> None:
        """Update a part.

        Args:
            scale: Factor of the gradients.
        """

    def _norms(self, parts: Sequence[Part], kinds: Sequence[str],
               blocks: Any) -> Mapping[str, Mapping[str, float]]:
        """Return the norms of whole tensors; see norms.norms."""
        return norms(self._comm, parts, self._names, kinds, blocks,
                     scatters=self._gradients.scatters, device=self._device)

    # The step

    def _await_gradients(self, what: str) -> None:
        if self._gradients.under_way:
            self._dp.wait()
        if self._gradients.steps == self._seen:
            raise GradientError(
                f"rank {self._comm.rank}: {what} without new gradients; compute them, and mark "
                f"each as ready, before each optimizer.step(), which is called once per step")

    def _parts(self, rate: float = 1.0) -> list[list[Part]]:
        """Return this rank's parts, per bucket; with learning rates times `rate`."""
        now = {id(its): at(its, self.steps) for its in self.settings.values()}
        if rate != 1.0:
            for its in now.values():
                its["lr"] *= rate
        return [[Part(piece, now[id(self.settings[piece.name])]) for piece in pieces]
                for pieces in self._slices.follow()]

    def _norm_of_gradients(self, parts: Sequence[Part]) -> float:
        found = self._norms(parts, ["g"], lambda part, share: part.blocks(["g"], share))
        return math.sqrt(sum(norm["g"]**2 for norm in found.values()))

    def _vectors_of(self, dtype: "np.dtype[Any]") -> dict[str, "np.dtype[Any]"]:
        """Return the vectors of the state of tensors of a dtype: their dtypes by name."""
        names = [*self.vectors, *[MASTER] * masters.has_master(dtype)]
        return dict.fromkeys(names, wide(dtype))

    def _after_users_work(self) -> None:
        """Wait until a GPU has written what CuPy was told to write."""
        if self._device is not None:
            await_event(self._device.gpu.mark())

    def _before_users_work(self) -> None:
        """Let what CuPy is told to do from now on find the updated weights."""
        if self._device is not None:
            self._device.gpu.follow(self._device.event())

    def _refuse_other_tensors(self) -> None:
        for tensor in self._gradients.tensors.values():
            if dtype_name(tensor.dtype) not in _DTYPES:
                raise ConfigError(
                    f"rank {self._comm.rank}: parameter {tensor}: optimizers update "
                    f"{', '.join(_DTYPES)}; update others by hand, without an optimizer")
            self._dp.vector(tensor.name)


def _refuse_other_than_models(dp: object) -> None:
    missing = [name for name in ("comm", "gradients", "vector", "wait") if not hasattr(dp, name)]
    if missing:
        raise ConfigError(f"dp is a {type(dp).__name__}; pass a DataParallel of mpiring.numpy "
                          f"(for a model of PyTorch, see mpiring.torch.Sharded)")
