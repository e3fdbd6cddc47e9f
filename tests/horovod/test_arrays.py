"""Checks the arithmetic on NumPy arrays."""

import numpy as np
import pytest

from mpiring.horovod.arrays import scale


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("divisor", [2, 7, 200])
def test_integers_are_rounded_toward_zero(dtype, divisor):
    limits = np.iinfo(dtype)
    values = [limits.min, limits.min + 1, limits.min // 3, 0, 5, limits.max]
    x = np.array(values, dtype)
    scale(x, 1.0, divisor)
    assert x.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]
