"""All private functions of PyTorch that mpiring uses.

Verified with PyTorch 2.10, 2.13 and 2.15 by `tests/helpers/every_torch.py`. If a function is
missing, the import of `mpiring.torch` raises an error that names it, or a test of the code that
uses it fails.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad

# Handlers of `init_method`, by the scheme of its URL.
rendezvous_handlers: MutableMapping[str, Callable[..., Iterator[Any]]] = _rendezvous_handlers


def leave_recording_to(backend: str) -> None:
    """Tell PyTorch that a back end records its own operations.

    Since 2.15, PyTorch attaches its flight recorder to the groups of all other back ends. That
    raises an error for a group in Python, to which no back end in C++ belongs.
    """
    with_own_record: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    with_own_record.add(backend)


# Profilers

# Context of an event, given its name, inputs (tensors, lists of tensors, strings), and metadata by
# name. Without torch.profiler, it records nothing, not even for an ExecutionTraceObserver.
record: Any = torch._C._profiler._RecordFunctionFast


def is_profiling() -> bool:
    """Return whether torch.profiler runs."""
    enabled: bool = torch.autograd.profiler._is_profiler_enabled
    return enabled


# Backward passes

def current_pass() -> int:
    """Return the number of the backward pass that this thread is running; negative for none."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Call a function at the end of the backward pass that this thread is running.

    Functions are called in the order of registration. If the pass raises an error, PyTorch drops
    them. If no pass is running, the call raises RuntimeError.
    """
    Variable._execution_engine.queue_callback(callback)


def leaf_nodes(node: Any, parameters: Set[torch.Tensor]) -> list[Any]:
    """Return the leaves that `adds_to_gradients` needs to classify a pass through `node`.

    The result is the nearest leaf of one of `parameters`, which is found quickly; a pass may
    compute gradients of other leaves only. If a pass through `node` reaches no parameter, the
    result is all leaves.
    """
    leaves, seen, nodes = [], {node}, deque([node])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, _AccumulateGrad):
            if node.variable in parameters:
                return [node]
            leaves.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


def adds_to_gradients(leaves: list[Any]) -> bool:
    """Return whether the running pass adds to the gradients of all these leaves.

    `backward()` adds to the gradients of all leaves that it reaches, and `backward(inputs=[...])`
    to the gradients of these inputs only. `torch.autograd.grad` adds to none.
    """
    try:
        return bool(leaves) and all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:
        # Raised for a leaf whose derivative torch.autograd.grad will return.
        return False


# Tensors

def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor."""
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the number of in-place writes to each tensor."""
    return [tensor._version for tensor in tensors]


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another tensor."""
    return tensor._is_view()


def indices_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the indices of a COO tensor, which need not be coalesced."""
    return sparse._indices()


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the values of a COO tensor, which need not be coalesced."""
    return sparse._values()


def copy_all(outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to other tensors, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(list(outs), list(tensors))


def empty_shell(cls: Any, like: torch.Tensor) -> Any:
    """Return a tensor of a subclass without memory, with shape, dtype and device of another."""
    shell = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
    # Extensions in C++ would read from address 0.
    torch._C._set_throw_on_mutable_data_ptr(shell)
    return shell


def only_reads(operation: Any) -> bool:
    """Return whether an operation of ATen neither writes to a tensor nor returns a view of one."""
    return all(argument.alias_info is None for argument in operation._schema.arguments)


def without_subclasses() -> AbstractContextManager[None]:
    """Return a context in which subclasses of tensors behave as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


# Modules and optimizers


def parameters_of(module: torch.nn.Module) -> Any:
    """Return the mapping that holds a module's own parameters by name.

    PyTorch reads it for `module.weight`, `parameters()`, `state_dict()`, `to(...)` and
    `load_state_dict(...)`. In TorchScript it is not a dict.
    """
    return module._parameters


def set_parameters(module: torch.nn.Module, parameters: dict[str, Any]) -> None:
    """Replace the mapping that holds a module's own parameters."""
    module._parameters = parameters


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module runs as compiled code, which reads parameters by other means."""
    return (isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
            or module._compiled_call_impl is not None)


def run_state_hooks(optimizer: torch.optim.Optimizer, event: str, *state: Any) -> Any:
    """Call the user's hooks for an optimizer's state, and return the state after these hooks.

    `event` is "state_dict_pre", "state_dict_post", "load_state_dict_pre" or "load_state_dict_post".
    """
    for hook in getattr(optimizer, f"_optimizer_{event}_hooks").values():
        changed = hook(optimizer, *state)
        state = (changed,) if state and changed else state
    return state[0] if state else None
