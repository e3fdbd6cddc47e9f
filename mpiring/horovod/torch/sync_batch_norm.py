"""SyncBatchNorm, for programs that import `horovod.torch.sync_batch_norm`."""

from .batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
