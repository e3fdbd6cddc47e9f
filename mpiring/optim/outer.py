"""Trains models locally and synchronizes them rarely: local SGD, DiLoCo and Streaming DiLoCo.

Sources:
Stich, Local SGD converges fast and communicates little, ICLR 2019 (arXiv 1805.09767).
Lin et al., Don't use large mini-batches, use local SGD, ICLR 2020 (1808.07217).
Douillard et al., DiLoCo, 2023 (2311.08105).
Douillard et al., Streaming DiLoCo with overlapping communication, 2025 (2501.18512).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ..arguments import number, refuse_other_state, truth, whole_number
from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..gpu import vectors
from ..names import LOCAL_TRAINING, TORCHFT_SYNONYMS, explaining
from ..sharding.sliced import Sliced, whole
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics
from ..reducers.named import or_setting
from ..reducers.reducer import ReducerSpec, reducers_of
from ..world import or_world
from .fragments import Fragment, LocalWeights, OuterSettings, cut
from .method import leaf_of
from .settings import Scheduled, settings_of, values_at

# Default of `alpha` with a delay.
_ALPHA = 0.5


class Outer:
    """Synchronizes models that are trained locally; base class of LocalSGD and DiLoCo.

    Attributes:
        kind: Returns the LocalWeights of a model, given the communicator; all ranks then have the
            weights of rank 0. Adapters set it. Collective, blocking.
        steps: Number of inner steps so far.
    """

    kind: ClassVar[Any]

    def __init__(self, model: Any, comm: Communicator | None, settings: OuterSettings) -> None:
        self.comm = comm = or_world(comm)
        self.steps = 0
        settings = _agreed(comm, type(self).__name__, settings)
        self.every, self.delay, self._start = settings.every, settings.delay, settings.start
        self.alpha = settings.alpha or 0.0
        self._weights: LocalWeights = self.kind(model, comm)
        with same_on_all(comm, type(self).__name__) as same:
            parts = cut(self._weights.tensors, settings.fragments)
            reducers = reducers_of([tensor.name for tensor in self._weights.tensors],
                                   or_setting(settings.reducer, comm))
            same["reducer"] = {name: repr(reducer) for name, reducer in reducers.items()}
        with self._weights.selected():
            self._fragments = [
                Fragment(index, tensors, self._weights, comm, settings, reducers)
                for index, tensors in enumerate(parts)]
        # If sharded, ranks update their slices after half of the delay, then gather the weights.
        self._update_after = (self.delay - self.delay // 2 if settings.sharded else self.delay)
        self._is_joined = self._shows_global = False
        # Number of steps that this rank had taken when it reached the end of `join`.
        self._own_steps = 0
        self._plan()

    def __repr__(self) -> str:
        return (f"{type(self).__name__}(…, every={self.every}, "
                f"fragments={len(self._fragments)}, delay={self.delay})")

    @property
    def statistics(self) -> Statistics:
        """Costs of synchronization on this rank so far; subtract two values for a period.

        `exposed_s` is the time in seconds for which `step` has waited.
        """
        return sum((fragment.statistics for fragment in self._fragments), Statistics())

    # Steps

    def step(self) -> None:
        """Count a step of the inner optimizer, and run the synchronizations that are due.

        Call it on all ranks after each step of the inner optimizer.

        Raises:
            GradientError: The weights of some rank are not finite; names them on all ranks.
            BufferMismatchError: Ranks have made different numbers of steps.
            ConfigError: The trained parameters have changed.

        Collective: yes, if a synchronization is due. Blocking: until the fragments that are due at
        this step have arrived; without a delay, until the mean is complete.
        """
        self.steps += 1
        if self.steps >= self._next:
            if self._shows_global:
                raise GradientError(f"rank {self.comm.rank}: step() within global_parameters(), "
                                    f"which would be lost; end that block first")
            self._run_due(is_training=True)
        elif self._has_pending:
            self.comm.poke()

    def synchronize(self) -> None:
        """Synchronize the complete model now; all ranks then have the global parameters.

        Call it at the end of training. It completes the synchronizations in flight, then takes an
        outer step for all changes since the last synchronization, without delay and without mixing.

        Raises the errors of `step`.

        Collective: yes. Blocking: yes.
        """
        if self._is_joined:
            raise ConfigError(f"rank {self.comm.rank}: synchronize() within join(), in which "
                              f"others may have ended; the end of the block synchronizes")
        self._synchronize(is_training=True)

    def _synchronize(self, *, is_training: bool) -> None:
        with self._weights.selected():
            self._weights.refuse_others()
            for fragment in self._fragments:
                fragment.receive(self.steps)
                if fragment.due is not None:
                    fragment.mix(self.alpha)
            for fragment in self._fragments:
                if fragment.since < self.steps:
                    self._send(fragment, is_training)
            for fragment in self._fragments:
                fragment.receive(self.steps)
                fragment.mix(0.0)
            self._weights.complete()
        self._plan()

    def _run_due(self, *, is_training: bool) -> bool:
        """Run the synchronizations that are due; return whether any rank still trains."""
        if self._is_joined and not self._count(is_training):
            return False
        with self._weights.selected():
            for fragment in self._fragments:
                if self._next_send(fragment, self.steps - 1) == self.steps:
                    self._weights.refuse_others()
                    self._send(fragment, is_training)
                    fragment.due = self.steps + self.delay
            for fragment in self._fragments:
                if fragment.due is not None and fragment.since + self._update_after <= self.steps:
                    fragment.update(self.steps)
            for fragment in self._fragments:
                if fragment.due is not None and fragment.due <= self.steps:
                    fragment.receive(self.steps)
                    fragment.mix(self.alpha)
                    if fragment is self._fragments[-1]:
                        self._weights.complete()
        self._plan()
        return True

    def _send(self, fragment: Fragment, is_training: bool) -> None:
        factor = 1.0
        if self._is_joined:
            took_steps = is_training or fragment.since < self._own_steps
            factor = took_steps * self.comm.size / self._count(took_steps)
        fragment.send(self.steps, factor)

    def _count(self, is_one: bool) -> int:
        """Return the number of ranks for which a condition is true. Collective, blocking."""
        count = np.array([int(is_one)])
        self.comm.allreduce(count)
        return int(count[0])

    # Schedule

    def _next_send(self, fragment: Fragment, after: int) -> int:
        """Return the first step after step `after` at which a fragment is sent."""
        step = after + 1
        if step <= self._start:
            return step
        offset = (fragment.index + 1) * self.every // len(self._fragments)
        return step + (offset - step) % self.every

    def _plan(self) -> None:
        """Find the next step at which something is due."""
        steps = [self._next_send(fragment, self.steps) for fragment in self._fragments]
        pending = [fragment for fragment in self._fragments if fragment.due is not None]
        steps += [step for fragment in pending
                  for step in (fragment.since + self._update_after, fragment.due)
                  if step is not None and step > self.steps]
        self._next, self._has_pending = min(steps), bool(pending)

    # The global parameters

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Give the model the global parameters, equal on all ranks, within a `with` block.

            with outer.global_parameters():
                accuracy = evaluate(model)

        Use it to evaluate or save the model during training. Afterwards the model has its local
        parameters again; changes to parameters within the block are lost.

        Raises:
            GradientError: The weights of some rank are not finite, or the block calls `step`.

        Collective: yes. Blocking: yes.
        """
        self._complete()
        with self._weights.with_global_weights():
            self._shows_global, self._next = True, 0
            try:
                yield
            finally:
                self._shows_global = False
                self._plan()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks train for different numbers of steps.

            with outer.join():
                for x, y in batches:
                    ...
                    outer.step()

        A rank that has reached the end of the block still takes part in synchronizations. The mean
        is over the ranks that have taken steps since the last synchronization. At the end all ranks
        `synchronize`.

        Raises:
            ConfigError: The block is within another `join` block.

        Collective: yes. Blocking: yes.
        """
        if self._is_joined:
            raise ConfigError(f"rank {self.comm.rank}: join() within join(); one is enough")
        self._is_joined = True
        try:
            yield
            self._own_steps = self.steps
            self.steps = self._next
            while self._run_due(is_training=False):
                self.steps = self._next
            self.steps = max(self.comm.allgather_object(self._own_steps))
            self._synchronize(is_training=False)
        finally:
            self._is_joined = False

    def _complete(self) -> None:
        """Complete the updates in flight; `step` mixes them in when they are due."""
        with self._weights.selected():
            for fragment in self._fragments:
                fragment.receive(self.steps)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the global state, equal on all ranks: parameters and outer momentum.

        Collective: yes. Blocking: yes.
        """
        saved: dict[str, Any] = whole(self._saved(complete=True))
        return saved

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a copy of the part of the global state that this rank saves.

            checkpoints.save(step, sharded=outer.sharded_state_dict(), own={...})

        Collective: yes. Blocking: yes.
        """
        return self._saved(complete=False)

    def _saved(self, *, complete: bool) -> dict[str, Any]:
        self._complete()
        rank, size = (0, 1) if complete else (self.comm.rank, self.comm.size)
        parameters, fragments = {}, []
        for fragment in self._fragments:
            for name, tensor in fragment.gradients.tensors.items():
                first, last = rank * tensor.size // size, (rank + 1) * tensor.size // size
                x = vectors.on_host(fragment.vector(name)[first:last])
                parameters[name] = Sliced(tensor.shape, {(first, last): x}, tensor.dtype)
            outer = fragment.optimizer
            fragments.append({
                "since": fragment.since, "due": fragment.due,
                "optimizer": outer.state_dict() if complete else outer.sharded_state_dict()})
        return {"outer": type(self).__name__, "steps": self.steps, "parameters": parameters,
                "fragments": fragments}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, and copy its parameters to the model; the number of ranks may have changed.

        For a bitwise identical resume, then load this rank's local weights into the model.

        Args:
            state_dict: Result of `state_dict`, or `Saved.sharded` of a checkpoint.

        Raises:
            ConfigError: The state is of another model, method or number of fragments, or differs
                between ranks.

        Collective: yes. Blocking: yes.
        """
        self._complete()
        with same_on_all(self.comm, f"the state of {type(self).__name__}",
                         remedy="load the same state on every rank") as same:
            state_dict = self._checked(whole(state_dict))
            same.update(state_dict)
        with self._weights.selected():
            for fragment, saved in zip(self._fragments, state_dict["fragments"]):
                for name in fragment.names:
                    vectors.copy_to(fragment.vector(name), vectors.moved(
                        state_dict["parameters"][name].reshape(-1), self._weights.device))
                fragment.optimizer.load_state_dict(saved["optimizer"])
                fragment.await_weights()
                fragment.mix(0.0)
                fragment.since, fragment.due = saved["since"], saved["due"]
        self.steps = state_dict["steps"]
        self._plan()

    def _checked(self, state_dict: Any) -> dict[str, Any]:
        """Return a copy of a state with checked parameters; raise ConfigError if it differs."""
        method = type(self).__name__
        refuse_other_state(state_dict, ("outer", "steps", "parameters", "fragments"),
                           f"of {method}")
        if (state_dict["outer"], len(state_dict["fragments"])) != (method, len(self._fragments)):
            raise ConfigError(
                f"the state is of {state_dict['outer']} with {len(state_dict['fragments'])} "
                f"fragments, not of {method} with {len(self._fragments)}; build what was saved")
        steps = whole_number("steps", state_dict["steps"], 0)
        tensors = {tensor.name: tensor for tensor in self._weights.tensors}
        refuse_other_state(state_dict["parameters"], tensors, f"of {method}")
        parameters = {name: leaf_of(
            state_dict["parameters"][name], f"{name!r}", tensor.shape, tensor.dtype).whole()
            for name, tensor in tensors.items()}
        for fragment, saved in zip(self._fragments, state_dict["fragments"]):
            refuse_other_state(saved, ("since", "due", "optimizer"),
                               f"of {method}, in fragment {fragment.index},")
            whole_number("since", saved["since"], 0)
            if saved["due"] is not None:
                whole_number("due", saved["due"], 0)
            fragment.optimizer.method.checked(saved["optimizer"], ())
        return {**state_dict, "steps": steps, "parameters": parameters}

    def own_state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's own state: the residuals of its Reducers.

        Every rank saves its own state, along with the weights of its model.

        Collective: yes. Blocking: yes.
        """
        self._complete()
        return {"reducers": [
            [compressor.state_dict() for compressor in fragment.gradients.compressors]
            for fragment in self._fragments]}

    def load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `own_state_dict` of this rank; call it on all ranks.

        Args:
            state_dict: The state of this rank.

        Raises:
            ConfigError: The state belongs to other Reducers. The next step raises this error if
                the state belongs to other ranks.

        Collective: no, but call it on all ranks.
        """
        refuse_other_state(state_dict, ("reducers",), f"of this rank of a {type(self).__name__}")
        present = [fragment.gradients.compressors for fragment in self._fragments]
        if [*map(len, state_dict["reducers"])] != [*map(len, present)]:
            raise ConfigError(f"rank {self.comm.rank}: the state is of other fragments or "
                              f"reducers; build what was saved")
        for compressors, states in zip(present, state_dict["reducers"]):
            for compressor, saved in zip(compressors, states):
                compressor.load_state_dict(saved)


