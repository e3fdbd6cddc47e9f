"""Averages gradients during backward, by hooks on parameters and views into buckets."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..text import first_few
from ..training.averager import Averager
from ..training.fused import Fusion, Placement
from ..training.weighing import Weighing
from .modules import weak_hook
from .private import (
    adds_to_gradients, call_after_backward, leaf_nodes, versions_of, without_subclasses,
)
from .sparse import SparseGradients
from .tensors import (
    gpu_of, in_shape_of, marker_of, seen_as_tensor, selector_of, spec_of, tensors_in,
)
from .threads import fill_only_node
from .withheld import WithheldGradient, substitutes


@dataclass(frozen=True)
class Settings(Fusion):
    """Settings of the averaging of gradients.

    With `find_unused_parameters`, parameters that a backward pass did not reach contribute zeros.
    With `defer_wait`, gradients arrive in `wait`, not at the end of backward.
    """

    find_unused_parameters: bool = False
    defer_wait: bool = False


class GradientOwner(Protocol):
    """Receives this rank's slices of the means, instead of the parameters; see `Sharded`.

    If `shares_weights`, the ranks of a node share one copy of the weights.
    """

    shares_weights: bool

    def begin(self) -> None:
        """Record that a backward pass begins; raise GradientError if this is not allowed."""

    def take(self, averaging: "Averaging") -> None:
        """Use the means of a step, which have arrived."""

    def follow(self, averaging: "Averaging") -> None:
        """Move everything to the slices of these buckets. Collective: yes."""

    def synchronize(self) -> None:
        """Return when all weights are complete."""


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
    """Writes gradients of parameters into buckets, and averages them during backward.

    A complete gradient is written to its bucket, and a full bucket is sent. When backward ends, all
    gradients have arrived, or are in flight with `defer_wait`. Collective, blocking.

    Args:
        parameters: Parameters by name, in the same order on every rank; at least one, all on one
            device. Those named in `sparse` have sparse gradients.
        completed: Function that is called when all gradients of a step have arrived.
        before: Averager of the gradients that this one replaces.

    Attributes:
        active: Whether backward passes average if they reach no output of the model.
        averaged: Whether the last complete backward pass has averaged.
        sends_early: Whether buckets are sent during backward, as soon as they are full.
        dense: Parameters with dense gradients, by name.
        placeholders: Substitutes for the parameters' gradients if an owner has the means, by name.
        gradients: Averager of the dense gradients, with the statistics of all gradients.
    """

    def __init__(self, parameters: Mapping[str, Parameter], sparse: set[Parameter],
                 comm: Communicator, weighing: Weighing, settings: Settings, *,
                 completed: Callable[[], None], before: Averager | None = None) -> None:
        self.active, self.averaged, self.in_flight, self._weighing = True, True, False, weighing
        self._parameters = dict(parameters)
        self._trained = set(parameters.values())
        self.dense = {name: p for name, p in parameters.items() if p not in sparse}
        self.comm, self._settings, self._completed = comm, settings, completed
        # For each dense parameter, whether this rank has a gradient; later, whether any rank has.
        self._has_gradient = np.empty(0, bool)
        # Substitutes for gradients in flight.
        self._withheld: dict[str, WithheldGradient] = {}
        self._pass: Callable[[], BackwardPass | None] = _no_pass
        # Versions of the parameters after the last update.
        self._latest_versions: Sequence[int] = ()
        self.updated()
        specs = [spec_of(name, p) for name, p in self.dense.items()]
        # All parameters are on one device.
        first = next(iter(parameters.values()))
        self._select_gpu, gpu = selector_of(first), gpu_of(first)
        self.sends_early = not fill_only_node(comm) or gpu is not None
        with self._select_gpu():
            self.gradients = Averager(
                specs, comm, settings, Placement(gpu, marker_of(first)),
                weighing=weighing, before=before, overlap=self.sends_early)
        self._sparse = SparseGradients(
            {name: p for name, p in parameters.items() if p in sparse}, comm, self.gradients)
        self._views = {name: in_shape_of(p, seen_as_tensor(self.gradients.views[name].reshape(-1)))
                       for name, p in self.dense.items()}
        self._owner: GradientOwner | None = None
        self.placeholders: dict[str, WithheldGradient] = {}
        self._hooks = contextlib.ExitStack()
        self._attach()
        weakref.finalize(self, self._hooks.close).atexit = False

    def _attach(self) -> None:
        """Register `_accumulated` for each parameter to whose gradient a pass has added."""
        for name, p in self._parameters.items():
            self._hooks.enter_context(
                p.register_post_accumulate_grad_hook(weak_hook(self._accumulated, name)))

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

    def give_to(self, owner: GradientOwner) -> None:
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
        self.gradients.close()
        self._hooks.close()
        # The memory of the gradients is freed, although an owner may still have this object.
        self._views = {}

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
        # Sparse gradients come first, since they also determine whether Reducers count the step.
        self._sparse.wait()
        with self._select_gpu():
            self.gradients.wait(self._sparse.nonfinite, finite=self._sparse.finite)
            if self._owner is None:
                self._assign_gradients()
            else:
                self._owner.take(self)
        self._completed()

    def _assign_gradients(self) -> None:
        """Give parameters the gradients that have arrived."""
        unreached: set[str] = set()
        if self._settings.find_unused_parameters:
            self.comm.allreduce(self._has_gradient, op="max")
            unreached = {name for name, has in zip(self.dense, self._has_gradient) if not has}
        withheld, self._withheld = self._withheld, {}
        for name, p in self.dense.items():
            if name in withheld:
                if p.grad is not withheld[name]:
                    # The user has replaced the gradient, which is not needed any more.
                    continue
                if withheld[name].is_zeroed:
                    self._views[name].zero_()
            elif name in unreached:
                continue
            p.grad = None if name in unreached else self._views[name]

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
        self._add(name, p, averages=averages)

    def _add(self, name: str, p: Parameter, *, averages: bool) -> None:
        """Put a gradient into its bucket; if `averages`, it is complete."""
        gradient = p.grad
        if gradient is not None and gradient.requires_grad:
            raise GradientError(
                f"rank {self.comm.rank}: the gradient of {name} is itself part of a graph "
                f"(create_graph=True), which averaging would tear; call backward on the bare "
                f"module, or use torch.autograd.grad for the inner derivative")
        if name in self.dense:
            self._put(name, p, averages=averages)
        if averages:
            self._ready(name)

    def _put(self, name: str, p: Parameter, *, averages: bool) -> None:
        """Replace a gradient by its view, weighed if it will be averaged; or write zeros."""
        view, gradient = self._views[name], p.grad
        weight = self._weighing.factor if averages else 1.0
        if gradient is None or weight == 0:
            view.zero_()
            p.grad = None if gradient is None else view
        elif gradient is not view:
            if gradient.layout is not torch.strided:
                raise GradientError(
                    f"rank {self.comm.rank}: the gradient of {name} is {gradient.layout}; only "
                    f"those of Embedding and EmbeddingBag may be sparse")
            if weight == 1:
                view.copy_(gradient)
            else:
                torch.mul(gradient, weight, out=view)
            p.grad = view
        elif weight != 1:
            view.mul_(weight)

    def _ready(self, name: str) -> None:
        if name not in self.dense:
            self._sparse.ready(name, self._weighing.factor)
            return
        if name not in self.gradients.home[name].missing:
            raise GradientError(
                f"rank {self.comm.rank}: the gradient of {name} was completed twice in one "
                f"step: a layer used in several segments of checkpoint(…, use_reentrant=True) "
                f"needs use_reentrant=False; and after an exception in backward no step can "
                f"follow: other ranks may have gone on; start again from a checkpoint")
        with self._select_gpu():
            self.gradients.ready(name)

    def _end(self, running: BackwardPass) -> None:
        """End a backward pass; if it has averaged, complete the step."""
        self._pass = _no_pass
        self._refuse_updates(running)
        self.averaged = running.averages
        if not running.averages:
            return
        missing = [*self.gradients.missing, *self._sparse.missing]
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
                    if p.grad is not self._views[name] and name not in missing]
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
            if name in self.dense:
                self._put(name, self.dense[name], averages=True)
            self._ready(name)
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
