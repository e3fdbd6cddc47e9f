"""NumPy arrays in Horovod's operations."""

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .. import ConfigError
from ..provisional import Array, Schedule, memory

T = TypeVar("T")


def scale(x: Array, factor: float, divisor: int = 1) -> None:
    """Multiply a vector, in place, and divide it; integers are rounded toward zero."""
    if factor == 1 and divisor == 1:
        return
    if x.dtype.kind in "iu" and x.itemsize == 8 and factor == 1:
        # Exact, unlike float64 beyond 2**53.
        x -= np.fmod(x, divisor)
        x //= divisor
    elif x.dtype.kind in "iub":
        x[...] = np.trunc(x.astype(np.float64) * factor / divisor)
    elif x.itemsize == 2:
        x[...] = x.astype(np.float32) * np.float32(factor / divisor)
    else:
        np.multiply(x, x.dtype.type(factor / divisor), out=x)


class ArrayBuffers:
    """Views NumPy arrays as vectors in C order, for one operation; `staged` has no effect.

    Arrays in another order are copied, and copied back if the operation writes them.
    """

    stream = None

    def __init__(self, own_device: object = None, *, staged: bool = False) -> None:
        self._copies: list[tuple[Array, Array]] = []

    def numbers(self, x: Array, *, written: bool = False) -> Array:
        """Return an array's elements as a vector."""
        if x.flags.c_contiguous:
            return x.reshape(-1)
        copy = np.ascontiguousarray(x)
        if written:
            self._copies.append((x, copy))
        return copy.reshape(-1)

    def raw(self, x: Array, *, written: bool = False) -> Array:
        """Return an array's bytes as a vector."""
        return self.numbers(x, written=written).view(np.uint8)

    def settled(self, schedule: Schedule[T]) -> Schedule[T]:
        """Run a schedule, then copy results to the user's arrays."""
        result = yield from schedule
        for x, copy in self._copies:
            np.copyto(x, copy)
        return result


class NumPyArrays:
    """Functions that operations need from NumPy; see requests.ArrayPackage."""

    buffers = ArrayBuffers
    dtype_name = staticmethod(memory.dtype_name)
    scale = staticmethod(scale)

    def array(self, x: Any, *, written: bool = False) -> Array:
        """Return an argument as an array without a mask, in any memory order.

        Raises ConfigError if the array is masked, or is `written` and cannot take a result.
        """
        if type(x) is not np.ndarray:
            if written or isinstance(x, np.ndarray):
                memory.refuse_unusable(x, writeable=written)
            x = np.asarray(x)
        array: Array = x
        if written and not (array.flags.writeable and array.flags.c_contiguous):
            memory.refuse_unusable(array, writeable=True)
            if memory.may_overlap(array.shape, array.strides, array.itemsize):
                raise ConfigError(
                    f"an array of shape {array.shape} and strides {array.strides}, whose elements "
                    f"may share memory: it cannot take a result; pass x.copy()")
        return array

    def device(self, x: Array) -> str:
        """Return "" for host memory."""
        return ""

    def copy(self, x: Array) -> Array:
        """Return a contiguous copy of an array."""
        return np.array(x, order="C")

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        """Return an array of another shape, with the dtype of `like`."""
        return np.empty(shape, like.dtype)

    def zeros(self, dtype: str, shape: Sequence[int], device: str) -> Array:
        """Return zeros."""
        return np.zeros(shape, dtype)

    def to_bytes(self, x: Array) -> Array:
        """Return an array's bytes."""
        return ArrayBuffers().raw(x)

    def from_bytes(self, raw: Array, shape: Sequence[int], like: Array) -> Array:
        """Return bytes as an array with the dtype of `like`."""
        return raw.view(like.dtype).reshape(shape)

    def splits(self, given: Any) -> list[int]:
        """Return the number of rows for each rank as a list."""
        return [*map(operator.index, given)]

    def counts(self, rows: Array, given: Any) -> Array:
        """Return the number of rows from each rank."""
        return rows.astype(np.int32)

    def views(self, vector: Array, arrays: Sequence[Array]) -> list[Array]:
        """Return views of consecutive parts of a vector, in the shapes of arrays."""
        bounds = np.cumsum([0, *(x.size for x in arrays)]).tolist()
        return [part.reshape(x.shape) for part, x in zip(memory.cut(vector, bounds), arrays)]

    def copy_all(self, outs: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Copy arrays to other arrays."""
        for out, x in zip(outs, arrays):
            np.copyto(out, x)
