"""Gradients that no rank has as a whole: they say so where one of the whole is expected."""

from typing import Any

import torch

from ..errors import GradientError
from .private import without_subclasses


class ScatteredGradient(torch.Tensor):
    """Gradient of a parameter whose mean lies in slices, one per rank; see `Sharded`.

    Shape, dtype and device can be read. Anything else raises GradientError, where a plain tensor
    would be clipped, scaled or logged to no effect.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise GradientError for what would look at elements."""
        if getattr(func, "__name__", "") in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _refusal(func)

    def __repr__(self, **_: Any) -> str:
        return f"ScatteredGradient({self.dtype}, {tuple(self.shape)}: in slices, one per rank)"


# Attributes of PyTorch's tensors are functions of this name.
_HARMLESS = {"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point",
             "is_complex", "__hash__"}


class SliceGradient(torch.Tensor):
    """Gradient of one of this rank's slices, as `param_groups` of a Sharded optimizer has it.

    A plain tensor, but that its norm raises GradientError: other ranks have the rest, and would
    clip by another norm.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise GradientError for norms; results are plain tensors."""
        if getattr(func, "__name__", "") in _NORMS:
            raise _refusal(func)
        with without_subclasses():
            return func(*args, **(kwargs or {}))


_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm"}


def _refusal(func: Any) -> GradientError:
    return GradientError(
        f"{getattr(func, '__name__', func)} of a gradient that is in slices, one per rank "
        f"(Sharded): clip with optimizer.clip_grad_norm_(...), in Lightning by "
        f"configure_gradient_clipping; log optimizer.grad_norm(); unscale with "
        f"GradScaler.unscale_(optimizer)")


def placeholder(p: torch.Tensor) -> torch.Tensor:
    """Return what stands in for the gradient of `p`: no memory, whatever its shape."""
    nan = torch.full((), torch.nan, dtype=p.dtype, device=p.device)
    return nan.expand(p.shape).as_subclass(ScatteredGradient)
