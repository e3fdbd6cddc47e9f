"""Wraps a PyTorch module so that every backward pass computes the mean gradients of all ranks."""

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook, register_optimizer_step_pre_hook)

from ..arguments import truth
from ..communicator import Communicator
from ..errors import BufferMismatchError, ConfigError, GradientError
from ..launch.host import keep_freed_memory
from ..names import DATA_PARALLEL, explaining
from ..operations.agreement import Call
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics
from ..reducers.named import or_setting
from ..reducers.reducer import ReducerSpec
from ..text import ranks_text
from ..training.replicas import Replicas
from ..training.weighing import Weighing
from ..world import or_world
from .averaging import Averaging, ForwardPass, Settings
from .weights import without_waiting
from .modules import (
    SAME_MODEL, Buffers, Wrapper, refuse_several_devices, refuse_untrainable, weak_hook,
)
from .sparse import sparse_parameters
from .states import copy_from, replicated_parts
from .tensors import DEVICE_TYPES, described, tensors_in
from .threads import share_cores

if TYPE_CHECKING:
    from .sharded import Sharded

# Unit of the weight of a rank in a step.
_NO_BATCH, _SAMPLES, _TOKENS = range(3)


class UnevenBatches:
    """Ranks that still have batches, and the weights of their gradients.

    Weights are numbers of tokens if the program has called `weigh` for a step, otherwise numbers of
    samples. In each step, `root` of the buffers becomes the lowest rank that has a batch.
    """

    def __init__(self, comm: Communicator, weighing: Weighing, buffers: Buffers) -> None:
        self._comm, self._weighing, self._buffers = comm, weighing, buffers
        weighing.counting = self._arrive

    def close(self) -> None:
        """Do not count batches any more."""
        self._weighing.counting = None
        self._weighing.end_step()
        self._buffers.root = 0

    def _arrive(self) -> None:
        """Begin a step with a batch. Collective, blocking.

        Raises GradientError if some ranks called `weigh`, and others did not, or if the length of
        the batch is unknown.
        """
        tokens, samples = self._weighing.tokens, self._weighing.samples
        if tokens is not None:
            self._count(_TOKENS, tokens)
        elif samples is not None:
            self._count(_SAMPLES, samples)
        else:
            raise GradientError(
                f"rank {self._comm.rank}: in join(), a backward pass has reached no output of the "
                f"DataParallel, so that the number of samples is unknown; call the DataParallel "
                f"itself, as in loss_of(model(x)), or model.weigh(samples) before backward()")

    def others_continue(self) -> bool:
        """Begin a step without a batch; return whether another rank still has one.

        Raises GradientError if some ranks called `weigh`, and others did not. Collective, blocking.
        """
        return self._count(_NO_BATCH, 0)

    def _count(self, unit: int, weight: float) -> bool:
        """Weight this rank by its share of the total of all ranks; return whether any has a batch.

        If any rank has a batch, set `root` of the buffers.
        """
        # The unit of each rank, and the sum of the ranks' weights, which is exact below 2**53.
        counts = np.zeros(self._comm.size + 1)
        counts[self._comm.rank], counts[-1] = unit, weight
        self._comm.run(Call("join", self._weighing.model),
                       lambda collectives: collectives.allreduce(counts))
        weighed, others = (np.flatnonzero(counts[:-1] == kind) for kind in (_TOKENS, _SAMPLES))
        if weighed.size and others.size:
            with_tokens, without = (ranks_text(ranks.tolist()) for ranks in (weighed, others))
            raise GradientError(
                f"rank {self._comm.rank}: in join(), {with_tokens} called weigh(tokens) for this "
                f"step, but {without} did not; call it before backward(), on all ranks that have "
                f"a batch, or on none")
        self._weighing.use(weight, counts[-1])
        active = np.flatnonzero(counts[:-1])
        if active.size:
            self._buffers.root = int(active[0])
        return active.size > 0


