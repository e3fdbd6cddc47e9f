"""Checks the arithmetic on NumPy arrays, and which of them are accepted."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.horovod.arrays import NumPyArrays, scale
from mpiring.horovod.operations import Operations


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("divisor", [2, 7, 200])
def test_integers_are_rounded_toward_zero(dtype, divisor):
    limits = np.iinfo(dtype)
    values = [limits.min, limits.min + 1, limits.min // 3, 0, 5, limits.max]
    x = np.array(values, dtype)
    scale(x, 1.0, divisor)
    assert x.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]


def test_a_result_cannot_be_written_to_a_read_only_array():
    x = np.ones(3)
    x.flags.writeable = False
    operations, ranks = Operations(NumPyArrays()), SimpleNamespace(matcher=None)
    with pytest.raises(ValueError, match="read-only array, in place"):
        operations.allreduce_async_(x, process_set=ranks)
    # It is not looked for in other calls.
    with pytest.raises(AttributeError, match="submit"):
        operations.allreduce_async(x, process_set=ranks)
