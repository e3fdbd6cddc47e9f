"""Copies gradients into their buckets."""

import torch

from ..memory import streams

# A shorter one is not worth the call.
_LEAST_BYTES = 64 << 10


def copy(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient to where it lies in a bucket."""
    view.copy_(gradient)


def copy_past_caches(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Do as `copy`; a long gradient, in host memory, leaves the caches to others.

    PyTorch copies with all its threads; where these are several, they are faster.
    """
    nbytes = gradient.nbytes
    if (nbytes < _LEAST_BYTES or gradient.stride() != view.stride()
            or gradient.dtype is not view.dtype or not gradient.is_floating_point()
            or gradient.is_neg() or torch.get_num_threads() > 1
            or not streams.copy(view.data_ptr(), gradient.data_ptr(), nbytes)):
        view.copy_(gradient)
    else:
        torch.autograd.graph.increment_version(view)
