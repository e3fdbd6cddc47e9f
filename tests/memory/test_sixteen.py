"""Tests the conversions of 16-bit floats against NumPy's and ml_dtypes' own, bit by bit."""

import contract
import ml_dtypes
import numpy as np
import pytest
from launching import needed

from mpiring.memory import sixteen

DTYPES = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def every(dtype):
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def narrowed(x, dtype):
    out = np.empty(x.size, dtype)
    # A user's settings must not reach the arithmetic inside.
    with np.errstate(all="raise"):
        sixteen.narrow(x, out)
    return out


def check_narrow(x, dtype):
    with np.errstate(all="ignore"):
        assert contract.same_bits(narrowed(x, dtype), x.astype(dtype))


def test_widen_is_exact_for_every_number(dtype):
    finite = np.isfinite(every(dtype).astype("float32"))
    # In one block with NaN and Inf, and in one without any.
    for x in (every(dtype), every(dtype)[finite]):
        wide = np.empty(x.size, np.float32)
        with np.errstate(all="raise"):
            sixteen.widen(x, wide)
        want, nan = x.astype("float32"), np.isnan(x.astype("float32"))
        assert np.array_equal(wide[~nan].view("uint32"), want[~nan].view("uint32"))
        assert np.isnan(wide[nan]).all()


def test_narrow_gives_back_every_number(dtype):
    x = every(dtype)
    assert contract.same_bits(narrowed(x.astype("float32"), dtype), x)


def test_narrow_at_and_beside_every_tie(dtype):
    x = every(dtype).astype("float32")
    x = np.sort(x[np.isfinite(x)])
    ties = ((x[1:].astype("float64") + x[:-1]) / 2).astype("float32")
    for numbers in (ties, np.nextafter(ties, np.float32(np.inf)),
                    np.nextafter(ties, np.float32(-np.inf))):
        check_narrow(numbers, dtype)
    assert ties.size > 60_000


@pytest.mark.parametrize("seed", range(3))
def test_narrow_of_random_numbers(dtype, seed):
    random = np.random.default_rng(seed)
    anything = random.integers(0, 1 << 32, 500_000, dtype=np.uint32).view("float32")
    check_narrow(anything, dtype)
    check_narrow(anything[np.abs(anything) < 65520], dtype)
    spread = (random.standard_normal(500_000) * 10 ** random.uniform(-9, 4, 500_000))
    check_narrow(spread.astype("float32"), dtype)


def test_narrow_at_the_edges(dtype):
    numbers = [0, -0.0, 65504, 65519.996, 65520, 65536, 3.38e38, 3.4e38, np.inf, np.nan,
               2.0**-14, 2.0**-24, 2.0**-25, 1.0000001 * 2.0**-25, 2.0**-26, 1e-45, 1e-38, 1.5e-5]
    for x in numbers:
        # Alone in its block, since one NaN decides how a whole block is done.
        check_narrow(np.array([x, -x, x], np.float32), dtype)
    nans = np.array([0x7f800001, 0xff800001, 0x7fffffff, 0xffc12345, 0x7f812345], np.uint32)
    check_narrow(nans.view("float32"), dtype)


def test_the_bits_of_bfloat16_need_no_such_dtype(dtype):
    x = every(dtype).astype("float32")
    x = x[~np.isnan(x)]
    nan = np.array([0x7f800001, 0xffffffff], np.uint32).view("float32")
    for wide in (x, np.nextafter(x, np.float32(1)), x[np.abs(x) < 1e38] * np.float32(1.004), nan):
        bits = narrowed(wide, np.uint16)
        with np.errstate(all="ignore"):
            assert contract.same_bits(bits.view(DTYPES[1]), wide.astype(DTYPES[1]))
        back = np.empty(bits.size, np.float32)
        sixteen.widen(bits, back)
        assert np.array_equal(back, bits.view(DTYPES[1]).astype("float32"), equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, sixteen.BLOCK, sixteen.BLOCK + 1, 200_001])
def test_any_length_and_start(dtype, n):
    for offset in (0, 1):
        x = (np.arange(offset + n) % 251).astype(dtype)[offset:]
        wide = np.full(n + 1, 7, np.float32)
        sixteen.widen(x, wide[1:])
        assert wide[0] == 7 and np.array_equal(wide[1:], x.astype("float32"))
        back = np.full(n + 2, 7, dtype)
        sixteen.narrow(wide[1:], back[1:-1])
        assert back[0] == back[-1] == 7 and np.array_equal(back[1:-1], x)


def test_subnormal_numbers_survive_where_those_of_float32_do_not(dtype):
    torch = needed("torch")
    x = every(np.dtype("float16"))
    with np.errstate(all="ignore"):
        x = x[np.isfinite(x)].astype(dtype)
        want, total = x.astype("float32"), (x.astype("float32") + x[::-1].astype("float32"))
        total = total.astype(dtype)
    wide, out, narrow = np.empty(x.size, np.float32), np.empty(x.size, dtype), None
    if not torch.set_flush_denormal(True):
        pytest.skip(reason="this processor cannot flush subnormal numbers to zero")
    try:
        assert np.float32(1e-40) * np.float32(1) == 0
        sixteen.widen(x, wide)
        narrow = narrowed(want, dtype)
        sixteen.combine(np.add, [x, x[::-1].copy()], 1, out)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(wide.view("uint32"), want.view("uint32"))
    assert contract.same_bits(narrow, x) and contract.same_bits(out, total)
