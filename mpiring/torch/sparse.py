"""Sums sparse tensors over ranks by gathering their nonzero elements, in host memory."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import ConfigError, GradientError
from ..memory.arrays import is_finite
from ..memory.tensors import array_of
from ..operations.agreement import Call
from ..operations.collectives import Collectives
from ..training.averager import Averager
from ..transport.base import Schedule
from .private import is_view, values_of
from .tensors import tensor_of_bytes
from .vectors import TensorBuffers, Op, quotient


def allreduce(tensor: torch.Tensor, op: Op) -> Callable[[Collectives], Schedule[None]]:
    """Return a function that builds the schedule to sum a sparse tensor over ranks, in place.

    The COO tensor may have any number of sparse and dense dimensions. Raises ConfigError if it is a
    view or of another layout, or if the op is neither a sum nor a mean.
    """
    if tensor.layout is not torch.sparse_coo or op.name not in ("sum", "mean"):
        raise ConfigError(f"{op.name} of a {tensor.layout} tensor: expected a sum or mean of "
                          f"torch.sparse_coo")
    if is_view(tensor):
        # A copy into a view does not change the tensor that the user holds.
        raise ConfigError("a sparse tensor that is a view of another tensor, as PyTorch makes of "
                          "complex tensors, cannot take a result; pass y = x.clone(), or for "
                          "complex numbers y = torch.view_as_real(x).clone()")
    addend = tensor.detach() if op.factor is None else tensor.detach() * op.factor
    addend = addend.coalesce()
    indices, values = addend.indices().T.contiguous(), addend.values()
    buffers = TensorBuffers(staged=True)
    raw_indices, raw_values = buffers.raw(indices), buffers.raw(values)
    # Either may have rows without bytes.
    row_bytes = sum(x.itemsize * math.prod(x.shape[1:]) for x in (indices, values))

    def schedule(collectives: Collectives) -> Schedule[None]:
        all_indices = np.concatenate((yield from collectives.allgather_bytes(raw_indices)))
        all_values = np.concatenate((yield from collectives.allgather_bytes(raw_values)))
        rows = (all_indices.size + all_values.size) // max(1, row_bytes)
        total = torch.sparse_coo_tensor(
            tensor_of_bytes(all_indices, indices.dtype, (rows, *indices.shape[1:])).T,
            tensor_of_bytes(all_values, values.dtype, (rows, *values.shape[1:])), addend.shape,
            device="cpu", check_invariants=False).coalesce()
        # Not detached, because a copy into a detached sparse tensor does not change `tensor`.
        yield from buffers.copied_back(
            [(tensor, quotient(total, op.divisor) if op.divisor else
              total / collectives.size if op.name == "mean" else total)])

    return schedule


def sparse_parameters(module: nn.Module) -> set[Parameter]:
    """Return the parameters whose gradients will be sparse."""
    return {layer.weight for layer in module.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse}


class SparseGradients:
    """Averages sparse gradients when all gradients of a step are complete.

    The averager of dense gradients counts steps and costs. In the last complete step, `finite` is
    true on all ranks if all means are finite; `nonfinite` names this rank's nonfinite gradients.
    """

    def __init__(self, parameters: Mapping[str, Parameter], comm: Communicator,
                 dense: Averager) -> None:
        self.missing = list(parameters)
        self.finite = True
        self.nonfinite: list[str] = []
        self._parameters = dict(parameters)
        self._weights: dict[str, float] = {}
        self._comm, self._dense = comm, dense

    def ready(self, name: str, weight: float) -> None:
        """Mark a gradient as complete; it may be None on this rank.

        A weight of 0 means that the gradient does not count. Raises GradientError if it is dense.
        """
        grad = self._parameters[name].grad
        if grad is not None and grad.layout is not torch.sparse_coo:
            raise GradientError(
                f"rank {self._comm.rank}: the gradient of {name} is dense, although its layer has "
                f"sparse=True; a weight that is used elsewhere too needs sparse=False")
        self.missing.remove(name)
        self._weights[name] = weight

    def wait(self) -> None:
        """Return when each gradient is the mean, or None on all ranks. Collective, blocking."""
        handles = []
        self.finite, self.nonfinite = True, []
        for name, p in self._parameters.items():
            weight = self._weights[name]
            gradient = _empty_gradient(p) if p.grad is None or weight == 0 else p.grad * weight
            if not _is_finite(gradient):
                self.nonfinite.append(name)
            call = Call("sparse gradient",
                        f"{p.dtype} {tuple(p.shape)} in {self._dense.step_label}", name)
            handles.append(
                (p, gradient, self._comm.submit(call, allreduce(gradient, Op("mean")))))
        for p, gradient, handle in handles:
            handle.wait()
            self._dense.costs.append(handle.flight)
            self.finite = self.finite and _is_finite(gradient)
            if p.grad is not None or len(values_of(gradient)):
                p.grad = gradient
        self.missing = list(self._parameters)


def _is_finite(gradient: torch.Tensor) -> bool:
    return is_finite(array_of(values_of(gradient).contiguous().cpu()))


def _empty_gradient(p: Parameter) -> torch.Tensor:
    # Gradients of embeddings have one sparse dimension.
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=p.device),
        p.detach().new_empty((0, *p.shape[1:])), p.shape, device=p.device, check_invariants=False)
