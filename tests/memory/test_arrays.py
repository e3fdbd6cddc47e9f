"""Tests that arrays are seen without copying, or refused with the remedy."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiring import ConfigError
from mpiring.memory.arrays import (
    COMPLEX, FLOATING, as_bytes, chunks_of, dtype_name, flat, is_finite, pieces_of)
from mpiring.operations.agreement import collective_call


@given(n=st.integers(0, 200), parts=st.integers(1, 20))
def test_chunks_cover_in_order_and_differ_by_one(n, parts):
    x = np.arange(n)
    chunks = chunks_of(x, parts)
    assert len(chunks) == parts
    assert np.array_equal(np.concatenate(chunks), x)
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert all(np.shares_memory(chunk, x) for chunk in chunks if chunk.size)


@given(n=st.integers(0, 200), piece_bytes=st.integers(8, 100))
def test_pieces_are_short_enough_and_at_least_one(n, piece_bytes):
    x = np.arange(n)
    pieces = pieces_of(x, piece_bytes)
    assert np.array_equal(np.concatenate(pieces), x)
    assert len(pieces) == 1 or max(piece.nbytes for piece in pieces) <= piece_bytes + 8


@pytest.mark.parametrize("x", [
    np.zeros((3, 4)), np.asfortranarray(np.zeros((3, 4))), np.zeros(()), np.zeros((0, 3)),
    np.zeros((4, 1, 3)), np.zeros(10)[3:7], np.zeros((2, 2)).view(np.recarray),
], ids=lambda x: str(x.shape))
def test_flat_is_a_view(x):
    vector = flat(x)
    assert type(vector) is np.ndarray and vector.shape == (x.size,)
    vector[...] = 7
    assert (np.asarray(x) == 7).all()
    assert as_bytes(vector).nbytes == x.nbytes


def test_order_tells_equal_shapes_apart():
    x, y = np.zeros((2, 3)), np.asfortranarray(np.zeros((2, 3)))
    details = [collective_call("allgather", None, array, flat(array)).detail
               for array in (x, y, y[:, 0])]
    assert details == ["float64 (2, 3)", "float64 (2, 3) in Fortran order", "float64 (2,)"]


def test_read_only_memory_can_be_sent_but_not_written():
    x = np.zeros(3)
    x.flags.writeable = False
    assert flat(x, writeable=False).size == 3
    with pytest.raises(ConfigError, match=r"read-only; pass a copy: x\.copy\(\)"):
        flat(x)


def test_dtype_names():
    assert dtype_name("f4") == "float32" and dtype_name(bool) == "bool"
    assert dtype_name(np.longlong) == "int64" and dtype_name(np.longdouble) == "longdouble"
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"
    for bad in ("M8[s]", "S3", object, ml_dtypes.float8_e4m3fn, "i4, f4"):
        with pytest.raises(ConfigError, match="cannot travel"):
            dtype_name(bad)
    with pytest.raises(ConfigError, match="foreign byte order"):
        dtype_name(">f8" if np.dtype("<f8").isnative else "<f8")


@pytest.mark.parametrize("name", [*FLOATING, *COMPLEX])
def test_one_number_that_is_not_finite_is_seen_anywhere(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    # More than is looked at at once.
    x = np.zeros(300_001, dtype)
    largest = ml_dtypes.finfo(dtype).max if name in ("float16", "bfloat16") else np.finfo(dtype).max
    x[:3] = largest, -largest, -0.0
    x[-1000:] = largest            # whose sum is Inf
    assert is_finite(x) and is_finite(-x) and is_finite(x[:0])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for index in (0, 150_000, 300_000):
            y = x.copy()
            y[index] = bad
            if name in COMPLEX:
                y[index] = complex(1, bad)
            assert not is_finite(y)
