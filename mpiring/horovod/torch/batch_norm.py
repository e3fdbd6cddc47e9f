"""Batch normalization over the batches of all ranks, on any device."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..world import global_process_set

# Base class of batch normalization with any number of dimensions.
AnyBatchNorm: Any = torch.nn.SyncBatchNorm.__base__


class SyncBatchNorm(AnyBatchNorm):
    """Normalizes each channel by the mean and variance over the batches of all ranks.

    Use it instead of PyTorch's `BatchNorm1d`, `2d` and `3d` if one rank's batch is too short for
    statistics. Batches may differ in length. In evaluation it behaves like the PyTorch classes.

    Args:
        num_features: Number of channels C of inputs of shape (N, C, ...).
        eps: Term in the denominator, for stability.
        momentum: Weight of new values in the running statistics; None for a cumulative average.
        affine: If true, the module has a weight and a bias per channel.
        track_running_stats: If true, the module keeps running statistics for evaluation.
        device, dtype: Device and dtype of the parameters and statistics.
        bias: If true, an affine module has a bias.

    Collective: yes, in training. Blocking: yes, in training.

    Sources: Ioffe and Szegedy 2015, section 3. Chan, Golub and LeVeque 1979, for the combination of
    means and variances.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(f"expected floating input of {self.num_features} channels, got "
                             f"{input.dtype} of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of the same shape.

        Raises ValueError if the shape or dtype is wrong, or all ranks together have at most one
        value per channel.
        """
        # A trained model must also run without a call of `init`.
        if not self.training or global_process_set.comm.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return _Normalize.apply(input, self.weight, self.bias, self.eps, factor,
                                self.running_mean, self.running_var)


class _Normalize(torch.autograd.Function):
    """Normalizes by the statistics of all ranks; sums are computed at least in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                eps: float, factor: float | None, running_mean: Tensor | None,
                running_var: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x.to(wide).transpose(0, 1).flatten(1)
        count = rows.shape[1]
        # The maximum avoids a NaN for an empty batch.
        mean = rows.sum(1) / max(count, 1)
        deviation = (rows - mean[:, None]).square().sum(1)
        local_statistics = torch.stack([torch.full_like(mean, count), mean, deviation])
        comm = global_process_set.arrive("SyncBatchNorm")
        gathered = local_statistics.new_empty(comm.size, *local_statistics.shape)
        gathered[comm.rank] = local_statistics
        counts, means, deviations = comm.allgather(gathered).unbind(1)
        total = counts.sum(0)
        if float(total[0]) <= 1:
            raise ValueError(f"rank {comm.rank}: expected more than 1 value per channel over all "
                             f"ranks when training, got input size {tuple(x.shape)}")
        mean = (counts * means).sum(0) / total
        variance = (deviations + counts * (means - mean).square()).sum(0) / total
        inverse = (variance + eps).rsqrt()
        if running_mean is not None and running_var is not None and factor is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            unbiased = variance * total / (total - 1)
            running_var.lerp_(unbiased.to(running_var.dtype), factor)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        y = (x.to(wide) - _as(mean, x)) * _as(inverse, x)
        if weight is not None:
            y = y * _as(weight.to(wide), x)
        if bias is not None:
            y = y + _as(bias.to(wide), x)
        return y.to(x.dtype)

    @staticmethod
    # The sum over ranks is not recorded, and neither is the dependence of the mean on x.
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse, total = ctx.saved_tensors
        dy_wide, deviation = dy.to(mean.dtype), x.to(mean.dtype) - _as(mean, x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        local_sums = torch.stack([dy_wide.sum(axes), (dy_wide * deviation).sum(axes)])
        dw, db = local_sums[1] * inverse, local_sums[0]
        sums = local_sums.clone()
        global_process_set.arrive("SyncBatchNorm.backward").allreduce(sums)
        sum_dy, sum_dy_deviation = sums / total
        dx = dy_wide - _as(sum_dy, x) - deviation * _as(sum_dy_deviation * inverse.square(), x)
        dx = dx * _as(inverse if weight is None else inverse * weight.to(inverse.dtype), x)
        _, wants_dw, wants_db, *_ = ctx.needs_input_grad
        return (dx.to(x.dtype), dw.to(weight.dtype) if wants_dw else None,
                db if wants_db else None, *[None] * 4)


def _as(channels: Tensor, like: Tensor) -> Tensor:
    """Return a value per channel in a shape that combines with (N, C, ...)."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
