"""Compression of messages by Horovod's casts."""

from typing import Any


class NoneCompressor:
    """Sends arrays unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the message, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received message in the user's form."""
        return tensor


class FP16Compressor:
    """Sends floating-point arrays in 16 bits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the array, in 16 bits if it is floating-point, and its original dtype."""
        if hasattr(tensor, "is_floating_point"):
            return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype
        return tensor.astype("float16") if tensor.dtype.kind == "f" else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return an array in its original dtype."""
        if tensor.dtype == ctx:
            return tensor
        return tensor.to(ctx) if hasattr(tensor, "to") else tensor.astype(ctx)


class Compression:
    """Values of the argument `compression`: `none` or `fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
