"""State that is alike on all ranks: copied from one rank to all, and listed to be compared."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..arguments import whole_number
from ..communicator import Communicator, or_world
from ..errors import BufferMismatchError, ConfigError
from ..memory.pytrees import leaves, mapped
from ..operations.consistency import same_on_all
from ..training.replicas import Replicated, replicated_in
from .tensors import DEVICE_TYPES
from .vectors import TensorBuffers

# Short tensors are fused, since each broadcast costs the latency of a message.
_FUSED_BYTES = 1 << 20


def broadcast_parameters(tensors: Iterable[torch.Tensor], comm: Communicator | None = None, *,
                         root: int = 0) -> None:
    """Copy tensors of rank `root` to all ranks, in place.

    Args:
        tensors: Dense, on the CPU or GPUs, of any dtype; the same shapes and dtypes in the same
            order on every rank, and on devices of the same kinds.
        comm: The ranks.
        root: The rank to copy from.

    Raises:
        ConfigError: Not tensors; on all ranks.
        BufferMismatchError: The ranks passed other tensors, or another `root`; on all ranks.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    tensors = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    with same_on_all(comm, "broadcast_parameters", error=BufferMismatchError,
                     remedy="pass the same tensors, in the same order, on every rank") as same:
        same["root"] = whole_number("root", root, 0, comm.size - 1)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"rank {comm.rank}: expected tensors, got a {type(tensor).__name__}; pass a "
                    f"list of them, as model.state_dict().values()")
        same["tensors"] = [f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
                           for tensor in tensors]
    copy_from(root, tensors, comm)


def copy_from(root: int, tensors: Iterable[torch.Tensor], comm: Communicator) -> None:
    """Copy tensors of rank `root`, of which all ranks are known to have the same, to all ranks.

    Collective: yes. Blocking: yes.
    """
    tensors = list(tensors)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for on_one_device in by_device.values():
        for fused in _fused(on_one_device):
            _broadcast(fused, comm, root)
    # On all ranks alike, however they were written.
    torch.autograd.graph.increment_version(tensors)


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
    """Copy tensors as one vector of bytes; a single contiguous tensor is sent as it is."""
    with torch.no_grad():
        parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        comm.broadcast(flat, root=root)
        if comm.rank == root:
            return
        if len(parts) > 1:
            for part, received in zip(parts, flat.split([part.nbytes for part in parts])):
                part.copy_(received)
        for tensor, part in zip(tensors, parts):
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer,
                              comm: Communicator | None = None, *, root: int = 0) -> None:
    """Copy the state of rank `root`'s optimizer (momenta, step counts, settings) to all ranks.

    Args:
        optimizer: Of the same parameters, in the same groups, on every rank.
        comm: The ranks.
        root: The rank to copy from.

    Raises:
        ConfigError: Not an optimizer, or not of the same class and groups on all ranks; on all.

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
    # In host memory: load_state_dict copies them to where the parameters are.
    state = _changed(optimizer.state_dict(), torch.Tensor.cpu) if comm.rank == root else None
    # Tensors are sent separately: pickled, each would be in memory three times.
    outline = comm.broadcast_object(
        _changed(state, functools.partial(torch.empty_like, device="meta")), root=root)
    if comm.rank != root:
        state = _changed(outline, functools.partial(torch.empty_like, device="cpu"))
    copy_from(root, (x for _, x in leaves(state) if isinstance(x, torch.Tensor)), comm)
    if comm.rank != root:
        optimizer.load_state_dict(state)


def _changed(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a pytree with other tensors."""
    return mapped(state, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def replicated_parts(module: nn.Module, stepped: Iterable[Optimizer],
                     watched: Mapping[str, Any]) -> Iterator[Replicated]:
    """Yield what should be equal on all ranks: parameters, optimizers' state, watched tensors.

    Args:
        module: Its parameters; for each, the state in the optimizer that updated it last.
        stepped: Optimizers in the order of their last steps.
        watched: Nests of tensors by name.
    """
    seen: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if not isinstance(x, torch.Tensor) or id(x) in seen:
            return None
        if x.device.type not in DEVICE_TYPES or x.layout is not torch.strided:
            return None
        seen.add(id(x))
        return Replicated(name, functools.partial(TensorBuffers(staged=True).raw, x),
                          functools.partial(_write, x))

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
                # Only the settings of the group.
                seen.update(map(id, group["params"]))
                yield from replicated_in(
                    group, f"{type(optimizer).__name__}[{names[first]!r}, ...]", leaf)
    for name, nest in watched.items():
        yield from replicated_in(nest, name, leaf)


def _write(tensor: torch.Tensor, raw: Any) -> None:
    # `data`, since no user has written here, which NodeWeights would take it for.
    tensor.data.copy_(torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape))
