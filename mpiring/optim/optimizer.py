"""Runs update rules: steps, settings, the exchange of updated weights, and state."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..arguments import number, truth
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import ConfigError, GradientError
from ..gpu import vectors
from ..gpu.device import await_event
from ..memory.arrays import Array, dtype_name
from ..operations.agreement import Call
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics, statistics_of
from ..sharding.sliced import Sliced, whole
from ..training.averager import Averager
from . import state
from .method import Layerwise, UpdateRule
from .parts import DIRECTION, Part, add_squares, state_dtypes
from .settings import ADAPTS, Groups, Settings, all_values_at, described, settings_of, summarized
from .slices import ModelSlices

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

    def __init__(self, dp: TrainedModel, rule: UpdateRule, *, groups: Groups | None,
                 no_decay: Sequence[str], max_norm: float | None, sharded: bool) -> None:
        _refuse_other_than_models(dp)
        self._dp, self._comm, self._gradients = dp, dp.comm, dp.gradients
        self._rule, self.steps = rule, 0
        with same_on_all(self._comm, type(self).__name__,
                         remedy="give it the same arguments on every rank") as same:
            same["sharded"] = self.sharded = truth("sharded", sharded)
            same["max_norm"] = self._max_norm = None if max_norm is None else number(
                "max_norm", max_norm, lambda x: 0 < x < math.inf,
                "a finite number above 0, or None")
            self._refuse_other_tensors()
            self.settings = settings_of(self._gradients.tensors, rule.settings, groups, no_decay)
            same |= {**described(self.settings), **rule.extra(self.settings)}
            self._gradients.refuse_claim(scatters=self.sharded)
        self._gradients.claim(self, scatters=self.sharded)
        self._vectors = list(rule.vectors)
        self._add_vectors(self.settings)
        self._slices = ModelSlices(self._gradients, self._comm, dp.vector)
        self._device = self._gradients.device
        # Number of the last step of the gradients that was applied or skipped.
        self._last_step = self._gradients.steps
        # Handles of weights in flight, by the index of the bucket.
        self._in_flight: dict[int, Handle[None]] = {}
        self.statistics = Statistics()

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
        now = all_values_at(self.settings, self.steps)
        compared["optimizer"] = f"after update {self.steps} with {summarized(now)}"
        made_with = ", ".join(compared.values())

        def send(index: int) -> None:
            if self.sharded:
                self._in_flight[index] = self._slices.send(index, made_with)

        with self._comm.recorder.phase("optimizer"):
            self._apply(now, scale, send)
        return True

    def end_step(self) -> None:
        """Return when the updated weights of other ranks have arrived. Collective, blocking."""
        while self._in_flight:
            index = next(iter(self._in_flight))
            handle = self._in_flight.pop(index)
            handle.wait()
            self._slices.costs.append(handle.flight)
            self._slices.receive(index)
        self.statistics = statistics_of(self._slices.costs, self._comm.size)
        self._slices.costs.clear()
        if self._device is not None:
            # Later CuPy calls wait for the updated weights.
            self._device.gpu.follow(self._device.event())

    @property
    def elementwise(self) -> bool:
        """Whether each element is updated independently, without any norm."""
        return self._max_norm is None and self._rule.layerwise is None

    def update(self, scale: float, done: Callable[[int], None], *,
               last_first: bool = False, rate: float = 1.0) -> None:
        """Update this rank's parts with the averaged gradients, which must be finite.

        For adapters that send the weights themselves. The gradients must have arrived; they are
        multiplied by `scale`, and learning rates by `rate`. `done` is called with the index of each
        bucket once it is updated. Collective, blocking.
        """
        now = all_values_at(self.settings, self.steps)
        for settings in {id(settings): settings for settings in now.values()}.values():
            settings["lr"] *= rate
        self._apply(now, scale, done, last_first=last_first)

    def _apply(self, now: Mapping[str, Settings], scale: float, done: Callable[[int], None], *,
               last_first: bool = False) -> None:
        """Update this rank's parts with these settings by tensor; see `update`."""
        self._await_users_stream()
        self._add_vectors(now)
        buckets = self._slices.parts
        parts = [part for bucket in buckets for part in bucket]
        if self._max_norm is not None:
            total = scale * self._norm_of_gradients(parts)
            scale *= min(1.0, self._max_norm / total) if total else 1.0
        for part in parts:
            part.begin(now[part.name], self.steps + 1, scale)
        if self._rule.layerwise is not None:
            self._adapt(parts, self._rule.layerwise)
        indices = range(len(buckets))
        for index in reversed(indices) if last_first else indices:
            for part in buckets[index]:
                part.apply(self._rule.update_of(part.settings), self._rule.numbers(part))
                part.end()
            done(index)
        self.steps += 1

    def _add_vectors(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Add optional state vectors that the update of any tensor needs, given all settings."""
        for vector in self._rule.optional:
            if vector not in self._vectors and any(
                    vector in self._rule.update_of(x).vectors for x in settings.values()):
                self._vectors.append(vector)

    def _adapt(self, parts: Sequence[Part], layerwise: Layerwise) -> None:
        """Set the factor of each part's rate. Collective, blocking."""
        if layerwise.first is not None:
            for part in parts:
                part.apply(layerwise.first, self._rule.numbers(part))
        direction = layerwise.direction
        kinds = ["w", "g" if direction is None else DIRECTION]

        def blocks(part: Part, share: slice) -> Iterator[Mapping[str, Any]]:
            for block in part.blocks(kinds if direction is None else direction.vectors, share):
                if direction is not None:
                    direction(block, self._rule.numbers(part))
                yield block

        norms_of = self._norms(parts, kinds, blocks)
        for part in parts:
            weights, movement = (norms_of[part.name][kind] for kind in kinds)
            if part.settings[ADAPTS] and weights and movement:
                part.ratio = layerwise.ratio(part, weights, movement)

    def grad_norm(self) -> float:
        """Wait for the averaged gradients, and return the norm of all of them together.

        Call it before `step`. With a LossScaler, the result is the norm of the scaled gradients.

        Raises:
            GradientError: There are no new gradients.

        Collective: yes. Blocking: yes.
        """
        self._await_gradients("grad_norm()")
        self._await_users_stream()
        return self._norm_of_gradients(self._all_parts())

    # The state

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """This rank's current state vectors, by tensor and name, in host memory.

        Unless the optimizer is sharded, they are equal on all ranks, and can be compared by
        `dp.watch(optimizer=optimizer.state)`.
        """
        return state.StateView(self._slices, self._vectors)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete state by tensor, equal on all ranks.

        Collective: if sharded. Blocking: yes.
        """
        saved = self._saved(0, 1)
        return {**saved, "tensors": state.gathered(self._comm, saved["tensors"]) if self.sharded
                else whole(saved["tensors"])}

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a copy of the ranges of the state that this rank saves.

            checkpoints.save(step, replicated={"params": params},
                             sharded=optimizer.sharded_state_dict())

        Collective: no. Blocking: yes.
        """
        return self._saved(self._comm.rank, self._comm.size)

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
        parts = self._all_parts()
        with same_on_all(self._comm, f"the state of {type(self).__name__}",
                         remedy="load the same state on every rank") as same:
            steps, names, contents = self._checked(state_dict, parts)
            same["steps"] = steps
            same["tensors"] = {
                name: {vector: x if isinstance(x, Sliced) else np.asarray(x)
                       for vector, x in leaves.items()}
                for name, leaves in state_dict["tensors"].items()} if self.sharded else {
                part.name: vectors for part, vectors in contents}
        self._load(steps, names, contents)

    def load_alone(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as `load_state_dict` does, but allow it to differ between ranks."""
        self._load(*self._checked(state_dict, self._all_parts()))

    def follow(self, gradients: Averager) -> None:
        """Move the state to other buckets of the same tensors. Collective, blocking."""
        saved, last_step = self.state_dict(), self._last_step
        gradients.claim(self, scatters=self.sharded)
        self._gradients = gradients
        self._slices.cut(gradients)
        self.load_alone(saved)
        self._last_step = last_step

    def refuse_state(self, state_dict: Any) -> None:
        """Raise ConfigError if a state is of another model or optimizer."""
        self._checked(state_dict, ())

    def _checked(self, state_dict: Any, parts: Sequence[Part]) -> tuple[
            int, list[str], list[tuple[Part, dict[str, Array]]]]:
        """Return the content of a state for this rank's parts; change nothing.

        It is the number of updates, the names of state vectors, and copies of each part's vectors.
        """
        known = list(dict.fromkeys([*self._vectors, *self._rule.optional]))
        steps, leaves = state.checked(state_dict, type(self).__name__, self._gradients.tensors,
                                      self._dtypes(known), self._rule.optional)
        saved = set().union(*leaves.values())
        names = [name for name in known if name in self._vectors or name in saved]
        # A state vector that did not exist when the state was saved was zero.
        return steps, names, [(part, {
            vector: leaves[part.name][vector].read(part.offset, part.offset + part.size)
            if vector in saved else np.zeros(part.size, part.dtype)
            for vector in state_dtypes(names, part.weights.dtype)}) for part in parts]

    def _load(self, steps: int, names: Sequence[str],
              contents: Sequence[tuple[Part, Mapping[str, Array]]]) -> None:
        self.steps, self._last_step, self._vectors[:] = steps, self._gradients.steps, names
        for part, vectors_of_part in contents:
            for vector, x in vectors_of_part.items():
                vectors.copy_to(part.vector(vector), vectors.moved(x, self._device))

    def _saved(self, rank: int, size: int) -> dict[str, Any]:
        share = (0, 1) if self.sharded else (rank, size)
        return {"optimizer": type(self).__name__, "steps": self.steps,
                "tensors": state.sliced(self._gradients.tensors, self._all_parts(),
                                        self._dtypes(self._vectors), share)}

    def _dtypes(self, names: Sequence[str]) -> dict[str, dict[str, "np.dtype[Any]"]]:
        """Return the dtypes of each tensor's vectors with these names, and of master copies."""
        return {name: state_dtypes(names, tensor.dtype)
                for name, tensor in self._gradients.tensors.items()}

    def _norms(self, parts: Sequence[Part], kinds: Sequence[str],
               blocks: Callable[[Part, slice], Iterator[Mapping[str, Any]]],
               ) -> Mapping[str, Mapping[str, float]]:
        """Return the norms of complete tensors, by tensor and kind; the same bits on all ranks.

        One allreduce adds sums of squares in float64. If all ranks have all parts, each rank
        computes its share of each part. This saves work, and the result is the same on ranks with
        different processors.

        `kinds` are the names of the vectors that `blocks` yields for a range of elements of a part.
        Collective, blocking.
        """
        names = self._gradients.tensors
        sums = vectors.zeros(len(names) * len(kinds), np.float64, self._device)
        rows = {name: i * len(kinds) for i, name in enumerate(names)}
        rank, size = (0, 1) if self._gradients.scatters else (self._comm.rank, self._comm.size)
        for part in parts:
            n, row = part.size, rows[part.name]
            for block in blocks(part, slice(rank * n // size, (rank + 1) * n // size)):
                for i, kind in enumerate(kinds, row):
                    add_squares(block[kind], sums[i:i + 1])
        total = vectors.on_host(sums)
        self._comm.run(Call("norms", f"of {self._gradients.step_label}"),
                       lambda collectives: collectives.allreduce(total))
        return {name: dict(zip(kinds, map(math.sqrt, total[row:row + len(kinds)].tolist())))
                for name, row in rows.items()}

    # The step

    def _await_gradients(self, call: str) -> None:
        if self._gradients.step_started:
            self._dp.wait()
        if self._gradients.steps == self._last_step:
            raise GradientError(
                f"rank {self._comm.rank}: {call} without new gradients; compute them, and mark "
                f"each as ready, before each optimizer.step(), which is called once per step")

    def _all_parts(self) -> list[Part]:
        """Return this rank's parts of all buckets."""
        return [part for bucket in self._slices.parts for part in bucket]

    def _norm_of_gradients(self, parts: Sequence[Part]) -> float:
        norms_of = self._norms(parts, ["g"], lambda part, share: part.blocks(["g"], share))
        return math.sqrt(sum(norms["g"]**2 for norms in norms_of.values()))

    def _await_users_stream(self) -> None:
        """Wait until the GPU has written the results of earlier CuPy calls."""
        if self._device is not None:
            await_event(self._device.gpu.mark())

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
