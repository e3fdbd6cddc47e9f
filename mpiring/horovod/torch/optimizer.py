"""Horovod's DistributedOptimizer: any PyTorch optimizer, with the gradients of all ranks."""

import collections
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..compression import Compression
from ..ops import Adasum, Average
from ..process_sets import ProcessSet
from ..world import global_process_set
from .gradients import Combination, StepGradients, noname

Closure = Callable[[], Any]


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods that the class of a distributed optimizer adds to the plain class."""

    _plain: type[torch.optim.Optimizer]
    _gradients: StepGradients
    _synchronized = False
    _should_synchronize = True

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Names of the parameters; programs for Horovod read this attribute."""
        return self._gradients.names

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes that complete a gradient."""
        return self._gradients.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._gradients.passes = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that complete a gradient, between two steps."""
        self._gradients.passes = passes

    def synchronize(self) -> None:
        """Return when gradients are combined over the process set; they may then be clipped.

        Gradients that no backward pass has reached since the last step also count. They contribute
        earlier accumulated values, or zeros.

        Raises:
            GradientError: A gradient was replaced or written to since backward.
            BufferMismatchError: Trained parameters differ between ranks.
            HorovodInternalError: A rank has ended; or a rank has called `join`, which supports only
                Average and Sum.

        Collective: yes. Blocking: yes.
        """
        self._gradients.finish(self.param_groups)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` uses gradients unchanged, after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Closure | None = None) -> Any:
        """Call `closure`, if given, and `synchronize`, then run a step of the plain optimizer.

        Raises GradientError if `synchronize` raises it, or was not called before a step in
        `skip_synchronize`. Collective, blocking.
        """
        def synchronized() -> Any:
            loss = closure() if closure is not None else None
            self.synchronize()
            return loss

        if not self._should_synchronize:
            self._gradients.refuse_step()
            self._synchronized = False
            return self._plain.step(self, closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to "
                "consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code.", stacklevel=2)
        if closure is None:
            self._gradients.finish(self.param_groups)
        result = self._plain.step(self, closure and synchronized)
        self._synchronized = False
        return result

    # PyTorch would run the user's hooks twice: before this method, and before the plain step.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset gradients; raise AssertionError while they are being averaged or accumulated."""
        if self._gradients.counts:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition.")
        self._plain.zero_grad(self, *args, **kwargs)

    def _step_without_batch(self) -> None:
        """Take part in a step of other ranks, because this rank has called `join`."""
        self._gradients.step_without_batch(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the plain optimizer; forget the passes of an incomplete step."""
        self._gradients.forget()
        self._synchronized, self._should_synchronize = False, True
        self._plain.load_state_dict(self, state_dict)


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Combines the changes of parameters, which each rank computes from its own gradients."""

    def synchronize(self) -> None:
        """Do nothing, because `step` waits for the changes of all ranks."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError: Adasum does not support this."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum "
                             "optimizer.")

    def step(self, closure: Closure | None = None) -> Any:
        """Take a plain step; combine the changes of all ranks by Adasum. Collective, blocking."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        started = [p.detach().clone() for p in trained]
        loss = self._plain.step(self, closure)
        gradients = [p.grad for p in trained]
        for p, start in zip(trained, started):
            p.grad = p.detach() - start
        self._gradients.finish(self.param_groups)
        with torch.no_grad():
            for p, start, gradient in zip(trained, started, gradients):
                p.copy_(start.add_(p.grad))
                p.grad = gradient
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer whose steps use the gradients of all ranks.

    The class of the result is derived from the class of `optimizer`. Both share parameters and
    state. Gradients are fused and sent while backward computes further gradients. `step()` waits
    for them, and so does `synchronize()`, after which they may be clipped:

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    With Adasum on several ranks, `step()` combines the changes of parameters instead.

    Args:
        optimizer: The plain optimizer.
        named_parameters: Pairs of name and parameter, usually `model.named_parameters()`. Ranks
            match parameters by name; without names, by position in the optimizer.
        compression: `Compression.none`, `Compression.fp16`, which sends means and sums as float16
            between nodes, or a Reducer of `mpiring.reducers`.
        backward_passes_per_step: Number of backward passes whose gradients are summed on each rank
            before they are sent.
        op: Reduction: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: Divisor of gradients before their sum; for Average only.
        num_groups: Deprecated name of `groups`.
        groups: Lists of parameters, or the number of lists. Gradients of different lists are not
            fused. A long list is sent in several messages.
        sparse_as_dense: If true, sparse gradients are sent as dense gradients.
        process_set: Ranks to average over; other ranks use their own gradients.

    Raises:
        ValueError: An argument is out of range, or parameters are not named or grouped correctly.

    Collective: no. Blocking: no.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed "
                      "in v0.23.0.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    names = _names_of(optimizer, named_parameters)
    by_adasum = op == Adasum and (process_set.size() or 1) > 1
    combination = Combination(op, compression, gradient_predivide_factor, groups, sparse_as_dense,
                              eager=not by_adasum)
    combination.reducer()
    plain = type(optimizer)
    methods = {**vars(_DistributedOptimizer), **(vars(_DistributedAdasumOptimizer) if by_adasum
                                                 else {})}
    # One derived class, as in Horovod. Programs call `super(type(optimizer), optimizer)`.
    result_class: Any = type(plain.__name__, (plain,), {**methods, "_plain": plain})
    distributed = result_class.__new__(result_class)
    # Schedulers of the plain optimizer wrap its `step`.
    distributed.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    distributed._gradients = StepGradients(
        names, process_set, combination, backward_passes_per_step,
        process_set.register(distributed._step_without_batch, names.values()))
    distributed.op, distributed.process_set = op, process_set
    distributed.gradient_predivide_factor = gradient_predivide_factor
    distributed.sparse_as_dense = sparse_as_dense
    return distributed


def _names_of(optimizer: torch.optim.Optimizer,
              named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
              ) -> dict[torch.nn.Parameter, str]:
    """Return the names of parameters; raise ValueError if names are missing or not unique."""
    parameters = {p: noname(i, j) for i, group in enumerate(optimizer.param_groups)
                  for j, p in enumerate(group["params"])}
    if named_parameters is None:
        return parameters
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), "
                         "usually produced by model.named_parameters().")
    counts = collections.Counter(name for name, _ in named)
    if len(counts) < len(named):
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(name for name, count in counts.items() if count > 1)}")
    names = {p: name for name, p in named}
    unnamed = [name for p, name in parameters.items() if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named. "
            f"They are (by group and index): {', '.join(unnamed)}")
    return {p: names[p] for p in parameters}


def _check_groups(groups: object) -> None:
    """Raise ValueError unless these are groups of parameters, or a number of groups."""
    if groups is None:
        return
    if not isinstance(groups, list) and not (isinstance(groups, int) and groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of list of "
                         "torch.Tensor.")
    grouped = [p for group in groups for p in group] if isinstance(groups, list) else []
    if not all(isinstance(p, torch.Tensor) for p in grouped):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(grouped)) < len(grouped):
        raise ValueError("A parameter can only appear once in groups.")
