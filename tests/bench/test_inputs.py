"""Tests that inputs never overflow, and that a wrong sum is found wherever it is."""

import numpy as np
import pytest

from mpiring import ConfigError
from mpiring.bench import inputs


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", inputs.DTYPES)
def test_a_series_of_sums_stays_finite(name, size):
    x = np.empty(3, inputs.dtype_of(name))
    inputs.fill(x)
    assert (x > 0).all()
    for _ in range(inputs.series_length(x.dtype, size)):
        before = x.astype(np.float64)
        x *= x.dtype.type(size)
        after = x.astype(np.float64)
        assert np.isfinite(after).all() and (after >= before).all()
    assert inputs.series_length(x.dtype, size) >= 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("name", inputs.DTYPES)
def test_right_sums_are_right_and_wrong_ones_wrong(name, size):
    ranks = [np.empty(50, inputs.dtype_of(name)) for _ in range(size)]
    for rank, x in enumerate(ranks):
        inputs.fill_to_check(x, rank)
    total = ranks[0].copy()
    for x in ranks[1:]:
        total += x
    assert inputs.first_wrong(total, size) is None
    # The last rank's addend is missing, in one place. (Among 64 it hides in bfloat16's rounding.)
    for place in (10, 49) if (name, size) != ("bfloat16", 64) else ():
        wrong = total.copy()
        wrong[place] -= ranks[-1][place]
        assert inputs.first_wrong(wrong, size) == place


def test_nan_is_wrong():
    x = np.empty(9, np.float32)
    inputs.fill_to_check(x, 0)
    x[4] = np.nan
    assert inputs.first_wrong(x, 1) == 4


def test_unknown_dtype():
    with pytest.raises(ConfigError, match="expected one of float16"):
        inputs.dtype_of("float8")
