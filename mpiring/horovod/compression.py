"""Horovod's compression of single tensors, for PyTorch tensors and NumPy arrays."""

from typing import Any

import numpy as np

from ..memory.tensors import is_tensor


class TensorCompressor:
    """Compresses a tensor before it is sent, and decompresses the result."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError("compress")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return a tensor as it was before `compress`."""
        raise NotImplementedError("decompress")


class NoneCompressor(TensorCompressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor


class FP16Compressor(TensorCompressor):
    """Sends floating tensors as float16, and others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16 if it is floating, and its dtype."""
        dtype = tensor.dtype
        if is_tensor(tensor):
            return tensor.half() if dtype.is_floating_point else tensor, dtype
        return tensor.astype(np.float16) if dtype.kind == "f" else tensor, dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx) if is_tensor(tensor) else tensor.astype(ctx, copy=False)


class Compression:
    """The compressions that functions and optimizers take by name."""

    none = NoneCompressor
    fp16 = FP16Compressor


# Horovod's name.
Compressor = TensorCompressor