def _agreed(comm: Communicator, method: str, settings: OuterSettings) -> OuterSettings:
    """Return checked settings; raise ConfigError unless all ranks have the same."""
    with same_on_all(comm, method) as same:
        same["every"] = every = whole_number("every", settings.every, 1)
        same["start"] = whole_number("start", settings.start, 0)
        same["fragments"] = whole_number("fragments", settings.fragments, 1, every)
        same["delay"] = delay = whole_number("delay", settings.delay, 0, every - 1)
        same["alpha"] = number(
            "alpha", _ALPHA * bool(delay) if settings.alpha is None else settings.alpha,
            lambda x: 0 <= x < 1, "a number of at least 0, below 1")
        same["sharded"] = truth("sharded", settings.sharded)
        same["bucket_bytes"] = whole_number("bucket_bytes", settings.bucket_bytes, 1)
        (rates,) = settings_of(
            ["*"], {"lr": settings.lr, "momentum": settings.momentum}, None, ()).values()
        settings = replace(settings, **same, lr=rates["lr"], momentum=rates["momentum"])
        same.update(values_at(rates, 0))
    return settings


class PeriodicAveraging(Outer):
    """Averages the parameters of all ranks after every few local steps; see LocalSGD."""

    @explaining(LOCAL_TRAINING, TORCHFT_SYNONYMS)
    def __init__(self, model: Any, comm: Communicator | None = None, *, every: int,
                 start: int = 0, reducer: ReducerSpec = None, sharded: bool = False,
                 bucket_bytes: int = 25 << 20) -> None:
        super().__init__(model, comm, OuterSettings(
            every, start, reducer=reducer, sharded=sharded, bucket_bytes=bucket_bytes))


class StreamingDiLoCo(Outer):
    """Takes outer steps with Nesterov momentum on the changes by local steps; see DiLoCo.

    An outer step averages d = global - local parameters. Then v ← μ v + d and
    global ← global - η (d + μ v).
    """

    @explaining(LOCAL_TRAINING, TORCHFT_SYNONYMS)
    def __init__(self, model: Any, comm: Communicator | None = None, *, every: int,
                 lr: Scheduled = 0.7, momentum: Scheduled = 0.9, fragments: int = 1, delay: int = 0,
                 alpha: float | None = None, reducer: ReducerSpec = None, sharded: bool = False,
                 bucket_bytes: int = 25 << 20) -> None:
        super().__init__(model, comm, OuterSettings(
            every, 0, lr, momentum, fragments, delay, alpha, reducer, sharded, bucket_bytes))
