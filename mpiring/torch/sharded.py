"""An optimizer whose gradients, state and updates are divided into one slice per rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import numpy as np
import torch

from ..arguments import number, refuse_other_state, truth, whole_number
from ..communicator import Communicator
from ..errors import ConfigError, GradientError, MpiringError
from ..names import WeightCopies
from ..operations.agreement import Call
from ..operations.consistency import same_on_all, text_of
from ..optim.optimizer import Optimizer as MpiringOptimizer
from ..text import first_few
from .averaging import Averaging, SliceGradient
from .class_updates import ClassUpdates, refuse_whole_tensors
from .data_parallel import DataParallel
from .muon import MuonUpdates, divided, update_costs
from .private import run_state_hooks
from .shards import ParamGroup, ShardLayout, described, param_groups
from .tensor_updates import TensorUpdates
from .weights import Guard, LoadHooks, NodeWeights, WeightBuckets, without_waiting

_WEIGHTS = {"rank": WeightBuckets, "node": NodeWeights}


class Sharded(torch.optim.Optimizer):
    """Runs a PyTorch optimizer on slices of a model's weights, one slice per rank.

        model = mpiring.torch.DataParallel(model, comm)
        optimizer = mpiring.torch.Sharded(torch.optim.AdamW, model, lr=3e-4, fused=True)

    Each rank receives the averaged gradients of its slice, updates that slice of the weights, and
    sends the result to all ranks. It stores optimizer state for its slice only. The traffic is the
    same as for an allreduce, and no update is computed twice. Up to rounding, the result is the
    same as with the optimizer class alone. (ZeRO, stage 1: Rajbhandari et al. 2020, arXiv
    1910.02054.)

    With torch.optim.Muon, one rank updates each matrix completely, and all ranks compute about as
    long. AdamW updates the other parameters, in slices:

        optimizer = mpiring.torch.Sharded(torch.optim.Muon, model, [
            {"params": hidden, "lr": 0.02},
            {"params": others, "lr": 3e-4, "use_muon": False}])

    A group without `use_muon` is divided in two: Muon gets all matrices except those of Embedding
    modules. Keyword arguments apply to the groups whose class has such a setting.

    The training loop remains the same, except for gradients, because no rank has complete
    gradients. After backward, using `p.grad` of the model raises an error, and `param_groups` has
    this rank's slices as vectors, and its matrices. Clip with `clip_grad_norm_` of this class;
    `torch.nn.utils.clip_grad_norm_` would use the norm of one slice. Each step uses the gradients
    of one backward pass, to which earlier passes in `model.no_sync()` may add.

    If a gradient on any rank is not finite, `step` changes nothing on any rank, and rank 0 warns.
    GradScaler gets the same result on all ranks. A parameter that no rank has reached
    (find_unused_parameters=True) has a zero gradient.

    Args:
        optimizer_class: Elementwise optimizer class: SGD, Adam, AdamW, NAdam, RAdam, Adagrad,
            RMSprop, Adadelta, Adamax, Rprop, ASGD. Other classes are first tested on a small
            tensor. Muon is also possible, and on CPUs a class of `mpiring.optim`, such as LAMB.
        model: DataParallel that averages the gradients, the same on all ranks.
        params: Parameters of the model, or groups of them, as PyTorch optimizers accept them; by
            default, all parameters.
        overlap: If true, slices are sent to other ranks during the next forward pass; see
            `synchronize`.
        weights: Placement of the weights. With "rank", each rank has all weights. With "node", the
            ranks of a node share one copy in host memory; see `writing_weights`.
        defaults: Arguments of the optimizer class, such as `lr`, `foreach` and `fused`.

    Raises:
        ConfigError: The class is not elementwise, or the model has a Sharded optimizer already, or
            sparse gradients. Parameters are missing, or are not parameters of the model, or Muon
            cannot update them. An argument, or the order of parameters, differs between ranks.

    Collective: yes, and so are `step`, `clip_grad_norm_`, `grad_norm`, `state_dict`,
    `sharded_state_dict` and `load_state_dict`. Blocking: yes.
    """

    def __init__(self, optimizer_class: Any, model: DataParallel, params: Any = None, *,
                 overlap: bool = False, weights: WeightCopies = "rank", **defaults: Any) -> None:
        if not isinstance(model, DataParallel):
            raise ConfigError(
                f"model is a {type(model).__name__}; pass the mpiring.torch.DataParallel itself, "
                f"as in Sharded(torch.optim.AdamW, model, lr=1e-3), and groups of its parameters, "
                f"if any, after it")
        self._model = model
        with same_on_all(model._comm, "Sharded") as same:
            if weights not in _WEIGHTS:
                raise ConfigError(f"weights={weights!r}: expected 'rank' (each has all weights) "
                                  f"or 'node' (the ranks of a node share them)")
            updates = _updates_of(optimizer_class)
            groups, costs = _groups_of(updates, model.module, params, defaults)
            self._overlaps = truth("overlap", overlap)
            same.update(optimizer_class=optimizer_class.__qualname__, overlap=overlap,
                        weights=weights, **defaults)
            same["params"] = groups
        self._kind = _WEIGHTS[weights]
        self.shares_weights = self._kind is NodeWeights
        self._guard: Guard | None = None
        # Whether there are averaged gradients that no step has used.
        self._has_new_gradients = False
        averaging = model.give_gradients_to(self, costs)
        self._load_hooks = LoadHooks(model.module) if self.shares_weights else None
        try:
            layout = self._lay_out(averaging)
            with same_on_all(self._comm, "Sharded, its optimizer"):
                self._updates: ClassUpdates | TensorUpdates = updates(
                    optimizer_class, defaults, groups, layout.parameters, per_bucket=self._overlaps)
            self._updates.begin(layout)
        except BaseException:
            # If ranks no longer agree, this fails as well, but the first error names the reason.
            with suppress(MpiringError):
                self._detach()
            raise
        # Hooks, schedulers and GradScaler read these attributes.
        inner = self._updates.optimizer
        super().__init__(inner.param_groups, inner.defaults)
        self._is_initialized, self.state = True, inner.state

    # A step

    def begin(self) -> None:
        """Refuse a backward pass before a step has used earlier gradients: raise GradientError."""
        unused = [name for name, placeholder in self._averaging.placeholders.items()
                  if self._has_new_gradients and self._layout.parameters[name].grad is placeholder]
        if unused and self._averaging.gradients.finite:
            raise GradientError(
                f"rank {self._comm.rank}: a second backward pass, without step() or zero_grad() "
                f"after the first: its gradients are means in slices already; to add up several "
                f"passes, let all but the last run in model.no_sync()")
        for name in unused:
            # GradScaler has skipped the step of these gradients, which were not finite.
            self._layout.parameters[name].grad = None
        # Other gradients were dropped by the user, with model.zero_grad().
        self._drop()

    def take(self) -> None:
        """Give this rank's slices of the means to the optimizer, at the end of backward."""
        self._assign_gradients()
        self._has_new_gradients = True

    def follow(self, averaging: Averaging) -> None:
        """Move equal weights, and state, to the slices of other buckets. Collective, blocking."""
        self._updates.follow(self._lay_out(averaging))
        self.state = self._updates.optimizer.state
        self._has_new_gradients = False

    def _assign_gradients(self) -> None:
        """Give the shards their gradients."""
        for shard in self._updates.shards:
            if not shard.ranges:
                shard.gradient.fill_(0 if self._averaging.gradients.finite else math.nan)
            shard.parameter.grad = shard.gradient.as_subclass(SliceGradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slices; without `overlap`, return when all weights have arrived.

        Args:
            closure: Function that runs a forward and a backward pass, and returns the loss. `step`
                calls it first.

        Returns:
            The result of the closure, or None.

        Raises:
            GradientError: There are no new gradients, or some were replaced.
            BufferMismatchError: Some ranks have written weights, and others have not, as far as
                PyTorch's version counters show.
            ReplicaError: With weights="node", this rank has written weights outside of
                `writing_weights`, as far as PyTorch's version counters show.

        Collective: yes. Blocking: yes.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._refuse_without_gradients("step()")
        if self._averaging.gradients.finite:
            self._update()
        else:
            self._averaging.gradients.nonfinite.report()
        self.zero_grad()
        return result

    def _update(self) -> None:
        self._weights.follow(f"updated with {described(self.param_groups)}")
        inner = self._updates.optimizer
        inner.param_groups, inner.state = self.param_groups, self.state
        for shard in self._updates.shards:
            if isinstance(shard.parameter.grad, SliceGradient):
                shard.parameter.grad = shard.gradient
        self._updates.update(self._weights.send)
        self._weights.updated()
        if self._guard is None:
            self.synchronize()
        else:
            self._weights.wait_for(self._guard.unguarded)

    def synchronize(self) -> None:
        """Return when all weights are complete; needed with `overlap` only.

        Modules wait for their weights before they run. `module.weight`, `parameters()`,
        `state_dict()` and `load_state_dict()` also wait. Call this method before you read or write
        parameters to which you have kept references since before the step.

        Collective: no. Blocking: yes.
        """
        self._weights.synchronize()

    def writing_weights(self) -> AbstractContextManager[None]:
        """Return a context in which weights may be written other than by `step`.

            with optimizer.writing_weights():
                for p in model.parameters():
                    p.clamp_(-1, 1)

        At the end of the block, all ranks receive the weights of rank 0. With weights="node", write
        weights in such a block only; all ranks but the first of each node then have private copies.
        With weights="rank", no block is needed if all ranks write the same values. No block is
        needed for `model.load_state_dict`.

        Collective: yes. Blocking: yes.
        """
        return self._weights.writing()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model and of this rank's slices.

        Args:
            set_to_none: Ignored, for compatibility with PyTorch; gradients are always set to None.

        Collective: no.
        """
        for _, p in without_waiting(self._model.module):
            p.grad = None
        self._drop()

    def _drop(self) -> None:
        for shard in self._updates.shards:
            shard.parameter.grad = None
        if self._has_new_gradients and not self._averaging.gradients.finite:
            # If the user has scaled slices by NaN, the padding between tensors is also NaN.
            for bucket in self._averaging.gradients.buckets:
                bucket.clear_padding()
        self._has_new_gradients = False

    def _refuse_without_gradients(self, method: str) -> None:
        if not self._has_new_gradients:
            raise GradientError(
                f"rank {self._comm.rank}: {method} without new gradients: each step takes those of "
                f"one model(...) and backward(), which step() and zero_grad() drop")
        changed = [name for name, placeholder in self._averaging.placeholders.items()
                   if self._layout.parameters[name].grad is not placeholder]
        if changed:
            raise GradientError(
                f"rank {self._comm.rank}: {method} after the gradients of {first_few(changed, 5)} "
                f"were dropped or replaced: that changes nothing here, since this rank has the "
                f"means of its slices only; write into those of optimizer.param_groups, on all "
                f"ranks, or call optimizer.zero_grad() to drop all")

    # Norms

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """Return the norm of all gradients as one vector, over the slices of all ranks.

        Args:
            norm_type: Order p of the norm, above 0; may be infinity.

        Returns:
            The norm, the same on all ranks; NaN if a gradient is not finite.

        Raises:
            ConfigError: `norm_type` is out of range.
            BufferMismatchError: `norm_type` differs between ranks.
            GradientError: There are no gradients.

        Collective: yes. Blocking: yes.
        """
        return self._norm("grad_norm", norm_type)

    def _norm(self, method: str, norm_type: float, **more: Any) -> float:
        """Compare the arguments of the method across ranks, and return the norm over all slices.

        All ranks raise ConfigError if an argument is out of range, and BufferMismatchError if
        arguments differ between ranks.
        """
        self._refuse_without_gradients(f"{method}()")
        arguments = {"norm_type": norm_type, **more}
        call = Call(method, ", ".join(f"{name}={text_of(x)}" for name, x in arguments.items()),
                    self._averaging.gradients.weighing.model,
                    remedy=f"pass the same to {method} on every rank")
        total, failure = 0.0, None
        try:
            checked = {name: number(name, arguments[name], *_NUMBERS[name])
                       for name in _NUMBERS if name in arguments}
            norm_type = checked["norm_type"]
            total = _norm_of([shard.gradient for shard in self._updates.shards], norm_type)
        except ConfigError as error:
            # Raised below, after the arguments of all ranks were compared.
            failure, norm_type = error, 1.0
        if norm_type == math.inf:
            largest = np.array([total])
            self._comm.run(call, lambda collectives: collectives.allreduce(largest, op="max"))
            return float(largest[0])
        with np.errstate(over="ignore"):
            total = _checked_sum(self._comm, call, float(np.float64(total) ** norm_type))
        if failure is not None:
            raise failure
        return total ** (1 / norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *,
                        error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients down so that their norm is at most `max_norm`.

        Sharded counterpart of `torch.nn.utils.clip_grad_norm_`.

        Args:
            max_norm: Largest norm, from 0.
            norm_type: Order of the norm, as for `grad_norm`.
            error_if_nonfinite: If true, raise GradientError if the norm is not finite.

        Returns:
            The norm before clipping, on the device of the parameters. Its dtype is float64 if any
            parameter has that precision, otherwise float32.

        Raises:
            ConfigError: An argument is out of range.
            BufferMismatchError: Arguments differ between ranks.
            GradientError: There are no gradients, or the norm is not finite and
                `error_if_nonfinite` is true.

        Collective: yes. Blocking: yes.
        """
        norm = self._norm("clip_grad_norm_", norm_type, max_norm=max_norm,
                          error_if_nonfinite=error_if_nonfinite)
        if error_if_nonfinite and not math.isfinite(norm):
            raise GradientError(f"rank {self._comm.rank}: the norm of the gradients is {norm}")
        factor = max_norm / (norm + 1e-6)
        # Negated, so that gradients are also scaled if the factor is NaN.
        if not factor >= 1:
            for shard in self._updates.shards:
                shard.gradient.mul_(factor)
        is_double = any(p.dtype in (torch.float64, torch.complex128)
                        for p in self._layout.parameters.values())
        return torch.tensor(norm, dtype=torch.float64 if is_double else torch.float32,
                            device=self._updates.shards[0].parameter.device)

    # State

    def state_dict(self, *, root: int | None = None) -> Any:
        """Return the state of complete parameters, as `state_dict` of the optimizer class does.

        An optimizer of that class, with the same groups, can load the state on a single rank.
        Conversely, `load_state_dict` of this class can load the state of such an optimizer.

        Args:
            root: Rank that gets the state; the others get None. By default, all ranks get it.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self._comm, "Sharded.state_dict") as same:
            if root is not None:
                root = whole_number("root", root, 0, self._comm.size - 1)
            same["root"] = root
        run_state_hooks(self, "state_dict_pre")
        state = self._updates.state_dict(root)
        if root not in (None, self._comm.rank):
            return None
        return run_state_hooks(self, "state_dict_post", state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a state with copies of this rank's slices, in the format of checkpoints.

            checkpoints.save(step, replicated=model.state_dict(),
                             sharded=optimizer.sharded_state_dict())

        Collective: yes. Blocking: yes.
        """
        return self._updates.sharded_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; the number of ranks may have changed since it was saved.

        Args:
            state_dict: Result of `state_dict` of this class or of the optimizer class; or of
                `sharded_state_dict`, with the slices of all ranks that have saved it.

        Raises:
            ConfigError: The state has other groups, parameters or classes, lacks slices, or differs
                between ranks. Nothing has changed on any rank.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self._comm, "Sharded.load_state_dict",
                         remedy="load the same state on every rank") as same:
            refuse_other_state(state_dict, ["param_groups"], "of a Sharded optimizer")
            state_dict = run_state_hooks(self, "load_state_dict_pre", dict(state_dict))
            same["state"] = state_dict
            try:
                load = self._updates.loader_of(state_dict)
            except MpiringError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"rank {self._comm.rank}: the state is none of a Sharded optimizer "
                    f"({type(error).__name__}: {error}); pass what state_dict() has returned"
                ) from error
        load()
        self.state = self._updates.optimizer.state
        if self._has_new_gradients:
            self._assign_gradients()
        run_state_hooks(self, "load_state_dict_post")

    def _lay_out(self, averaging: Averaging) -> ShardLayout:
        """Move the weights into buckets with the same slices as the buckets of the gradients."""
        self._averaging, self._comm = averaging, averaging.comm
        parameters = {name: averaging.dense[name] for name in averaging.gradients.views}
        with torch.no_grad():
            self._weights = self._kind(parameters, averaging.gradients, self._comm)
        if self._load_hooks is not None:
            self._load_hooks.weights = self._weights
        if self._guard is not None:
            self._guard.remove()
        if self._overlaps:
            self._guard = Guard(self._model.module, self._weights, {
                parameters[name]: bucket.index
                for bucket in self._weights.buckets for name in bucket.views})
        self._layout = ShardLayout(parameters, self._weights, averaging.gradients, self._comm)
        return self._layout

    def close(self) -> None:
        """Restore complete gradients of the model, from the next forward pass on.

        Afterwards, another optimizer can use the model, and this one cannot take further steps.

        Collective: yes. Blocking: yes.
        """
        self.synchronize()
        self.zero_grad()
        self._detach()

    def _detach(self) -> None:
        self._model.restore_gradients()
        if self._guard is not None:
            self._guard.remove()
        if self._load_hooks is not None:
            self._load_hooks.remove()
        # There are no weights if their allocation has failed.
        if "_weights" in vars(self):
            self._weights.release()

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise ConfigError, because slices and saved state depend on the first groups.

        Args:
            param_group: Group of parameters, as for PyTorch optimizers.
        """
        # The constructor of the base class adds the groups one by one.
        if getattr(self, "_is_initialized", False):
            raise ConfigError(
                f"rank {self._comm.rank}: add_param_group on a Sharded optimizer: its slices are "
                f"cut by the groups that it was made with; make those for parameters that are "
                f"frozen at first, too: frozen ones take no memory")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError("a Sharded optimizer cannot be pickled or copied: it holds MPI's memory; "
                          "save optimizer.state_dict()")


def _updates_of(optimizer_class: Any) -> Any:
    """Return the class that updates shards with a given optimizer class."""
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, MpiringOptimizer):
        return TensorUpdates
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Muon):
        return MuonUpdates
    refuse_whole_tensors(optimizer_class)
    return ClassUpdates


def _groups_of(updates: Any, module: torch.nn.Module, params: Any,
               defaults: Mapping[str, Any]) -> tuple[list[ParamGroup], Mapping[str, float]]:
    """Return groups of parameters, and the costs of parameters that have an owner; see Fusion."""
    groups = param_groups(module, params)
    if updates is not MuonUpdates:
        return groups, {}
    groups = divided(groups, module)
    return groups, update_costs(groups, module, defaults)


# Number of elements whose powers are summed at once, in float64.
_BLOCK = 1 << 18
# Conditions for numerical arguments, and their descriptions.
_NUMBERS: Mapping[str, Any] = {"norm_type": (lambda x: x > 0, "a number above 0"),
                               "max_norm": (lambda x: x >= 0, "a number from 0")}


def _norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    # Also those of matrices: their elements fill their memory.
    vectors = (gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients)
    parts = [torch.linalg.vector_norm(block.abs() if block.is_complex() else block, norm_type,
                                      dtype=torch.float64)
             for vector in vectors for block in vector.split(_BLOCK)]
    return float(torch.linalg.vector_norm(torch.stack(parts), norm_type))


def _checked_sum(comm: Communicator, call: Call, x: float) -> float:
    """Return the sum of all ranks' numbers, if all ranks have made the same call.

    An allreduce with a constant Call is several times as fast as one with varying Calls. Each rank
    therefore sends its number with a digest k of the call, and k². The sums of k and k² are
    consistent only if all digests are equal. They are exact below 8,192 ranks.
    """
    key = call.digest % 2**20
    sums = comm.allreduce(np.array([x, key, key**2], np.float64))
    if int(sums[2]) * comm.size != int(sums[1])**2:
        # This raises an error with the calls of the ranks.
        comm.run(call, lambda collectives: collectives.barrier())
    return float(sums[0])
