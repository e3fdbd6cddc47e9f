"""Tests that inputs never overflow, and that a wrong sum is found wherever it is."""

import numpy as np
import pytest

from mpiring import ConfigError
from mpiring.tools.bench import inputs


def arrays(name, n, size):
    """Return what each rank has to begin with."""
    ranks = [np.empty(n, inputs.dtype_of(name)) for _ in range(size)]
    for rank, x in enumerate(ranks):
        inputs.fill(x, rank, size)
    return ranks


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", inputs.DTYPES)
def test_a_series_of_sums_stays_finite(name, size):
    x = arrays(name, 70_000, size)[-1]
    smallest = 1 if x.dtype.kind == "i" else 2.0**(-14 if name == "float16" else -126)
    assert (np.abs(x.astype(np.float64)) >= (0 if name == "float64" else smallest)).all()
    assert (x != 0).all()
    for _ in range(inputs.series_length(x.dtype, size)):
        before = np.abs(x.astype(np.float64))
        x *= x.dtype.type(size)
        after = np.abs(x.astype(np.float64))
        assert np.isfinite(after).all() and (after >= before).all()
    assert inputs.series_length(x.dtype, size) >= 2


@pytest.mark.parametrize("name", inputs.DTYPES)
def test_numbers_differ_from_place_to_place_and_from_rank_to_rank(name):
    first, second = arrays(name, 200_000, 2)
    # In bfloat16, 2 signs and 2**6 sizes, so that the sum is exact.
    assert np.unique(first.astype(np.float64)).size >= 128
    assert (first.astype(np.float64) != second.astype(np.float64)).mean() > 0.9
    again = arrays(name, 200_000, 2)[0]
    assert again.tobytes() == first.tobytes()
    # Of one sign at each place: the ranks' numbers must not cancel.
    assert (np.sign(first.astype(np.float64)) == np.sign(second.astype(np.float64))).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 64, 100])
@pytest.mark.parametrize("name", inputs.DTYPES)
def test_right_sums_are_right_and_wrong_ones_wrong(name, size):
    ranks = arrays(name, 150_000, size)
    total = ranks[0].copy()
    for x in ranks[1:]:
        total += x
    assert inputs.first_wrong(total, size) is None
    # The last rank's addend is missing, in one place. (Among 100 it hides in bfloat16's rounding.)
    for place in (10, 65_521, 149_999) if (name, size) != ("bfloat16", 100) else ():
        wrong = total.copy()
        wrong[place] -= ranks[-1][place]
        assert inputs.first_wrong(wrong, size) == place
        # So is the next number that the dtype has, where the sums are exact.
        wrong[place] = total[place]
        bits = wrong.view(f"u{wrong.itemsize}")
        bits[place] += 1
        assert inputs.first_wrong(wrong, size) == place


def test_nan_is_wrong():
    x = np.empty(9, np.float32)
    inputs.fill(x, 0, 1)
    x[4] = np.nan
    assert inputs.first_wrong(x, 1) == 4


def test_unknown_dtype():
    with pytest.raises(ConfigError, match="expected one of float16"):
        inputs.dtype_of("float8")
