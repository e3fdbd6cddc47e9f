"""Compression, for programs that import `horovod.torch.compression`."""

from ..compression import Compression, FP16Compressor, NoneCompressor

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]