class DataParallel(Wrapper):
    """A module that is trained on all ranks, each with its own share of the data.

        model = mpiring.torch.DataParallel(model)

    The rest of the program does not change: `forward`, the loss, `backward`, any optimizer. The
    constructor broadcasts the parameters and buffers of rank 0. Gradients are fused, and sent while
    the backward pass computes later gradients. If all ranks are on one node and leave no core idle,
    gradients are combined at the end of the backward pass. `p.grad` is a view of a bucket, which
    the next backward pass overwrites, so clone gradients that you need longer. Every `digest_steps`
    steps (see Config), parameters and optimizer state are compared between ranks, before an
    optimizer updates them. Parameters must not be updated during the backward pass.

    Buffers (BatchNorm statistics) are copied from rank 0 after each step, when gradients have
    arrived. Every rank then has the same model and the same `state_dict()`, so that one rank alone
    may evaluate or save the model. Forward passes in training mode may change buffers without such
    a step: under `torch.no_grad()`, in `no_sync()` or without backward. Such changes stay on this
    rank until the next step.

    A step is a `backward()` pass that goes through the outputs or reaches a parameter.
    `torch.autograd.grad`, and `backward(inputs=[...])` of other tensors, affect only this rank.

    PyTorch uses this rank's share of the cores of the node, unless OMP_NUM_THREADS, MKL_NUM_THREADS
    or an earlier `torch.set_num_threads` sets its threads; see `share_cores`.

    The process keeps memory that it frees (up to 1 GiB, in malloc of glibc), since the next step
    needs as much again. If `MALLOC_TRIM_THRESHOLD_` or `MALLOC_MMAP_THRESHOLD_` is set in the
    environment, to any value, mpiring does not change this.

    Args:
        module: Module with the same parameters, in the same order, on every rank. They are on the
            CPU or all on one GPU. Gradients stay on this device.
        comm: Communicator of the ranks to average over; by default, all ranks of the job.
        bucket_bytes: Length in bytes of the buckets into which gradients are fused; the first
            buckets are shorter, so that they are sent early. By default 25 MiB on one node. Between
            nodes the default is 4 MiB, or 128 KiB per node if that is more, up to 25 MiB.
        reducer: Reducer of `mpiring.reducers` that computes the mean, or a mapping from names or
            patterns to reducers; by default that of the setting `reducer`, or a plain mean.
        find_unused_parameters: If true, backward passes may leave out parameters, on any rank. This
            costs a short message per step.
        broadcast_buffers: If true, copy rank 0's buffers to all ranks after each step. Otherwise
            each rank has separate buffers from the first step on.
        deterministic: If true, do not tune by the setting `autotune`, so that two runs on the same
            machines are bitwise identical. Otherwise, this has no effect, because the order in
            which gradients become ready does not matter.
        defer_wait: If true, gradients are complete after `synchronize()`, or in `step()` of their
            optimizer, instead of at the end of the backward pass. Until then `p.grad` reads as NaN
            and cannot be written. Call `synchronize()` before clipping, and before `unscale_` or
            `step` of a GradScaler.
        order: Names of all parameters in the order in which gradients are fused, for example the
            value of `order` from a checkpoint. By default the reverse order, with small parameters
            last.
        autotune: If true, try bucket lengths, algorithms and numbers of operations in flight in the
            first 60 steps or fewer, and keep the fastest, also for later jobs. By default, the
            setting `autotune` applies. Freezing or thawing parameters ends the tuning.

    Attributes:
        module: The module.

    Raises:
        ConfigError: The module cannot be trained on several ranks.
        BufferMismatchError: The modules or the arguments differ between ranks; names the first
            difference.
        ReplicaError: Parameters or optimizer state differ between ranks; raised in `step` of an
            optimizer, or in backward if no optimizer has taken a step.
        GradientError: Parameters were updated during backward; raised in backward.

    Collective: yes. Steps are also collective, as are forward passes in `join()`, and the first
    forward pass after parameters were frozen, thawed or replaced. Blocking: yes.
    """

    @explaining(DATA_PARALLEL)
    def __init__(self, module: nn.Module, comm: Communicator | None = None, *,
                 bucket_bytes: int | None = None, reducer: ReducerSpec = None,
                 find_unused_parameters: bool = False, broadcast_buffers: bool = True,
                 deterministic: bool = False, defer_wait: bool = False,
                 order: Sequence[str] | None = None, autotune: bool | None = None) -> None:
        comm = or_world(comm)
        with same_on_all(comm, "DataParallel", error=BufferMismatchError,
                         remedy=SAME_MODEL) as same:
            settings = Settings(bucket_bytes, or_setting(reducer, comm), truth(
                "deterministic", deterministic), order, autotune, truth(
                "find_unused_parameters", find_unused_parameters), truth("defer_wait", defer_wait))
            same.update(vars(settings),
                        broadcast_buffers=truth("broadcast_buffers", broadcast_buffers))
            refuse_untrainable(module, comm)
            parts = dict(module.named_parameters()) | dict(module.named_buffers())
            same["tensors"] = [f"{name} {described(tensor)}" for name, tensor in parts.items()]
        super().__init__(module)
        self._comm = comm
        self._weighing = weighing = Weighing(comm)
        self._shared_buffers = Buffers(module, comm, broadcast_buffers, model=weighing.model)
        self._settings = settings
        self._watched: dict[str, Any] = {}
        # A weak set of optimizers, in the order of their last steps.
        self._stepped = weakref.WeakKeyDictionary[torch.optim.Optimizer, None]()
        self._replicas = Replicas(
            comm, functools.partial(replicated_parts, module, self._stepped, self._watched),
            weighing.model, by_optimizer=None)
        self._averaging: Averaging | None = None
        self._trained: list[tuple[str, int, torch.dtype, torch.device]] | None = None
        self._syncs, self._updating_s = True, 0.0
        self._owner: Sharded | None = None
        self._uneven: UnevenBatches | None = None
        share_cores(comm)
        keep_freed_memory()
        copy_from(0, parts.values(), comm)
        self._build()
        # These hooks are never removed, because this breaks PyTorch's loop if hooks are running.
        register_optimizer_step_pre_hook(weak_hook(self.before_step))
        register_optimizer_step_post_hook(weak_hook(self.after_step))
        self.register_load_state_dict_pre_hook(_add_module_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare to average the gradients of the backward pass."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._build()
        with self._comm.recorder.phase("forward"):
            outputs = self.module(*args, **kwargs)
        if self._averaging is not None:
            self._averaging.watch(
                outputs, ForwardPass(self._averaging.active, _samples_in(args, kwargs)),
                functools.partial(_refuse_gone, weakref.ref(self), self._comm.rank))
        return outputs

    def synchronize(self) -> None:
        """Wait until all gradients have arrived; for `defer_wait`.

        Collective: yes. Blocking: yes.
        """
        if self._averaging is not None:
            self._averaging.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank in backward passes, without averaging them.

        This applies to backward passes through outputs of forward passes in the block, and to
        backward passes in the block that reach no output of the DataParallel. The first other
        backward pass averages the accumulated gradients.
        """
        before = self._syncs
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(before)

    def _set_syncs(self, syncs: bool) -> None:
        self._syncs = syncs
        if self._averaging is not None:
            self._averaging.active = syncs

    def weigh(self, tokens: float | torch.Tensor) -> None:
        """Weight this rank's gradients in this step by its number of tokens, or samples.

        Use this if the batches of ranks have different lengths. The mean over ranks becomes the
        mean over all tokens, as if one rank had all tokens.

            model.weigh(tokens)
            loss = cross_entropy(model(x), y, reduction="sum") / max(tokens, 1)
            loss.backward()

        The loss must be the mean over this rank's own tokens. To accumulate several passes in
        `no_sync()`, pass the tokens of all of them, and divide each sum by this number.

        The gradients of a rank with 0 tokens count as zeros, even if they are NaN. That rank must
        also run the forward and backward pass. If the model cannot run on an empty batch (BatchNorm
        cannot), pass it any other sample.

        Args:
            tokens: Number of tokens of this rank in this step, finite and at least 0; or a tensor
                with this number (reading it from a GPU synchronizes). If all ranks have 0, the
                means are 0.

        Raises:
            ConfigError: `tokens` is not such a number.
            GradientError: This is the second call in a step, or it is too late. Call it before a
                gradient is complete in a pass that averages.
            BufferMismatchError: Other ranks did not call this; raised here, or in backward.

        Collective: yes. Blocking: only with `defer_wait`, while gradients of the last step arrive.
        """
        self.synchronize()
        plain = tokens.item() if isinstance(tokens, torch.Tensor) and not tokens.dim() else tokens
        self._weighing.begin(plain)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train with different numbers of batches, and batches of different sizes, on each rank.

            with model.join():
                for x, y in batches:
                    ...

        A rank without batches takes part in steps without gradients until all ranks have finished.
        The mean is over samples: the gradient of a rank is weighted by the length of its batch.
        This is the length of dimension 0 of the first tensor among the arguments of `forward`. If
        `weigh` is called before `backward`, the weight is the number of tokens.

        Afterwards all ranks have the parameters and buffers of a rank that finished last, and the
        state of its optimizers if all ranks have taken a step. The schedulers of each rank have
        counted the batches of this rank.

        Raises:
            ConfigError: The model has a `Sharded` optimizer.
            GradientError: A backward pass reaches no output of the model, and `weigh` was not
                called. Raised in backward.

        Collective: yes. Blocking: yes.
        """
        if self._owner is not None:
            raise ConfigError(
                f"rank {self._comm.rank}: join() with a Sharded optimizer: a rank without batches "
                f"would have to update its slices, too; give all ranks as many batches, or use a "
                f"plain optimizer")
        self._uneven = UnevenBatches(self._comm, self._weighing, self._shared_buffers)
        # Ranks that have finished take no optimizer steps.
        self._replicas.paused = True
        try:
            yield
            while self._uneven.others_continue():
                if self._averaging is not None:
                    self._averaging.step_without_batch()
            root = self._shared_buffers.root
            self._replicas.copy_from(root)
            copy_from(root, self.module.buffers(), self._comm)
        finally:
            self._uneven.close()
            self._uneven = None
            self._replicas.paused = False

    @property
    def statistics(self) -> Statistics:
        """Cost of averaging gradients in the last complete step.

        Other operations on the communicator do not count, such as comparing replicas, copying
        buffers or finding unused parameters.
        """
        return Statistics() if self._averaging is None else self._averaging.gradients.statistics

    @property
    def order(self) -> list[str] | None:
        """Names in the order in which gradients are fused; None if no parameter is trained."""
        return None if self._averaging is None else self._averaging.gradients.order

    @property
    def finite(self) -> bool:
        """True if all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf on any rank reaches the means on all ranks. If this is False, skip the update,
        as GradScaler does; reducers ignore such a step. If operations are queued on a GPU, reading
        this waits for the GPU.
        """
        return self._averaging is None or self._averaging.gradients.finite

    @property
    def nonfinite(self) -> Mapping[int, Sequence[str]]:
        """Names of gradients that held NaN or Inf before averaging in the last step, by rank.

        The same on all ranks. Each step checks the gradients that are sent last, which a NaN of any
        layer reaches; on a GPU, that check would wait for the GPU and is omitted. All gradients are
        checked in the ten steps after a step whose means were not finite. Rank 0 warns when an
        optimizer is about to use such gradients. If they are queued on a GPU, it warns one step
        later, if the gradients are still not finite.
        """
        return {} if self._averaging is None else self._averaging.gradients.nonfinite.by_rank

    def watch(self, **state: Any) -> None:
        """Compare more tensors between ranks, and restore them, in the same way as parameters.

        Parameters, and the state of optimizers that have taken a step, are always compared.

            model.watch(average=averaged.state_dict())

        Args:
            state: Tensors, or pytrees of mappings, lists and tuples with tensors and numbers, by
                names that are the same on all ranks. The contents may change and be replaced.

        Raises:
            ConfigError: A value is not such a tensor or pytree.

        Collective: no. Blocking: no.
        """
        for name, value in state.items():
            if not isinstance(value, torch.Tensor | Mapping | list | tuple):
                raise ConfigError(
                    f"rank {self._comm.rank}: watch({name}=...) is a {type(value).__name__}; pass "
                    f"a tensor, or a mapping or list of tensors")
            for tensor in tensors_in(value):
                if tensor.device.type not in DEVICE_TYPES or tensor.layout is not torch.strided:
                    raise ConfigError(
                        f"rank {self._comm.rank}: watch({name}=...) has a {tensor.layout} tensor "
                        f"on {tensor.device}; expected dense ones on the CPU or a GPU")
        self._watched.update(state)

    def compare_replicas(self) -> None:
        """Compare parameters, optimizer state and watched state now.

        Raises:
            ReplicaError: They differ between ranks, unless `digest_action` is "restore".

        Collective: yes. Blocking: yes.
        """
        self._replicas.compare()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Complete the gradients that an optimizer is about to use; called by a hook."""
        self._stepped.pop(optimizer, None)
        self._stepped[optimizer] = None
        averaging = self._averaging
        if averaging is None or not self._is_updated_by(optimizer):
            return
        if averaging.in_backward:
            raise GradientError(
                f"rank {self._comm.rank}: {type(optimizer).__name__} takes a step during the "
                f"backward pass, when gradients are not yet means over ranks; call step() after "
                f"backward(), not in a hook (with Sharded, no rank stores the state of all)")
        if optimizer is not self._owner:
            self._complete_gradients(optimizer, averaging)
        self._replicas.written = self._replicas.written or averaging.written
        # Without averaged gradients, ranks may differ.
        if averaging.averaged:
            self._replicas.begin_update()
        self._updating_s = time.monotonic()

    def _complete_gradients(self, optimizer: torch.optim.Optimizer, averaging: Averaging) -> None:
        """Wait for the gradients that an optimizer of complete tensors is about to use."""
        if self._owner is not None:
            raise ConfigError(
                f"rank {self._comm.rank}: {type(optimizer).__name__} is to update parameters of a "
                f"model that has a Sharded optimizer; take steps with that one only, or close() it "
                f"first")
        averaging.wait()
        # In `join`, ranks that have finished take no steps; without averages, ranks may differ.
        if self._uneven is None and averaging.averaged:
            averaging.gradients.updates += 1
        # GradScaler sets `found_inf` on fused optimizers, which skip such a step themselves.
        averaging.gradients.note_use(getattr(optimizer, "found_inf", None))

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record that an optimizer has updated parameters, and its duration; called by hooks."""
        if self._averaging is None or not self._is_updated_by(optimizer):
            return
        self._averaging.updated()
        trace = self._comm.recorder.trace
        if trace is not None:
            trace.span("optimizer", "phase", self._updating_s, time.monotonic())

    def _is_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates parameters of the model."""
        return optimizer is self._owner or (
            self._averaging is not None and self._averaging.is_for(optimizer))

    def give_gradients_to(self, owner: "Sharded", costs: Mapping[str, float]) -> Averaging:
        """Give the means to an optimizer of slices, not to the parameters; return their averager.

        Parameters with `costs` (see Fusion) are each in one slice. Raises ConfigError if the model
        cannot have such an optimizer, or has one already. Collective, blocking.
        """
        if self._owner is not None:
            raise ConfigError(f"rank {self._comm.rank}: the model has a Sharded optimizer already; "
                              f"give it all parameters, in groups, or close() it first")
        # Parameters may have been frozen since the last forward pass.
        self._build()
        if self._averaging is None:
            raise ConfigError(f"rank {self._comm.rank}: no parameter of the model is trained")
        if self._settings.defer_wait:
            raise ConfigError(f"rank {self._comm.rank}: a Sharded optimizer takes gradients at the "
                              f"end of backward; leave out defer_wait=True")
        self._settings = replace(self._settings, costs=costs)
        self._averaging.gradients.demand_owners(costs)
        self._build()
        self._averaging.give_to(owner)
        self._owner = owner
        return self._averaging

    def restore_gradients(self) -> None:
        """Give the means to the parameters again, from the next forward pass on; for `Sharded`."""
        # The next forward pass builds new buckets.
        self._owner = self._trained = None
        self._settings = replace(self._settings, costs={})

    @property
    def shares_weights(self) -> bool:
        """True if a Sharded optimizer keeps one copy of the weights in the memory of each node."""
        return self._owner is not None and self._owner.shares_weights

    def rescale(self, factor: float) -> None:
        """Rescale the gradients that reducers store, after the scale of the loss has changed.

        Args:
            factor: New scale divided by old scale.

        Collective: no, but on all ranks. Blocking: no.
        """
        if self._averaging is not None:
            self._averaging.gradients.rescale(factor)

    def _build(self) -> None:
        """Build buckets if parameters were frozen, thawed or replaced, or other buckets are due."""
        parameters = {name: p for name, p in without_waiting(self.module) if p.requires_grad}
        # Buckets keep their parameters alive: no other parameter can have the same id.
        trained = [(name, id(p), p.dtype, p.device) for name, p in parameters.items()]
        before = None if self._averaging is None else self._averaging.gradients
        settings: Any = self._settings
        if trained == self._trained:
            settings = None if before is None else before.due
            if settings is None:
                return
        if self._owner is not None:
            self._owner.synchronize()
        with same_on_all(self._comm, "DataParallel", error=BufferMismatchError,
                         remedy="freeze and replace the same on every rank") as same:
            same["model"] = self._weighing.model
            refuse_several_devices(parameters, self._comm)
            same["trained"] = [f"{name} {described(p)}" for name, p in parameters.items()]
        if self._averaging is not None:
            self._averaging.close()
        self._averaging = None
        if self._trained not in (None, trained) or self._owner is not None:
            # Parameters may have been replaced, or slices of them written on some ranks only.
            copy_from(0, parameters.values(), self._comm)
            self._shared_buffers.copy()
        if parameters:
            self._averaging = Averaging(
                parameters, sparse_parameters(self.module), self._comm, self._weighing,
                settings, before=before,
                completed=functools.partial(_end_step, self._shared_buffers, self._replicas))
            if self._owner is not None:
                self._averaging.give_to(self._owner)
                self._owner.follow(self._averaging)
            self._averaging.active = self._syncs
            # The user's order applies only to the first set of trained parameters.
            self._settings = replace(self._settings, order=None)
        self._trained = trained

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the `state_dict` of this model, or of the module alone; on every rank.

        Args:
            state_dict: State with the names of the bare module.
            args, kwargs: Arguments of `torch.nn.Module.load_state_dict`.
        """
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: the order of the gradients, and the state of its Reducers.

        `TrainState` saves it with the weights, so that a run resumes with identical bits.

        Collective: no.
        """
        return {} if self._averaging is None else self._averaging.gradients.own_state_dict()

    def load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the result of `own_state_dict` on this rank; call it on all ranks.

        Args:
            state_dict: Result of `own_state_dict`.

        Raises:
            ConfigError: The state belongs to another model or to other Reducers.
            GradientError: A step has begun.

        Collective: yes. Blocking: yes.
        """
        if self._averaging is not None:
            self._averaging.load_own_state_dict(state_dict)
            self._build()


def _add_module_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str,
                       *_: object) -> None:
    """Rename keys of a state, for a module that contains the DataParallel."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix):]}"] = state_dict.pop(name)


def _refuse_gone(model: Callable[[], DataParallel | None], rank: int) -> None:
    """Raise GradientError if a model does not exist any more."""
    if model() is None:
        raise GradientError(
            f"rank {rank}: the DataParallel was deleted before the backward pass through its "
            f"outputs, whose gradients nothing would average; keep the DataParallel in a variable")


def _samples_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the length of dimension 0 of the first tensor among arguments of the model."""
    first = next(tensors_in((args, kwargs)), None)
    return 1 if first is None or first.dim() == 0 else len(first)


def _end_step(buffers: Buffers, replicas: Replicas) -> None:
    """Copy buffers and compare replicas when all gradients of a step have arrived."""
    buffers.copy()
    replicas.end_step()
