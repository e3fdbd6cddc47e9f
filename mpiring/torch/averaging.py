"""Averages gradients while backward runs: hooks on parameters, views into buckets."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd import Variable
from torch.nn import Parameter

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import GradientError
from ..memory.tensors import numpy_dtype
from ..reducers.by_name import Wish
from ..training.gradients import Gradients
from ..training.nonfinite import NonFinite
from .devices import current, gpu_of, marker_of
from .passes import adds_to_gradients, leaves_behind
from .sparse import SparseGradients
from .tensors import seen_as_tensor, tensors_in


@dataclass(frozen=True)
class Settings:
    """How gradients are averaged.

    Attributes:
        bucket_bytes, reducer, deterministic, order: As for `Gradients`.
        find_unused: Contribute zeros for parameters that a backward pass did not reach.
        deferred: Leave it to `wait` that gradients arrive.
    """

    bucket_bytes: int
    reducer: Wish
    deterministic: bool
    order: Sequence[str] | None
    find_unused: bool
    deferred: bool


class Averaging:
    """Makes the gradients of some parameters views into buckets, and averages them in backward.

    After a parameter's gradient is complete, it is in its bucket; a full bucket leaves.
    When backward ends, all have arrived, or, if that is deferred, are under way.

    Args:
        parameters: By name, in the same order on every rank; at least one, all on one device.
        sparse: Those of them whose gradients are sparse.
        comm: The ranks to average over.
        settings: How.
        completed: Is called when all have arrived.
        steps: How many were complete before.

    Attributes:
        active: Whether backward passes average; else gradients accumulate on this rank.
        weight: What this rank's gradients are multiplied with before they are averaged.
        under_way: Whether `wait` will have to wait.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, parameters: Mapping[str, Parameter], sparse: set[Parameter],
                 comm: Communicator, settings: Settings, *, completed: Callable[[], None],
                 steps: int) -> None:
        self.active, self.weight, self.under_way = True, 1.0, False
        self._parameters = dict(parameters)
        self._trained = set(parameters.values())
        self._dense = {name: p for name, p in parameters.items() if p not in sparse}
        self._comm = comm
        self._settings = settings
        self._completed = completed
        self._unused: list[str] = []
        # Per gradient, whether this rank has one at the end of backward.
        self._has = np.empty(0, bool)
        # What stands for gradients that are under way: a NaN, and it as a whole gradient.
        self._withheld: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # Of the backward pass whose end will call `_end`; there is none below 0.
        self._pass = -1
        specs = [TensorSpec(name, tuple(p.shape), numpy_dtype(p.dtype))
                 for name, p in self._dense.items()]
        # Its device is that of all.
        self._first = first = next(iter(parameters.values()))
        with current(first):
            self._gradients = Gradients(
                specs, comm, bucket_bytes=settings.bucket_bytes, reducer=settings.reducer,
                deterministic=settings.deterministic, order=settings.order, moved=self._move,
                steps=steps, device=gpu_of(first), mark=marker_of(first))
        self._sparse = SparseGradients(
            {name: p for name, p in parameters.items() if p in sparse}, comm,
            self._gradients.tally)
        self._views: dict[str, torch.Tensor] = {}
        for name in self._dense:
            self._move(name)
        # Python cannot see the cycle through a parameter to its hooks, and would never free it.
        reference = weakref.ref(self)
        self._hooks = [p.register_post_accumulate_grad_hook(_told(reference, name))
                       for name, p in parameters.items()]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    @property
    def statistics(self) -> Any:
        """What averaging gradients cost in the last complete step; see DataParallel."""
        return self._gradients.statistics

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which gradients are fused; None while that may change."""
        return self._gradients.order

    @property
    def steps(self) -> int:
        """How many are complete."""
        return self._gradients.steps

    @property
    def nonfinite(self) -> NonFinite:
        """Whose own gradients held NaN or Inf in the last complete step."""
        return self._gradients.nonfinite

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; the same on all ranks."""
        with current(self._first):
            return self._gradients.finite

    def rescale(self, factor: float) -> None:
        """Tell reducers that the loss is scaled otherwise from now on."""
        self._gradients.rescale(factor)

    def close(self) -> None:
        """Let go of the parameters; their gradients stay as they are."""
        self.wait()
        self._gradients.close()
        _remove(self._hooks)

    def watch(self, outputs: object) -> None:
        """Notice the start of the backward pass that these outputs of the model will begin.

        Its end must be known, not that of a pass within, as of reentrant checkpointing, and
        also if it reaches no parameter.
        """
        if torch._C._current_graph_task_id() < 0:
            # A pass that has raised never came to its end.
            self._pass = -1
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                leaves = leaves_behind(output.grad_fn, self._trained)
                output.register_hook(functools.partial(self._reached_output, leaves))

    def wait(self) -> None:
        """Return when all gradients have arrived.

        Raises: what communication raises, and what `completed` does.

        Collective: yes. Blocking: yes.
        """
        if not self.under_way:
            return
        self.under_way = False
        # Whether a step counts depends on these, too: reducers are told by the others.
        self._sparse.wait()
        with current(self._first):
            self._gradients.wait(self._sparse.nonfinite, finite=self._sparse.finite)
        self._show()
        self._completed()

    def _show(self) -> None:
        """Let parameters have the gradients that have arrived."""
        unreached, withheld = self._reached_nowhere(), self._withheld
        self._withheld = {}
        # Where the user has another one by now, he has no use for this gradient any more.
        blanks = {name: blank for name, (blank, whole) in withheld.items()
                  if self._dense[name].grad is whole}
        # All at once: a GPU answers late.
        untouched = torch.stack([x.isnan() for x in blanks.values()]).tolist() if blanks else []
        for name, is_untouched in zip(blanks, untouched, strict=True):
            if not is_untouched:
                self._views[name].zero_()
        for name, p in self._dense.items():
            if name in blanks or name not in withheld and name not in unreached:
                p.grad = None if name in unreached else self._views[name]

    def _reached_output(self, leaves: list[Any], _: object) -> None:
        """Note that a pass has come to an output; one that is no backward pass is no step."""
        if self._pass < 0 and adds_to_gradients(leaves):
            self._begun()

    def _begun(self) -> None:
        """Note that a backward pass runs: look at its end whether all is there."""
        if self._pass < 0:
            self.wait()
            self._pass = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._end)

    def _accumulated(self, name: str, p: Parameter) -> None:
        """Put a complete gradient into its bucket, and let that leave if it is full."""
        self._begun()
        if p.grad is not None and p.grad.requires_grad:
            raise GradientError(
                f"rank {self._comm.rank}: the gradient of {name} is itself part of a graph "
                f"(create_graph=True), which averaging would tear; call backward on the bare "
                f"module, or use torch.autograd.grad for the inner derivative")
        if name in self._dense:
            self._put(name, p)
        if self.active:
            self._ready(name)

    def _put(self, name: str, p: Parameter) -> None:
        """Make a gradient its view, with its value; where there is none, leave zeros there."""
        view = self._views[name]
        if p.grad is None:
            view.zero_()
        elif p.grad is not view:
            if p.grad.layout is not torch.strided:
                raise GradientError(
                    f"rank {self._comm.rank}: the gradient of {name} is {p.grad.layout}; only "
                    f"those of Embedding and EmbeddingBag may be sparse")
            view.copy_(p.grad)
            p.grad = view

    def _ready(self, name: str) -> None:
        if name not in self._dense:
            self._sparse.ready(name, self.weight)
            return
        if not self._gradients.expects(name):
            raise GradientError(
                f"rank {self._comm.rank}: the gradient of {name} was completed twice in one "
                f"step: a layer used in several segments of checkpoint(…, use_reentrant=True) "
                f"needs use_reentrant=False; and after an exception in backward no step can "
                f"follow: other ranks may have gone on; start again from a checkpoint")
        if self.weight != 1:
            self._views[name].mul_(self.weight)
        with current(self._first):
            self._gradients.ready(name)

    @property
    def _missing(self) -> list[str]:
        return [*self._gradients.missing, *self._sparse.missing]

    def _end(self) -> None:
        """See to it, at the end of a backward pass, that all gradients arrive."""
        self._pass = -1
        if not self.active:
            return
        missing = self._missing
        if missing and not self._settings.find_unused:
            raise GradientError(
                f"rank {self._comm.rank}: backward did not reach {len(missing)} of "
                f"{len(self._parameters)} parameters: {', '.join(missing)}; pass "
                f"find_unused_parameters=True, or freeze them with requires_grad_(False), or "
                f"name them in backward(inputs=[...]) if it left them out")
        if missing:
            self._contribute_unreached(missing)
        self.under_way = True
        self._note_reached()
        if self._settings.deferred:
            self._withhold()
        else:
            self.wait()

    def _withhold(self) -> None:
        """Let nobody read or change gradients that are under way: whoever writes gets an error.

        So scaling and clipping cannot harm them, and gradients that are dropped stay so.
        """
        for name, p in self._dense.items():
            blank = torch.full((), torch.nan, dtype=p.dtype, device=p.device)
            self._withheld[name] = blank, blank.expand(p.shape)
            p.grad = self._withheld[name][1]

    def _contribute_unreached(self, names: Sequence[str]) -> None:
        """Let buckets leave with what the parameters accumulated before, or with zeros."""
        self._unused = list(names)
        for name in names:
            if name in self._dense:
                self._put(name, self._dense[name])
            self._ready(name)

    def step_with_nothing(self) -> None:
        """Take part in a step of the others, for which this rank has no gradients.

        Collective: yes. Blocking: yes.
        """
        self._unused = list(self._parameters)
        for name, p in self._parameters.items():
            p.grad = None
            if name in self._dense:
                self._views[name].zero_()
            self._ready(name)
        self.under_way = True
        self._note_reached()
        self.wait()

    def _note_reached(self) -> None:
        """Note which gradients this rank has."""
        if self._settings.find_unused:
            self._has = np.array([name not in self._unused or p.grad is not None
                                  for name, p in self._dense.items()])
        self._unused = []

    def _reached_nowhere(self) -> set[str]:
        """Return which parameters no rank has reached, and that have no gradient either."""
        if not self._settings.find_unused:
            return set()
        self._comm.allreduce(self._has, op="max")
        return {name for name, one in zip(self._dense, self._has) if not one}

    def _move(self, name: str) -> None:
        """Follow a gradient to another bucket; nothing may hold on to the old memory."""
        p, old = self._dense[name], self._views.get(name)
        self._views[name] = _like(p, seen_as_tensor(self._gradients.views[name].reshape(-1)))
        if old is not None and p.grad is old:
            p.grad = self._views[name]


def _told(reference: "weakref.ref[Averaging]", name: str) -> Callable[[Parameter], None]:
    """Return a hook that tells an Averaging, while there is one, of a complete gradient."""
    def hook(p: Parameter) -> None:
        averaging = reference()
        if averaging is not None:
            averaging._accumulated(name, p)

    return hook


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _like(p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """See a vector as a gradient of `p`: with its strides, if they leave no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(p):
        return flat.as_strided(p.shape, p.stride())
    return flat.view(p.shape)
