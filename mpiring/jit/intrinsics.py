"""LLVM operations that compiled functions need and numba does not provide.

This module imports numba, so `cache` imports it only to compile. Addresses are int64.
"""

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils


_WORD = ir.IntType(64)
# Number of bytes of a cache line.
LINE_BYTES = 64

# Function of the C library, which every process has.
give_way = types.ExternalFunction("sched_yield", types.int32())


def inlined(function: Callable[..., Any]) -> Any:
    """Return a function for compiled code, which the compiler inlines."""
    return numba.njit(error_model="numpy", forceinline=True)(function)


def pointer_to(dtype: "np.dtype[Any]") -> Any:
    """Return a function that converts an address to a pointer to numbers."""
    kind = types.CPointer(numba.from_dtype(dtype))

    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))
        return kind(types.int64), generate

    return numba.extending.intrinsic(pointer)


class _Struct(types.Record):  # type: ignore[misc]
    """A record whose fields may be pointers, for which NumPy has no dtype."""

    # numba asks only for its size, which it does not use for a pointer to the record.
    dtype = np.dtype(np.void)


numba.extending.register_model(_Struct)(numba.extending.models.RecordModel)


def struct_at(words: Sequence[str], arrays: Sequence[str]) -> Any:
    """Return a function that converts an address to a structure, whose fields have 8 bytes each.

    The fields are words, then the addresses of arrays of words.
    """
    kinds = [(name, types.int64) for name in words]
    kinds += [(name, types.CPointer(types.int64)) for name in arrays]
    kind = _Struct([(name, {"type": of_field, "offset": 8 * i, "alignment": 8})
                    for i, (name, of_field) in enumerate(kinds)], 8 * len(kinds), aligned=True)

    def struct(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))
        return kind(types.int64), generate

    return numba.extending.intrinsic(struct)


@numba.extending.intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Load a word; later memory operations of this thread are not moved before the load."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _WORD.as_pointer()), "acquire", 8)
    return types.int64(types.int64), generate


@numba.extending.intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Store a word; earlier memory operations of this thread are not moved after the store."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(
            values[1], builder.inttoptr(values[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), generate


@numba.extending.intrinsic
def add_atomic(typing: Any, address: Any, value: Any) -> Any:
    """Add to a word atomically; return its previous value."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw(
            "add", builder.inttoptr(values[0], _WORD.as_pointer()), values[1], "monotonic")
    return types.int64(types.int64, types.int64), generate


@numba.extending.intrinsic
def relax(typing: Any) -> Any:
    """Tell the processor that this loop waits."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = ir.IntType(32)
        if platform.machine() == "x86_64":
            _call(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []), [])
        elif platform.machine() == "aarch64":
            _call(builder, "llvm.aarch64.hint", ir.FunctionType(ir.VoidType(), [number]),
                  [ir.Constant(number, 1)])
        return context.get_dummy_value()
    return types.void(), generate


@numba.extending.intrinsic
def monotonic_ns(typing: Any) -> Any:
    """Return the time of CLOCK_MONOTONIC in ns."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number, parts = ir.IntType(32), cgutils.alloca_once(builder, _WORD, 2)
        _call(builder, "clock_gettime", ir.FunctionType(number, [number, parts.type]),
              [ir.Constant(number, time.CLOCK_MONOTONIC), parts])
        seconds, ns = (builder.load(cgutils.gep(builder, parts, i)) for i in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(_WORD, 1_000_000_000)), ns)
    return types.int64(), generate


@numba.extending.intrinsic
def opaque(typing: Any, value: Any) -> Any:
    """Return a word unchanged, but make its value unknown to the compiler."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.asm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0", values, True)
    return types.int64(types.int64), generate


def _call(builder: Any, name: str, kind: Any, values: list[Any]) -> None:
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


@numba.extending.intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes that do not overlap."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(values[0], byte),
                           builder.inttoptr(values[1], byte), values[2], 1)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64), generate


@numba.extending.intrinsic
def stream_line(typing: Any, target: Any, source: Any) -> Any:
    """Copy a cache line to an aligned address, around the caches."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = ir.VectorType(_WORD, LINE_BYTES // 16)
        kind = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for offset in (0, LINE_BYTES // 2):
            to, of = (builder.inttoptr(builder.add(value, ir.Constant(_WORD, offset)),
                                       half.as_pointer()) for value in values)
            builder.store(builder.load(of, align=1), to, align=LINE_BYTES // 2).set_metadata(
                "nontemporal", kind)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), generate


@numba.extending.intrinsic
def end_stream(typing: Any) -> Any:
    """Make copies around the caches visible before later stores of this thread."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() == "x86_64":
            _call(builder, "llvm.x86.sse.sfence", ir.FunctionType(ir.VoidType(), []), [])
        return context.get_dummy_value()
    return types.void(), generate


def conversions(name: str) -> tuple[Any, Any]:
    """Return functions that convert the bits of "float16" or "bfloat16" to float32, and back."""
    return (_widen_half, _narrow_half) if name == "float16" else (_widen_bfloat, _narrow_bfloat)


@numba.njit
def _widen_bfloat(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


@numba.njit
def _narrow_bfloat(x: Any) -> Any:
    # Without np.uint32 numba would compute in 64 bits, at half the speed.
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> 16) & 1)
    rounded = np.uint32(np.uint32(bits + np.uint32(odd + 0x7fff)) >> 16)
    quiet_nan = np.uint32(np.uint32(bits >> 16) | 0x40)
    return np.uint16(rounded if x == x else quiet_nan)


# Functions for two bfloat16 numbers in a 32-bit word, which take two thirds of the time of two
# conversions.

@inlined
def first_bfloat(word: Any) -> Any:
    """Return the float32 of the lower half of a uint32."""
    return np.uint32(word << np.uint32(16)).view(np.float32)


@inlined
def second_bfloat(word: Any) -> Any:
    """Return the float32 of the upper half of a uint32."""
    return np.uint32(word & np.uint32(0xffff0000)).view(np.float32)


@inlined
def two_bfloats(x: Any, y: Any) -> Any:
    """Return a uint32 of two bfloat16 sums or means, each rounded as by `conversions`.

    Unlike NaNs in general, the NaNs of such sums have a lower half that causes no carry.
    """
    first, second = _rounded(x), _rounded(y)
    return np.uint32(np.uint32(first >> np.uint32(16)) | np.uint32(second & np.uint32(0xffff0000)))


@inlined
def _rounded(x: Any) -> Any:
    """Return a uint32 whose upper half is the nearest bfloat16, ties to even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(bits + np.uint32(odd + np.uint32(0x7fff)))


@numba.extending.intrinsic
def _widen_half(typing: Any, bits: Any) -> Any:
    """Convert with the processor's instruction."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _refuse_without_instructions(context)
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())
    return types.float32(types.uint16), generate


@numba.extending.intrinsic
def _narrow_half(typing: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))
    return types.uint16(types.float32), generate


def _refuse_without_instructions(context: Any) -> None:
    """Raise if LLVM would call a library function, which may be missing."""
    target, _, features = context.codegen().magic_tuple()
    if target.startswith("x86") and "+f16c" not in features.split(","):
        raise numba.errors.UnsupportedError("the processor does not convert float16 (F16C)")
