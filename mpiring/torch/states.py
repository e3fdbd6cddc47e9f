"""Copies state from one rank to all, and lists the state that should be equal on all ranks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..arguments import whole_number
from ..communicator import Communicator
from ..errors import BufferMismatchError, ConfigError
from ..memory.arrays import cut
from ..memory.pytrees import leaves, mapped
from ..operations.consistency import same_on_all
from ..training.replicas import Replicated, replicated_in
from ..world import or_world
from .tensors import (
    DEVICE_TYPES, described, is_stored, parts_of, refuse_uncopied, tensor_of_bytes, viewed_as,
)
from .vectors import TensorBuffers

# Layouts of tensors with version counters.
_COUNTED = torch.strided, torch.sparse_coo
# Short tensors are fused, since each broadcast costs the latency of a message.
_FUSED_BYTES = 1 << 20


def broadcast_parameters(tensors: Iterable[torch.Tensor], comm: Communicator | None = None, *,
                         root: int = 0) -> None:
    """Copy tensors of rank `root` to all ranks, in place.

    Args:
        tensors: Dense or sparse tensors of any dtype, on the CPU or GPUs. All ranks pass the same
            shapes and dtypes, in the same order, on the same kinds of devices. Sparse tensors have
            the same numbers of elements on all ranks.
        comm: Communicator whose ranks get the tensors; by default, all ranks.
        root: Rank to copy from.

    Raises:
        ConfigError: An argument is not such a tensor; raised on all ranks.
        BufferMismatchError: Tensors or `root` differ between ranks; raised on all ranks.

    Collective: yes. Blocking: yes.
    """
    tensors = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    broadcast_named([(f"tensor {i}", x) for i, x in enumerate(tensors)], or_world(comm), root)


def broadcast_named(pairs: Sequence[tuple[str, torch.Tensor]], comm: Communicator,
                    root: int) -> None:
    """Copy named tensors of one rank to all ranks, as `broadcast_parameters` does. Collective."""
    with same_on_all(comm, "broadcast_parameters", error=BufferMismatchError,
                     remedy="pass the same tensors, in the same order, on every rank") as same:
        same["root"] = whole_number("root", root, 0, comm.size - 1)
        for name, tensor in pairs:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"rank {comm.rank}: expected tensors, got a {type(tensor).__name__}; pass a "
                    f"list of them, as model.state_dict().values()")
            refuse_uncopied(f"rank {comm.rank}: {name}", tensor)
        same["tensors"] = [described(tensor) for _, tensor in pairs]
    copy_from(root, [tensor for _, tensor in pairs], comm)


def copy_from(root: int, tensors: Iterable[torch.Tensor], comm: Communicator) -> None:
    """Copy tensors of rank `root` to all ranks, without a check that they match. Collective."""
    tensors = list(tensors)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).extend(parts_of(tensor))
    for on_one_device in by_device.values():
        for fused in _fused(on_one_device):
            _broadcast(fused, comm, root)
    # Ranks may write in different ways; this makes the version counters agree on all ranks.
    torch.autograd.graph.increment_version([x for x in tensors if x.layout in _COUNTED])


def _fused(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    fused: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
        if fused and nbytes > _FUSED_BYTES:
            yield fused
            fused, nbytes = [], tensor.nbytes
        fused.append(tensor)
    yield fused


def _broadcast(tensors: list[torch.Tensor], comm: Communicator, root: int) -> None:
    """Copy tensors as one vector of bytes; a single contiguous tensor is sent directly."""
    with torch.no_grad():
        parts = [viewed_as(tensor.resolve_conj().resolve_neg().contiguous(), torch.uint8)
                 for tensor in tensors]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        comm.broadcast(flat, root=root)
        if comm.rank == root:
            return
        received = flat.split([part.nbytes for part in parts])
        for tensor, part, new in zip(tensors, parts, received, strict=True):
            if new.data_ptr() != part.data_ptr():
                part.copy_(new)
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(viewed_as(part, tensor.dtype).view(tensor.shape))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer,
                              comm: Communicator | None = None, *, root: int = 0) -> None:
    """Copy the state of rank `root`'s optimizer (momenta, step counts, settings) to all ranks.

    Args:
        optimizer: PyTorch optimizer of the same parameters, in the same groups, on every rank.
        comm: Communicator whose ranks get the state; by default, all ranks.
        root: Rank to copy from.

    Raises:
        ConfigError: `optimizer` is not a PyTorch optimizer, or classes or groups differ between
            ranks; raised on all ranks.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    with same_on_all(comm, "broadcast_optimizer_state") as same:
        same["root"] = whole_number("root", root, 0, comm.size - 1)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"rank {comm.rank}: optimizer is a {type(optimizer).__name__}; pass "
                              f"a torch.optim.Optimizer")
        same["optimizer"] = type(optimizer).__qualname__
        same["groups"] = [[str(tuple(p.shape)) for p in group["params"]]
                          for group in optimizer.param_groups]
        # Tensors are sent in host memory; load_state_dict copies them to the parameters' devices.
        state = _changed(optimizer.state_dict(), torch.Tensor.cpu) if comm.rank == root else None
    # Dense tensors are sent separately, because a pickled tensor would be in memory three times.
    outline = comm.broadcast_object(_changed(state, functools.partial(_empty, "meta")), root=root)
    if comm.rank != root:
        state = _changed(outline, functools.partial(_empty, "cpu"))
    copy_from(root, (x for _, x in leaves(state) if _is_dense(x)), comm)
    if comm.rank != root:
        optimizer.load_state_dict(state)


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and is_stored(x)


