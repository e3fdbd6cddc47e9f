"""Shared parts of the adapters for PyTorch modules: a wrapper, buffers, checks, and hooks."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ..communicator import Communicator
from ..errors import BufferMismatchError, ConfigError
from ..memory.tensors import numpy_dtype
from ..operations.agreement import Call
from ..operations.consistency import same_on_all
from ..text import first_few
from .tensors import described, refuse_uncopied
from .states import copy_from


SAME_MODEL = "build the same model, in the same order, on every rank"


class Wrapper(nn.Module):
    """A wrapper of a bare `module` that also has the attributes of this module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, with the names of the bare module.

        Args:
            args, kwargs: Arguments of `torch.nn.Module.state_dict`.
        """
        return self.module.state_dict(*args, **kwargs)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules by names of the bare module, for `named_parameters` and `named_buffers`."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute with each child of the bare module, as DCP expects.

        torch.distributed.checkpoint omits these attributes from the names of its state.
        """
        return dict.fromkeys(["", *(name for name, _ in self.module.named_children())], "module")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} cannot be pickled or copied: it holds MPI's memory; save "
            f"model.state_dict(), or pickle model.module")


@dataclass
class Buffers:
    """The buffers of a module, copied from rank `root` to all when a step is complete, if `copied`.

    `model` is its number as a string for messages; see `Communicator.next_model`.
    """

    module: nn.Module
    comm: Communicator
    copied: bool = True
    root: int = 0
    model: str = ""

    def copy(self) -> None:
        """Copy the buffers of `root` to all ranks, unless they are local. Collective, blocking."""
        # Unlike writes to the tensors, writes to `data` do not invalidate retained graphs, nor do
        # the updates by BatchNorm itself.
        buffers = {name: x.data for name, x in self.module.named_buffers()} if self.copied else {}
        if not buffers:
            return
        if self.model:
            # Copies are not compared by model.
            self.comm.run(Call("buffers", self.model), lambda collectives: collectives.barrier())
        try:
            copy_from(self.root, buffers.values(), self.comm)
        except BufferMismatchError as error:
            shapes = [f"{name} {described(x)}" for name, x in buffers.items()]
            raise BufferMismatchError(
                f"{error}; copied were the buffers {first_few(shapes, 8)} of rank "
                f"{self.comm.rank}: give them the same shapes on every rank, or pass "
                f"broadcast_buffers=False") from error


def refuse_untrainable(module: nn.Module, comm: Communicator) -> None:
    """Raise ConfigError if a module cannot be trained on several ranks."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"rank {comm.rank}: module is a {type(module).__name__}; pass a torch.nn.Module")
    if isinstance(module, Wrapper):
        raise ConfigError(f"rank {comm.rank}: the module is wrapped already, by "
                          f"{type(module).__name__}; pass module.module")
    refuse_several_devices(dict(module.named_parameters()), comm)
    for name, p in module.named_parameters():
        refuse_uncopied(f"rank {comm.rank}: parameter {name}", p)
        if p.requires_grad and p.layout is not torch.strided:
            raise ConfigError(
                f"rank {comm.rank}: parameter {name} is a {p.layout} tensor; expected a dense one: "
                f"train its values, and build it in forward")
        numpy_dtype(p.dtype)
    for name, x in module.named_buffers():
        refuse_uncopied(f"rank {comm.rank}: buffer {name}", x)


def broadcast_model(module: nn.Module, comm: Communicator) -> dict[str, nn.Parameter]:
    """Copy rank 0's parameters and buffers to all ranks; return the trained parameters.

    Raises BufferMismatchError if modules or trained parameters differ between ranks. Raises
    ConfigError if the module cannot be trained on several ranks, or has no trained parameter.
    Collective, blocking.
    """
    with same_on_all(comm, "the model", error=BufferMismatchError, remedy=SAME_MODEL) as same:
        refuse_untrainable(module, comm)
        parts = dict(module.named_parameters()) | dict(module.named_buffers())
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ConfigError(f"rank {comm.rank}: no parameter of the model is trained")
        same["tensors"] = [f"{name} {described(x)}{'' if name in trained else ' without gradient'}"
                           for name, x in parts.items()]
    copy_from(0, parts.values(), comm)
    return trained


def refuse_several_devices(parameters: Mapping[str, nn.Parameter], comm: Communicator) -> None:
    """Raise ConfigError unless all parameters are on one device."""
    first = next(iter(parameters), "")
    for name, p in parameters.items():
        if p.device != parameters[first].device:
            raise ConfigError(
                f"rank {comm.rank}: parameter {name} is on {p.device}, but {first} on "
                f"{parameters[first].device}; expected all of them on one device")


def _nothing(*_: object) -> None:
    """Do nothing, in place of a hook."""


def weak_hook(method: Any, *args: Any,
              gone: Callable[[], None] = _nothing) -> Callable[..., None]:
    """Return a hook that calls a method, with `args` first, or `gone` without the method's object.

    Python's garbage collector does not find cycles through tensor hooks, and some hooks are never
    removed.
    """
    # A WeakMethod would take longer.
    reference, function = weakref.ref(method.__self__), method.__func__

    def hook(*more: Any) -> None:
        living = reference()
        if living is None:
            gone()
        else:
            function(living, *args, *more)

    return hook


class UncopiedHook(functools.partial[None]):
    """A hook of a module that does nothing in copies and pickles of the module."""

    def __reduce__(self) -> Any:
        return functools.partial, (_nothing,)
