"""Wraps a PyTorch module so that every backward pass leaves the mean gradients of all ranks."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from ..communicator import Communicator, refuse_other_than_communicators
from ..errors import ConfigError
from ..record.statistics import Statistics
from ..memory.tensors import numpy_dtype
from ..reducers.by_name import Wish
from ..training.gradients import refuse_different
from ..training.replicas import Replicas
from .averaging import Averaging, Settings
from .devices import DEVICE_TYPES, described
from .join import Uneven
from .optimizers import follow_steps, replicated_parts, updates_any
from .sparse import sparse_parameters
from .states import broadcast_parameters
from .tensors import tensors_in
from .threads import share_cores


class DataParallel(nn.Module):
    """A module that is trained on all ranks at once, each on its own share of the data.

        model = mpiring.torch.DataParallel(model, comm)

    Everything else stays as it was: `forward`, the loss, `backward`, any optimizer.
    Parameters and buffers are broadcast from rank 0. A gradient leaves, fused with others,
    while backward still calculates those before it; `p.grad` is a view into that memory, which
    the next backward pass overwrites: clone what you keep. After every `digest_steps` steps (see
    Config), backward finds out whether parameters and optimizers' state are equal on all ranks.

    Buffers (BatchNorm's statistics) are those of rank 0 again after each step, when gradients
    have arrived. So every rank evaluates the same model and has the same `state_dict()`, and a
    rank may do either alone. What forward passes in training mode change without such a step,
    under `torch.no_grad()`, in `no_sync()` or without backward, is this rank's own until then.

    A step is a pass of `backward()` through the outputs, or one that reaches a parameter;
    torch.autograd.grad, and backward(inputs=[...]) of other tensors, are this rank's own affair.

    PyTorch's threads on this rank become its share of the node's cores, unless OMP_NUM_THREADS,
    MKL_NUM_THREADS or an earlier `torch.set_num_threads` says otherwise; see `share_cores`.

    Args:
        module: The same on every rank, its parameters in the same order; they lie on the CPU, or
            all on one GPU, where gradients stay.
        comm: The ranks to average over.
        bucket_bytes: Gradients are fused into messages of about this many bytes; the first
            ones are shorter, to leave early.
        reducer: How gradients become their mean: one of `mpiring.reducers`, or a mapping from
            names or patterns to several; a plain mean by default.
        find_unused_parameters: Let backward passes leave parameters out, on some ranks or all.
            Costs a short message in each step.
        broadcast_buffers: Copy rank 0's buffers to all ranks after each step; else each rank has
            its own, from the first step on.
        deterministic: Keep the first order of gradients, so that two runs have equal bits
            even if gradients became ready in different orders.
        defer_wait: Gradients are complete not before `synchronize()`, or the `step()` of an
            optimizer of theirs, instead of at the end of backward. Until then `p.grad` reads
            as NaN and cannot be written: call `synchronize()` before clipping, and before
            GradScaler's `unscale_` or `step`.
        order: What `order` was when a checkpoint was saved, to go on from it bit by bit.

    Attributes:
        module: The module.

    Raises:
        ConfigError: The module cannot be trained so.
        BufferMismatchError: The modules differ between ranks; names the first difference.
        ReplicaError: In backward: parameters or optimizers' state differ between ranks.

    Collective: yes, and so is each step; of forward passes those in `join()`, and the first
    after parameters were frozen, thawed or replaced. Blocking: yes.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, bucket_bytes: int = 25 << 20,
                 reducer: Wish = None, find_unused_parameters: bool = False,
                 broadcast_buffers: bool = True, deterministic: bool = False,
                 defer_wait: bool = False, order: Sequence[str] | None = None) -> None:
        super().__init__()
        _refuse(module, comm)
        self.module = module
        self._comm = comm
        self._shared_buffers = Buffers(module, comm, copied=broadcast_buffers)
        self._settings = Settings(bucket_bytes, reducer, deterministic, order,
                                  find_unused_parameters, defer_wait)
        self._watched: dict[str, Any] = {}
        # In the order of their last steps; a set that forgets.
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = (
            weakref.WeakKeyDictionary())
        self._replicas = Replicas(
            comm, functools.partial(replicated_parts, module, self._stepped, self._watched))
        self._averaging: Averaging | None = None
        self._trained: list[tuple[str, int, torch.dtype, torch.device]] | None = None
        self._syncs = True
        self._uneven: Uneven | None = None
        share_cores(comm)
        parts = dict(module.named_parameters()) | dict(module.named_buffers())
        refuse_different(comm, "parameter or buffer", [
            f"{name} {described(tensor)}" for name, tensor in parts.items()])
        broadcast_parameters(parts.values(), comm)
        self._follow_freezing()
        follow_steps(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and prepare to average what backward will calculate."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._follow_freezing()
        if self._uneven is not None:
            self._uneven.arrive(args, kwargs, syncs=self._syncs)
            self._shared_buffers.root = self._uneven.root
        outputs = self.module(*args, **kwargs)
        if self._averaging is not None:
            self._averaging.active = self._syncs
            self._averaging.weight = 1.0 if self._uneven is None else self._uneven.weight
            self._averaging.watch(outputs)
        return outputs

    def synchronize(self) -> None:
        """Return when all gradients have arrived; for `defer_wait`.

        Collective: yes. Blocking: yes.
        """
        if self._averaging is not None:
            self._averaging.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes accumulate gradients on this rank, without averaging them.

        The first pass after it averages what has been accumulated. Both the forward and
        the backward pass must be inside.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches, and batches different numbers of samples.

            with model.join():
                for x, y in batches:
                    ...

        A rank that has finished goes on to take part, with nothing, until all have. In
        each step the mean is over samples: a rank's gradient, a mean over its batch, weighs
        as much as the batch is long (dimension 0 of the first tensor that `forward` takes).
        Afterwards all ranks have the parameters and buffers of one that finished last, and the
        state of its optimizers, but for ranks that never took a step; schedulers have done
        as many steps as their rank had batches.

        Collective: yes. Blocking: yes.
        """
        self._uneven = uneven = Uneven(self._comm)
        # Until the end, ranks that have finished are behind.
        self._replicas.paused = True
        try:
            yield
            while uneven.goes_on_without_us():
                self._shared_buffers.root = uneven.root
                if self._averaging is not None:
                    self._averaging.step_with_nothing()
            self._replicas.copy_from(uneven.root)
            broadcast_parameters(self.module.buffers(), self._comm, root=uneven.root)
        finally:
            self._uneven = None
            self._shared_buffers.root = 0
            self._replicas.paused = False

    @property
    def statistics(self) -> Statistics:
        """What averaging gradients cost in the last complete step.

        Other operations on the communicator do not count, be they yours or those that compare
        replicas, copy buffers or look for parameters that were not used.
        """
        return Statistics() if self._averaging is None else self._averaging.statistics

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which gradients are fused; None in the first step."""
        return None if self._averaging is None else self._averaging.order

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf of any rank is in the means of all. Where it is False, take no step, as
        GradScaler does not: reducers have taken none either.
        """
        return self._averaging is None or self._averaging.finite

    @property
    def nonfinite(self) -> Mapping[int, Sequence[str]]:
        """Whose own gradients held NaN or Inf in the last complete step: by rank, some of them.

        The same on all ranks. It has those that were looked at before they left: in each step
        the ones that leave last (not on a GPU, which would have to be waited for), where the NaN
        of any other layer ends up, and all in the ten steps after such a step. Rank 0 warns of
        them when an optimizer is to use them.
        """
        return {} if self._averaging is None else self._averaging.nonfinite.found

    def watch(self, **state: Any) -> None:
        """Let more tensors be compared between ranks, and restored, as parameters are.

        Parameters, and the state of optimizers that have taken a step, are so by themselves.

            model.watch(average=averaged.state_dict())

        Args:
            state: By any name, on all ranks the same: a tensor, or a nest of mappings, lists
                and tuples with tensors and numbers in it, which may change and be replaced.

        Raises:
            ConfigError: It is none of that.

        Collective: no.
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
        """Compare parameters, optimizers' state and what `watch` was given, now.

        Raises:
            ReplicaError: They differ, unless `digest_action` is "restore".

        Collective: yes. Blocking: yes.
        """
        self._replicas.compare()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the gradients that an optimizer is about to use; called by its hook."""
        self._stepped.pop(optimizer, None)
        self._stepped[optimizer] = None
        averaging = self._averaging
        if averaging is None or not (averaging.under_way or averaging.nonfinite.found):
            return
        if updates_any(optimizer, self.module.parameters()):
            averaging.wait()
            # GradScaler lets some optimizers skip a step by themselves.
            if not getattr(optimizer, "found_inf", None):
                averaging.nonfinite.report()

    def rescale(self, factor: float) -> None:
        """Tell reducers, which remember gradients, that the loss is scaled otherwise now.

        Args:
            factor: New scale / old scale.
        """
        if self._averaging is not None:
            self._averaging.rescale(factor)

    def _follow_freezing(self) -> None:
        """Build the buckets of the parameters that are trained now, if those are others."""
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        # What is averaged is kept alive: no other parameter can have its id.
        trained = [(name, id(p), p.dtype, p.device) for name, p in parameters.items()]
        if trained == self._trained:
            return
        _refuse_several_devices(parameters, self._comm)
        refuse_different(self._comm, "trained parameter", [
            f"{name} {described(p)}" for name, p in parameters.items()])
        if self._averaging is not None:
            self._averaging.close()
        steps = 0 if self._averaging is None else self._averaging.steps
        self._averaging = None
        if self._trained is not None:
            # Some may be new, in place of others.
            broadcast_parameters(parameters.values(), self._comm)
            self._shared_buffers.copy()
        if parameters:
            self._averaging = Averaging(
                parameters, sparse_parameters(self.module), self._comm,
                self._settings, steps=steps,
                completed=functools.partial(_end_step, self._shared_buffers, self._replicas))
            # Of the parameters that are trained first, not of those after freezing some.
            self._settings = replace(self._settings, order=None)
        self._trained = trained

    # What users of the bare module find on it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, under the names that the bare module has."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict`, or the bare module's, has returned; on every rank."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            "a DataParallel cannot be pickled or copied: it holds MPI's memory; save "
            "model.state_dict(), or pickle model.module")


class Buffers:
    """The buffers of a module, of which one rank's are copied to all when a step is complete.

    Between steps they are therefore equal: a rank can evaluate the module, or save its state,
    without the others.

    Args:
        module: The module.
        comm: The ranks.
        copied: Whether they are copied; else each rank has its own.

    Attributes:
        root: Whose are copied.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, copied: bool) -> None:
        self.root = 0
        self._module = module
        self._comm = comm
        self._copied = copied

    def copy(self) -> None:
        """Copy them, if they are to be copied.

        Collective: yes. Blocking: yes.
        """
        if self._copied:
            # Graphs that are kept for another backward pass count changes of the tensors, but
            # BatchNorm, which changes them itself, does not count those either.
            broadcast_parameters((x.data for x in self._module.buffers()), self._comm,
                                 root=self.root)


