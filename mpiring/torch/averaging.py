"""Averages gradients during backward, by hooks on parameters and on outputs of the model."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..text import first_few
from ..training.averager import Averager
from ..training.fused import Fusion
from ..training.weighing import Weighing
from .gradients import GradientBuckets
from .modules import weak_hook
from .private import (
    adds_to_gradients, call_after_backward, leaf_nodes, versions_of, without_subclasses,
)
from .tensors import tensors_in
from .withheld import WithheldGradient, substitutes

if TYPE_CHECKING:
    from .sharded import Sharded


@dataclass(frozen=True)
class Settings(Fusion):
    """Settings of the averaging of gradients.

    With `find_unused_parameters`, parameters that a backward pass did not reach contribute zeros.
    With `defer_wait`, gradients arrive in `wait`, not at the end of backward.
    """

    find_unused_parameters: bool = False
    defer_wait: bool = False


@dataclass(eq=False)
class ForwardPass:
    """A forward pass of the model, for the backward passes through its outputs.

    These passes average, except if it was in `no_sync()`. The batch has `samples` samples.
    """

    averages: bool
    samples: int


class BackwardPass:
    """A backward pass that is running.

    PyTorch has the only reference, and drops it at the end of the pass, or if the pass raises an
    error, of which nothing else informs.

    Attributes:
        averages: Whether the pass averages; otherwise, gradients accumulate on this rank.
        versions: Versions of the parameters at the start.
        forwards: Forward passes whose outputs the pass has reached.
        accumulated: Names of the gradients that were complete before the pass averaged.
    """

    def __init__(self, averages: bool, versions: Sequence[int]) -> None:
        self.averages, self.versions = averages, versions
        self.forwards: set[ForwardPass] = set()
        self.accumulated: set[str] = set()


def _no_pass() -> None:
    """Return None, like a weak reference to a pass that has ended."""


class Averaging:
    """Averages gradients in the backward passes of a model.

    When a pass ends, all gradients have arrived, or are in flight with `defer_wait`. Collective,
    blocking.

    Args:
        completed: Function that is called when all gradients of a step have arrived.

    Attributes:
        active: Whether backward passes average if they reach no output of the model.
        averaged: Whether the last complete backward pass has averaged.
        placeholders: Substitutes for the parameters' gradients if an owner has the means, by name.

    GradientBuckets documents the other arguments and attributes; `gradients` is its `averager`.
    """

    def __init__(self, parameters: Mapping[str, Parameter], sparse: set[Parameter],
                 comm: Communicator, weighing: Weighing, settings: Settings, *,
                 completed: Callable[[], None], before: Averager | None = None) -> None:
        self.active, self.averaged, self.in_flight, self._weighing = True, True, False, weighing
        self._parameters = dict(parameters)
        self._trained = set(parameters.values())
        self.comm, self._settings, self._completed = comm, settings, completed
        # For each dense parameter, whether this rank has a gradient; later, whether any rank has.
        self._has_gradient = np.empty(0, bool)
        # Substitutes for gradients in flight.
        self._withheld: dict[str, WithheldGradient] = {}
        self._pass: Callable[[], BackwardPass | None] = _no_pass
        # Versions of the parameters after the last update.
        self._latest_versions: Sequence[int] = ()
        self.updated()
        self._buckets = GradientBuckets(parameters, sparse, comm, weighing, settings, before=before)
        self.dense, self.gradients = self._buckets.dense, self._buckets.averager
        self._owner: Sharded | None = None
        self.placeholders: dict[str, WithheldGradient] = {}
        self._hooks = contextlib.ExitStack()
        for name, p in parameters.items():
            self._hooks.enter_context(
                p.register_post_accumulate_grad_hook(weak_hook(self._accumulated, name)))
        weakref.finalize(self, self._hooks.close).atexit = False

    def is_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has any of the parameters."""
        return any(p in self._trained for group in optimizer.param_groups for p in group["params"])

    def updated(self) -> None:
        """Record that an optimizer has updated parameters."""
        self._latest_versions = versions_of(self._parameters.values())

    @property
    def written(self) -> bool:
        """Whether parameters were written since the last update, as far as versions show."""
        return versions_of(self._parameters.values()) != self._latest_versions

    def give_to(self, owner: "Sharded") -> None:
        """Give this rank's slices of the means to an owner from now on. Collective.

        Raises ConfigError if some gradients are sparse.
        """
        if len(self.dense) < len(self._parameters):
            raise ConfigError(
                f"rank {self.comm.rank}: the gradients of "
                f"{', '.join(sorted(self._parameters.keys() - self.dense.keys()))} are sparse, "
                f"and cannot be cut into slices; use sparse=False with a Sharded optimizer")
        self.gradients.scatter()
        self._owner = owner
        self.placeholders = substitutes(self.dense, _scattered)

    def close(self) -> None:
        """Detach from the parameters; their gradients remain unchanged."""
        self.wait()
        self._buckets.close()
        self._hooks.close()

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's own state; see Averager. Collective, blocking."""
        self.wait()
        self.gradients.load_own_state_dict(state)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return self._pass() is not None

    def watch(self, outputs: object, forward: ForwardPass, gone: Callable[[], None]) -> None:
        """Watch for backward passes through these outputs of the model.

        The end of such a pass must be detected, even if it reaches no parameter. A pass calls
        `gone` if this object does not exist any more.
        """
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                leaves = leaf_nodes(output.grad_fn, self._trained)
                output.register_hook(weak_hook(self._reached_output, leaves, forward, gone=gone))

    def wait(self) -> None:
        """Wait for all gradients; raise errors of `completed`. Collective, blocking."""
        if not self.in_flight:
            return
        self.in_flight = False
        with self._buckets.select_gpu():
            self._buckets.wait()
            if self._owner is None:
                self._assign_gradients()
            else:
                self._owner.take()
        self._completed()

    def _assign_gradients(self) -> None:
        """Give parameters the gradients that have arrived."""
        unreached: set[str] = set()
        if self._settings.find_unused_parameters:
            self.comm.allreduce(self._has_gradient, op="max")
            unreached = {name for name, has in zip(self.dense, self._has_gradient) if not has}
        views, withheld, self._withheld = self._buckets.views, self._withheld, {}
        for name, p in self.dense.items():
            if name in withheld:
                if p.grad is not withheld[name]:
                    # The user has replaced the gradient, which is not needed any more.
                    continue
                if withheld[name].is_zeroed:
                    views[name].zero_()
            elif name in unreached:
                continue
            p.grad = None if name in unreached else views[name]

    def _reached_output(self, leaves: list[Any], forward: ForwardPass, _: object) -> None:
        """Record that a pass has reached an output; only backward passes are steps.

        A pass averages if it reaches an output of any forward pass whose backward passes average.
        """
        if not adds_to_gradients(leaves):
            return
        running = self._pass() or self._begin(forward.averages)
        if forward not in running.forwards:
            running.forwards.add(forward)
            running.averages = running.averages or forward.averages
            self._weighing.samples = (self._weighing.samples or 0) + forward.samples

    def _begin(self, averages: bool) -> BackwardPass:
        """Begin a pass, and register `_end` for its end; the end of a nested pass does not matter.
        """
        self.wait()
        if self._owner is not None:
            self._owner.begin()
        running = BackwardPass(averages, versions_of(self._parameters.values()))
        self._pass = weakref.ref(running)
        call_after_backward(functools.partial(self._end, running))
        return running

    def _accumulated(self, name: str, p: Parameter) -> None:
        """Put a gradient to which a pass has added into its bucket; a full bucket is sent."""
        running = self._pass() or self._begin(self.active)
        averages = running.averages
        if not averages:
            running.accumulated.add(name)
        # Tracebacks of errors must not keep the pass.
        del running
        self._buckets.put(name, complete=averages)

    def _end(self, running: BackwardPass) -> None:
        """End a backward pass; if it has averaged, complete the step."""
        self._pass = _no_pass
        self._refuse_updates(running)
        self.averaged = running.averages
        if not running.averages:
            return
        missing = self._buckets.missing
        self._refuse_replaced({*missing})
        unreached = [name for name in missing if name not in running.accumulated]
        if unreached and not self._settings.find_unused_parameters:
            raise GradientError(
                f"rank {self.comm.rank}: backward did not reach {len(unreached)} of "
                f"{len(self._parameters)} parameters: {', '.join(unreached)}; pass "
                f"find_unused_parameters=True, or freeze them with requires_grad_(False), or "
                f"name them in backward(inputs=[...]) if it left them out")
        self._contribute(missing)
        for name, x in self.placeholders.items():
            self.dense[name].grad = x
        if self._settings.defer_wait:
            self._withhold()
        else:
            self.wait()

    def _refuse_updates(self, running: BackwardPass) -> None:
        """Raise GradientError if parameters were written during a backward pass."""
        versions = versions_of(self._parameters.values())
        if versions != running.versions:
            written = [name for name, before, now in zip(
                self._parameters, running.versions, versions) if before != now]
            raise GradientError(
                f"rank {self.comm.rank}: {first_few(written, 3)} changed during the backward pass, "
                f"when gradients are not yet means over ranks; update parameters after "
                f"backward(), not in a hook (with Sharded, no rank needs memory for all state)")

    def _refuse_replaced(self, missing: Set[str]) -> None:
        """Raise GradientError if hooks have replaced gradients, which the step would not notice."""
        replaced = [name for name, p in self.dense.items()
                    if p.grad is not self._buckets.views[name] and name not in missing]
        if replaced:
            raise GradientError(
                f"rank {self.comm.rank}: the gradients of {first_few(replaced, 3)} were dropped or "
                f"replaced during the backward pass, when they are not yet means over ranks; use "
                f"gradients after backward(), not in a hook")

    def _withhold(self) -> None:
        """Withhold the gradients in flight; gradients that the user drops stay dropped."""
        self._withheld = substitutes(self.dense, _in_flight, droppable=True)
        for name, x in self._withheld.items():
            self.dense[name].grad = x

    def _contribute(self, unreached: Sequence[str]) -> None:
        """Complete this rank's step: contribute gradients, or zeros, that no pass has reached."""
        for name in unreached:
            self._buckets.put(name, complete=True)
        self.in_flight = True
        if self._settings.find_unused_parameters:
            self._has_gradient = np.array([name not in unreached or p.grad is not None
                                           for name, p in self.dense.items()])

    def step_without_batch(self) -> None:
        """Take part in a step for which only other ranks have gradients. Collective, blocking."""
        for p in self._parameters.values():
            p.grad = None
        self._contribute(list(self._parameters))
        self.wait()


class SliceGradient(torch.Tensor):
    """Gradient of one of this rank's slices, in `param_groups` of a Sharded optimizer.

    It is a plain tensor, except that its norm raises GradientError, because clipping by the norm of
    one slice would use a different factor on each rank.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise GradientError for norms; other results are plain tensors."""
        name = getattr(func, "__name__", "")
        if name in _NORMS:
            raise _scattered(name)
        with without_subclasses():
            return func(*args, **(kwargs or {}))


_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm"}


def _scattered(function: str) -> GradientError:
    return GradientError(
        f"{function} of a gradient that is in slices, one per rank "
        f"(Sharded): clip with optimizer.clip_grad_norm_(...), in Lightning by "
        f"configure_gradient_clipping; log optimizer.grad_norm(); unscale with "
        f"GradScaler.unscale_(optimizer)")


def _in_flight(function: str) -> GradientError:
    return GradientError(
        f"{function} of a gradient that is in flight (defer_wait=True): call model.synchronize() "
        f"before gradients are read, clipped, unscaled or written to")
