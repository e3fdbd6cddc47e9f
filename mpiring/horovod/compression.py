"""Compression of what travels, by the casts that Horovod's users know."""

from typing import Any


class NoneCompressor:
    """Sends arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return what has arrived as the user expects it."""
        return tensor


class FP16Compressor:
    """Sends floating-point arrays in 16 bits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return a floating-point array in 16 bits, others as they are; and the dtype."""
        if hasattr(tensor, "is_floating_point"):
            return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype
        return tensor.astype("float16") if tensor.dtype.kind == "f" else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return an array in the dtype that it had."""
        if tensor.dtype == ctx:
            return tensor
        return tensor.to(ctx) if hasattr(tensor, "to") else tensor.astype(ctx)


class Compression:
    """What `compression=` takes: `none`, or `fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
