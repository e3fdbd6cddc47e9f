"""Horovod's operations on PyTorch tensors, with gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..operations import Operations
from ..ops import Average
from ..process_sets import ProcessSet
from ..requests import NamedRequest
from ..world import global_process_set
from .arrays import TensorArrays

Tensors = Sequence[Any]


class _Operation(torch.autograd.Function):
    """An operation with functions that run it and compute its gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensors], Tensors],
                backward: Callable[[Tensors], Tensors], *tensors: torch.Tensor) -> Any:
        ctx.gradients = backward
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.gradients([grad.contiguous() for grad in grads])


class TensorOperations(Operations):
    """Horovod's functions on tensors."""

    def __init__(self) -> None:
        super().__init__(TensorArrays())

    def _submit(self, kind: str, tensors: Tensors, *arguments: Any, **named: Any) -> NamedRequest:
        tensors = list(tensors)
        request = super()._submit(kind, tensors, *arguments, **named)
        if request.in_place:
            # Unlike comm.allreduce, Horovod writes to parameters while gradients are recorded.
            torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
        return request

    def _differentiable(self, run: Callable[[Tensors], Tensors],
                        backward: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _Operation.apply(run, backward, *tensors)
        return run(tensors)

    def sparse_allreduce_async(self, tensor: torch.Tensor, name: str, op: int = Average,
                               process_set: ProcessSet = global_process_set,
                               ) -> Callable[[], torch.Tensor]:
        """Start to add up sparse tensors of all ranks.

        Args:
            tensor: COO tensor.
            name: Name of the operation, the same on all ranks.
            op: Reduction, Average or Sum.
            process_set: Ranks whose tensors are added.

        Returns:
            A function that waits, and returns the sparse sum or mean.

        Collective: yes. Blocking: no.
        """
        parts = tensor.detach().coalesce()
        indices = self.allgather_async(parts.indices().t().contiguous(), f"{name}.indices",
                                       process_set)
        values = self.allgather_async(parts.values(), f"{name}.values", process_set)

        def result() -> torch.Tensor:
            total = torch.sparse_coo_tensor(
                self.synchronize(indices).t(), self.synchronize(values), tensor.shape,
                device=tensor.device, check_invariants=False).coalesce()
            return total / process_set.comm.size if op == Average else total

        return result
