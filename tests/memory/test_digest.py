"""Tests digests of arrays: of their bits, in the order of their indices."""

import struct
import sys

import ml_dtypes
import numpy as np
import pytest

from mpiring import ConfigError, MissingDependencyError
from mpiring.memory.digest import bytes_of, digest, has_xxh3

DTYPES = ["bool", "int8", "uint64", "float16", ml_dtypes.bfloat16, "float32", "float64",
          "complex64", "complex128"]


def test_it_is_blake2b():
    """What RFC 7693's algorithm gives for a digest of eight bytes."""
    assert digest([]) == digest([b""]) == int.from_bytes(
        bytes.fromhex("e4a6a0577479b2b4"), "little")


def test_xxh3_is_fast(monkeypatch):
    """The algorithm's own example of an empty input: its 128 bits begin with these."""
    assert has_xxh3()
    assert digest([], fast=True) == int.from_bytes(bytes.fromhex("99aa06d3014798d8"), "little")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert not has_xxh3()
    with pytest.raises(MissingDependencyError, match=": pip install xxhash$"):
        digest([], fast=True)


@pytest.mark.parametrize("fast", [False, True])
def test_where_pieces_end_does_not_count(fast):
    def of(*pieces):
        return digest(pieces, fast=fast)

    x = np.arange(100, dtype=np.uint8)
    assert of(x) == of(x[:37], x[37:]) == of(bytes(x)) != of(x[:99])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 3), (7, 3, 2)])
def test_bytes_are_those_of_the_elements(dtype, shape):
    x = np.array(np.random.default_rng(0).random(shape) * 100, dtype)
    raw = bytes_of(x)
    assert raw.dtype == np.uint8 and raw.ndim == 1 and raw.tobytes() == x.tobytes()
    assert x.size == 0 or np.shares_memory(raw, x)
    for other in (np.asfortranarray(x), np.repeat(x[None], 3, 0)[1], _strided(x), _read_only(x)):
        assert bytes_of(other).tobytes() == x.tobytes()
    if x.size:
        before, flipped = digest([raw]), x.copy()
        bytes_of(flipped.reshape(-1))[-1] ^= 1
        assert digest([bytes_of(flipped)]) != before


def _strided(x):
    wide = np.zeros((*x.shape, 2), x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def test_bits_are_compared_and_not_values():
    def of(*bits):
        return digest([bytes_of(np.array(bits, np.uint32).view(np.float32))])

    nan, other_nan = 0x7fc00000, 0x7fc00001
    assert of(nan) == of(nan) != of(other_nan)
    assert digest([bytes_of(np.array(0.0))]) != digest([bytes_of(np.array(-0.0))])


def test_what_lies_beside_a_long_double_does_not_count():
    number = np.array([1, -2.5], np.longdouble)
    if np.finfo(np.longdouble).nmant != 63:
        pytest.skip(reason="long double fills its memory on this processor")
    other = number.copy()
    other.view(np.uint8).reshape(2, -1)[:, 10:] = 0xee
    assert (number == other).all() and digest([bytes_of(number)]) == digest([bytes_of(other)])
    other.view(np.uint8)[0] ^= 1
    assert digest([bytes_of(number)]) != digest([bytes_of(other)])
    assert struct.unpack("<Q", bytes_of(number)[:8])[0] == 1 << 63


def test_objects_have_no_bits():
    with pytest.raises(ConfigError, match="holds Python objects"):
        bytes_of(np.array([1, "a"], object))
