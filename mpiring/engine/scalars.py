"""Runs collectives on scalars: numbers of Python and NumPy, whose results are new scalars."""

from typing import Any

import numpy as np

from ..errors import ConfigError
from ..memory.arrays import Array
from ..operations.agreement import op_named
from ..transport.base import Schedule
from .handle import Handle
from .prepared import Prepared

# Types of scalars; a bool is an int.
SCALARS = int, float, complex, np.generic
_REMEDIES = {"allgather": "allgather_object(x) returns the list of all ranks' values",
             "reduce_scatter": "allreduce(x) returns the result on every rank"}


def array_of_scalar(x: Any, kind: str, option: Any, rank: int, size: int) -> Array:
    """Return a scalar's value as a zero-dimensional array, for a collective with an op or a root.

    The dtype of Python's numbers is bool, int64, float64 or complex128.

    Raises ConfigError if the collective needs slices, or an integer result might not fit the dtype.
    """
    if kind in _REMEDIES:
        raise ConfigError(f"rank {rank}: {kind} of a {type(x).__name__}, which has no slices; "
                          f"{_REMEDIES[kind]}")
    is_int = isinstance(x, int) and not isinstance(x, bool)
    dtype = np.dtype(np.int64) if is_int else np.asarray(x).dtype
    if dtype.kind in "iu":
        op = op_named(option, dtype) if kind == "allreduce" else ""
        value, limits = int(x), range(np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
        largest = value * size if op == "sum" else value
        if largest not in limits or op == "prod" and abs(value) ** size not in limits:
            bits = value.bit_length()
            raise ConfigError(
                f"rank {rank}: {kind} of {value if bits <= 64 else f'an integer of {bits} bits'}: "
                f"the {op or 'value'} may exceed {dtype}; " + (
                    "pass float(x), or combine what allgather_object(x) returns" if op else
                    "use broadcast_object(x)"))
    return np.array(x, dtype)


class OnScalar:
    """A collective on the value of a scalar.

    The result is a NumPy scalar of the same dtype if the scalar is one, otherwise a Python number.

    Args:
        prepared: Collective on the array of `array_of_scalar`.
        x: The scalar.
    """

    def __init__(self, prepared: Prepared, x: Any) -> None:
        self._prepared, self._is_numpy = prepared, isinstance(x, np.generic)

    def run(self, vector: Array) -> Any:
        """Run it, and return the result; see Prepared."""
        self._prepared.run(vector)
        return self._result(vector)

    def start(self, vector: Array, x: Any) -> Handle[Any]:
        """Start it, and return a handle whose `wait` returns the result; see Prepared."""
        return self._prepared.start(vector, vector, finish=self._finished)

    def _finished(self, vector: Array, schedule: Schedule[Any]) -> Schedule[Any]:
        yield from schedule
        return self._result(vector)

    def _result(self, vector: Array) -> Any:
        return vector[0] if self._is_numpy else vector[0].item()
