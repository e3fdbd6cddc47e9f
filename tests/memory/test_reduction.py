"""Tests the elementwise ops: what they accept, and their edges."""

import contract
import numpy as np
import pytest

from mpiring import ConfigError
from mpiring.memory.reduction import Reduction


@pytest.mark.parametrize("op", contract.OPS)
@pytest.mark.parametrize("dtype", contract.DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_which_op_is_defined_for_which_dtype(op, dtype):
    if contract.defined(op, dtype):
        Reduction(op, dtype, 2)
    else:
        with pytest.raises(ConfigError, match=f"op='{op}' is not defined for .*; "):
            Reduction(op, dtype, 2)


@pytest.mark.parametrize(("op", "dtype", "remedy"), [
    ("sum", "bool", "numpy.uint8"), ("mean", "int32", "use sum"),
    ("max", "complex64", "real and imaginary"), ("avg", "float32", "expected one of sum, mean"),
])
def test_remedies(op, dtype, remedy):
    with pytest.raises(ConfigError, match=remedy):
        Reduction(op, dtype, 2)


def combined(op, a, b, size=2):
    reduction = Reduction(op, a.dtype, size)
    for x in (a, b):
        reduction.prepare(x)
    reduction.accumulate(a, b)
    reduction.finish(a)
    return a


def test_nan_infinity_and_overflow_pass_through_silently():
    a = np.array([np.nan, 1, np.inf, 3e38], "float32")
    for op in ("max", "min", "sum", "mean", "prod"):
        with np.errstate(all="raise"):
            result = combined(op, a.copy(), np.array([1, np.nan, -np.inf, 3e38], "float32"))
        assert np.isnan(result[:2]).all()
    assert combined("sum", np.array([127], "int8"), np.array([1], "int8"))[0] == -128


@pytest.mark.parametrize("dtype", ["float16", contract.ml_dtypes.bfloat16])
def test_a_16_bit_mean_divides_first(dtype):
    a, b = np.array([60000], dtype), np.array([60000], dtype)
    assert float(combined("mean", a, b)[0]) == pytest.approx(60000, rel=1e-2)
