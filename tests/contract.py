"""States once what every algorithm must do: inputs, and NumPy's answer."""

import functools

import ml_dtypes
import numpy as np

OPS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
       "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", ml_dtypes.bfloat16, "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
OPS_OF = {
    "sum": [*INTEGERS, *FLOATS, *COMPLEX], "prod": [*INTEGERS, *FLOATS, *COMPLEX],
    "mean": [*FLOATS, *COMPLEX],
    "max": ["bool", *INTEGERS, *FLOATS], "min": ["bool", *INTEGERS, *FLOATS],
    **dict.fromkeys(("band", "bor", "bxor"), ["bool", *INTEGERS])}


def defined(op, dtype):
    """Return whether an op exists for a dtype."""
    return dtype in OPS_OF[op]


def contribution(rank, n, dtype):
    """One rank's input: small numbers, whose sums and products are exact in every dtype."""
    return ((np.arange(n) * 7 + rank * 3) % 3).astype(dtype)


@functools.lru_cache(maxsize=64)
def expected(size, n, dtype, op):
    """NumPy's result over `size` ranks, which is kept: read only."""
    rows = np.array([contribution(rank, n, dtype) for rank in range(size)])
    with np.errstate(over="ignore"):
        result = OPS[op].reduce(rows, axis=0, dtype=dtype)
    result = result / result.dtype.type(size) if op == "mean" else result
    result.flags.writeable = False
    return result


def rounded_once(rows, op):
    """What 16-bit sums, means and products must be: combined in float32, in rank order."""
    with np.errstate(all="ignore"):
        total = rows[0].astype("float32")
        for row in rows[1:]:
            total = OPS[op](total, row.astype("float32"))
        return (total / np.float32(len(rows)) if op == "mean" else total).astype(rows[0].dtype)


def same_bits(a, b):
    """Return whether two vectors are equal bit by bit, but for the payload of NaN."""
    nan = np.isnan(a.astype("float32"))
    a, b, nans = a.view("uint16"), b.view("uint16"), np.isnan(b.astype("float32"))
    return np.array_equal(nan, nans) and np.array_equal(a[~nan], b[~nan])


def check(result, size, op):
    """Fail unless `result` is what NumPy says."""
    want = expected(size, result.size, result.dtype, op)
    if op == "mean":
        # In 16 bits a ring's mean divides before it adds, and rounds each time.
        wide = np.clongdouble if result.dtype.kind == "c" else np.longdouble
        tolerance = 2e-2 if result.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(
            result.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(result, want)
