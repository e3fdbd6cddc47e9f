"""Shows the back end's operations to torch.profiler, and to an observer that it is given.

PyTorch's dispatcher records the operations of back ends in C++. The names of events, the positions
of tensors, and the keys of metadata are those of PyTorch 2.13, for the tools that read its traces.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from .private import is_profiling, record
from .tensors import tensors_in

_Method = TypeVar("_Method", bound=Callable[..., Any])


def recorded(name: str, lists: int = 1) -> Callable[[_Method], _Method]:
    """Decorate a method of ProcessGroup that submits an operation, to open an event around it.

    The event of an operation that returns when it is complete is as long as the operation. Its name
    is a function of PyTorch's dispatcher. The first `lists` arguments of the method are tensors or
    lists of tensors.
    """
    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_profiling():
                return method(self, *args, **kwargs)
            tensors = args[:lists]
            with record(name, [*tensors, self.getGroupName()], _metadata(self, name, tensors)):
                return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def waiting() -> AbstractContextManager[Any]:
    """Return a context in which profilers see that this thread waits for an operation."""
    return record("mpiring:wait") if is_profiling() else nullcontext()


def _metadata(group: Any, name: str, tensors: Sequence[Any]) -> dict[str, Any]:
    """Return what Kineto writes for operations of NCCL."""
    outputs, inputs = ([*tensors_in([x])] for x in (tensors[:1], tensors[-1:]))
    values = {"Collective name": name.removeprefix("c10d::").rstrip("_"),
              "In msg nelems": _count(inputs), "Out msg nelems": _count(outputs),
              "Group size": group.size(), "Process Group Name": group.getGroupName(),
              "Process Group Description": group.getGroupDesc()}
    if inputs:
        values["dtype"] = inputs[0].type().rpartition(".")[2].removesuffix("Tensor")
    return values


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() for x in tensors)
