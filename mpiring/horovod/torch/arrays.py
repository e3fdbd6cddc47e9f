"""PyTorch tensors in Horovod's operations."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ... import ConfigError
from ...provisional import Array, adapter, gpu, memory
from ..arrays import scale


class TensorArrays:
    """Functions that operations need from PyTorch; see requests.ArrayPackage."""

    buffers = adapter.vectors.TensorBuffers
    copy_all = staticmethod(adapter.vectors.TensorBuffers.copy_all)

    def array(self, x: Any, *, written: bool = False) -> torch.Tensor:
        """Return an argument, which must be a tensor, in any memory order.

        Raises ValueError if it is not a tensor, or is a tensor of a class without plain memory.
        Raises ConfigError if it is `written` and cannot take a result.
        """
        if not isinstance(x, torch.Tensor) or (
                type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__):
            raise ValueError(f"a {type(x).__name__}: expected a torch.Tensor")
        if written and x.layout is torch.strided:
            adapter.vectors.refuse_overlap(x)
            if x.is_conj() or x.is_neg():
                raise ConfigError("a view that conjugates or negates another tensor cannot take a "
                                  "result; pass x.resolve_conj().resolve_neg()")
        return x

    def dtype_name(self, dtype: torch.dtype) -> str:
        """Return the name of a dtype in NumPy."""
        return str(dtype).removeprefix("torch.")

    def device(self, x: torch.Tensor) -> str:
        """Return "" for a tensor in host memory, otherwise the type of its device."""
        if x.layout is not torch.strided:
            raise ValueError(f"a {x.layout} tensor: expected a dense one; for gradients of "
                             f"embeddings there is sparse_allreduce_async")
        # Same result as `is_gpu_tensor`, in a third of the time.
        if x.is_cpu and "cpu" not in gpu.OPENERS:
            return ""
        return x.device.type

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor."""
        return x.detach().clone(memory_format=torch.contiguous_format)

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of another shape, with the dtype and device of `like`."""
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def zeros(self, dtype: str, shape: Sequence[int], device: str) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device or "cpu")

    def scale(self, x: torch.Tensor, factor: float, divisor: int = 1) -> None:
        """Multiply a tensor, in place, and divide it; integers are rounded toward zero."""
        if factor == 1 and divisor == 1:
            return
        if not gpu.is_gpu_tensor(x) and x.is_contiguous():
            scale(memory.array_of(x), factor, divisor)
            return
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                x.mul_(factor / divisor)
            elif factor == 1 and x.itemsize == 8:
                # Exact, unlike float64 beyond 2**53.
                x.copy_(x.div(divisor, rounding_mode="trunc"))
            else:
                x.copy_(x.double().mul(factor).div(divisor).trunc())

    def to_bytes(self, x: torch.Tensor) -> Array:
        """Return a tensor's bytes, in host memory."""
        return adapter.vectors.TensorBuffers(staged=True).raw(x)

    def from_bytes(self, raw: Array, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return bytes as a tensor, with the dtype and device of `like`."""
        return adapter.tensors.tensor_of_bytes(raw, like.dtype, shape).to(like.device)

    def splits(self, given: Any) -> list[int]:
        """Return the number of rows for each rank as a list."""
        if isinstance(given, torch.Tensor):
            if given.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"splits of {given.dtype}: expected torch.int32 or torch.int64")
            given = given.tolist()
        return [*map(operator.index, given)]

    def counts(self, rows: Array, given: Any) -> torch.Tensor:
        """Return the number of rows from each rank, with dtype and device of the user's splits."""
        counts = torch.from_numpy(rows)
        return counts.to(given) if isinstance(given, torch.Tensor) else counts.to(torch.int32)

    def views(self, vector: Array, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return views of consecutive parts of a vector, in the shapes of tensors."""
        parts = adapter.tensors.tensor_of(vector).split_with_sizes([x.numel() for x in tensors])
        return [part if x.dim() == 1 else part.view(x.shape) for part, x in zip(parts, tensors)]