def _end_step(buffers: Buffers, replicas: Replicas) -> None:
    """See to it that ranks are equal when all gradients of a step have arrived."""
    buffers.copy()
    replicas.end_step()


def _refuse(module: nn.Module, comm: Communicator) -> None:
    """Raise where a module cannot be trained across ranks."""
    refuse_other_than_communicators(comm)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"rank {comm.rank}: module is a {type(module).__name__}; pass a torch.nn.Module")
    if isinstance(module, DataParallel):
        raise ConfigError(f"rank {comm.rank}: the module is wrapped already")
    _refuse_several_devices(dict(module.named_parameters()), comm)
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"rank {comm.rank}: parameter {name} has no shape yet; run one batch through the "
                f"module before it is wrapped")
        if p.device.type not in DEVICE_TYPES:
            raise ConfigError(f"rank {comm.rank}: parameter {name} is on {p.device}; expected the "
                              f"CPU or a GPU of NVIDIA's: wrap module.cpu() or module.cuda()")
        numpy_dtype(p.dtype)


def _refuse_several_devices(parameters: Mapping[str, nn.Parameter], comm: Communicator) -> None:
    """Raise ConfigError unless parameters lie on one device."""
    first = next(iter(parameters), "")
    for name, p in parameters.items():
        if p.device != parameters[first].device:
            raise ConfigError(
                f"rank {comm.rank}: parameter {name} is on {p.device}, but {first} on "
                f"{parameters[first].device}; expected all of them on one device")
