"""The contract of all algorithms: inputs, and the results of NumPy."""

import functools
import itertools

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


# True if tables contain all combinations: the option --full.
full = False


def defined(op, dtype):
    """Return whether an op exists for a dtype."""
    return dtype in OPS_OF[op]


@functools.cache
def cases(*axes):
    """Return the rows of a table: an op, a dtype that supports it, and a value of each axis.

    For any two axes, each pair of values is in some row. With --full, all combinations are rows.

    Args:
        axes: Tuples of values.
    """
    axes = (tuple(OPS), tuple(DTYPES), *axes)
    if full:
        return [row for row in itertools.product(*axes) if defined(*row[:2])]

    def fits(row):
        return None in row[:2] or defined(axes[0][row[0]], axes[1][row[1]])

    def pairs_of(row):
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(axes)), 2)
                if row[i] is not None and row[j] is not None}

    missing = {(i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2)
               for a in range(len(axes[i])) for b in range(len(axes[j]))
               if i or j > 1 or defined(axes[0][a], axes[1][b])}
    rows = []
    while missing:
        i, a, j, b = min(missing)
        row = [None] * len(axes)
        row[i], row[j] = a, b
        for k in range(len(axes)):
            if row[k] is None:
                values = [[*row[:k], value, *row[k + 1:]] for value in range(len(axes[k]))]
                row = max(filter(fits, values), key=lambda each: len(pairs_of(each) & missing))
        missing -= pairs_of(row)
        rows.append(tuple(axis[value] for axis, value in zip(axes, row)))
    return rows


def contribution(rank, n, dtype):
    """One rank's input: small numbers, whose sums and products are exact in every dtype."""
    return ((np.arange(n) * 7 + rank * 3) % 3).astype(dtype)


@functools.lru_cache(maxsize=64)
def expected(size, n, dtype, op):
    """Return NumPy's result over `size` ranks, cached; do not write to it."""
    rows = np.array([contribution(rank, n, dtype) for rank in range(size)])
    with np.errstate(over="ignore"):
        result = OPS[op].reduce(rows, axis=0, dtype=dtype)
    result = result / result.dtype.type(size) if op == "mean" else result
    result.flags.writeable = False
    return result


def rounded_once(rows, op):
    """Return 16-bit sums, means and products, combined in float32 and in rank order."""
    with np.errstate(all="ignore"):
        total = rows[0].astype("float32")
        for row in rows[1:]:
            total = OPS[op](total, row.astype("float32"))
        return (total / np.float32(len(rows)) if op == "mean" else total).astype(rows[0].dtype)


def same_bits(a, b):
    """Return whether two vectors are bitwise identical, except for the payloads of NaN."""
    nan = np.isnan(a.astype("float32"))
    a, b, nans = a.view("uint16"), b.view("uint16"), np.isnan(b.astype("float32"))
    return np.array_equal(nan, nans) and np.array_equal(a[~nan], b[~nan])


def check_all(results, op):
    """Fail unless all ranks have the same bits, equal to the result of NumPy."""
    assert all(x.tobytes() == results[0].tobytes() for x in results), "bits differ"
    check(results[0], len(results), op)


def check(result, size, op):
    """Fail unless `result` equals the result of NumPy."""
    want = expected(size, result.size, result.dtype, op)
    if op == "mean":
        # In 16 bits a ring's mean divides before it adds, and rounds each time.
        wide = np.clongdouble if result.dtype.kind == "c" else np.longdouble
        tolerance = 2e-2 if result.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(
            result.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(result, want)