def _empty(device: str, x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with undefined elements on another device; other tensors unchanged."""
    return torch.empty_like(x, device=device) if _is_dense(x) else x


def _changed(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a pytree with its tensors replaced."""
    return mapped(state, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def replicated_parts(module: nn.Module, stepped: Iterable[Optimizer],
                     watched: Mapping[str, Any]) -> Iterator[Replicated]:
    """Yield parameters, optimizer state and watched tensors, which should be equal on all ranks.

    `stepped` has optimizers in the order of their last steps. For each parameter, the state in the
    optimizer that updated it last is compared. `watched` has pytrees of tensors.
    """
    seen: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if (not isinstance(x, torch.Tensor) or id(x) in seen
                or x.device.type not in DEVICE_TYPES or not is_stored(x)):
            return None
        seen.add(id(x))
        read, write = functools.partial(_read, x), functools.partial(_write, x)
        if x.layout is not torch.strided or not x.is_floating_point():
            return Replicated(name, read, write)
        return Replicated(name, read, write, functools.partial(_floats, x.dtype),
                          torch.finfo(x.dtype).eps)

    names = {p: name for name, p in module.named_parameters()}
    for p, name in names.items():
        yield from replicated_in(p, name, leaf)
    latest = {p: optimizer for optimizer in stepped for group in optimizer.param_groups
              for p in group["params"] if p in names}
    for p, optimizer in latest.items():
        if p in optimizer.state:
            yield from replicated_in(
                optimizer.state[p], f"{type(optimizer).__name__}[{names[p]!r}]", leaf)
    for optimizer in dict.fromkeys(latest.values()):
        for group in optimizer.param_groups:
            first = next((p for p in group["params"] if latest.get(p) is optimizer), None)
            if first is not None:
                # Only the settings of the group are compared here, not its parameters.
                seen.update(map(id, group["params"]))
                yield from replicated_in(
                    group, f"{type(optimizer).__name__}[{names[first]!r}, ...]", leaf)
    for name, nest in watched.items():
        yield from replicated_in(nest, name, leaf)


def _floats(dtype: torch.dtype, raw: Any) -> Any:
    return viewed_as(torch.from_numpy(raw), dtype).double().numpy()


def _read(tensor: torch.Tensor) -> Any:
    raws = [TensorBuffers(staged=True).raw(part) for part in parts_of(tensor)]
    return raws[0] if len(raws) == 1 else np.concatenate(raws)


def _write(tensor: torch.Tensor, raw: Any) -> None:
    # Writes to `data`, because NodeWeights would attribute other writes to the user.
    parts = parts_of(tensor.data)
    bounds = np.cumsum([0, *(part.nbytes for part in parts)]).tolist()
    for part, data in zip(parts, cut(raw, bounds)):
        part.copy_(tensor_of_bytes(data, part.dtype, part.shape))
