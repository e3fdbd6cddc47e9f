"""Tests what every codec promises, made by NumPy and by numba, bit by bit."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from launching import needed

from mpiring import ConfigError
from mpiring.jit import cache, loops
from mpiring.reducers.codecs.base import Codec
from mpiring.reducers.codecs.blocks import EightBit
from mpiring.reducers.codecs.halves import SixteenBit
from mpiring.reducers.codecs.signs import Sign

CODECS: list[Codec] = [
    SixteenBit("float16"), SixteenBit("bfloat16"), EightBit(1), EightBit(100), EightBit(256),
    EightBit(50_001), Sign(32), Sign(96), Sign(512), Sign(99_968)]
IN_BLOCKS = [codec for codec in CODECS if codec.alignment > 1]
LARGEST = float(np.finfo("float32").max)
MANY = 100_700

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


@pytest.fixture
def without_numba(monkeypatch):
    """Encode and decode by NumPy."""
    for name in ("loop", "loop_16"):
        monkeypatch.setattr(loops, name, lambda *arguments: None)


@pytest.fixture(params=["NumPy", "numba"])
def by(request):
    """Encode and decode in either way."""
    if request.param == "numba":
        needed("numba")
    else:
        request.getfixturevalue("without_numba")


def normal(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype("float32")


def lengths(codec):
    block = codec.alignment
    return sorted({0, 1, block - 1, block, block + 1, 2 * block + 33, MANY})


def encoded(codec, x, key=1, lost=None):
    payload = np.full(codec.payload_size(x.size), 0xa5, np.uint8)
    # A user's settings must not reach the arithmetic inside.
    with np.errstate(all="raise"):
        codec.encode(x, payload, lost, key)
    return payload


def decoded(codec, payload, n):
    out = np.full(n, np.nan, np.float32)
    with np.errstate(all="raise"):
        codec.decode(payload, out)
    return out


def added(codec, payload, total):
    total = total.copy()
    with np.errstate(all="raise"):
        codec.decode(payload, total, adds=True)
    return total


def same(a, b):
    """Return whether vectors of float32 are equal bit by bit, but for the payload of NaN."""
    nan = np.isnan(a)
    return (np.array_equal(nan, np.isnan(b))
            and np.array_equal(a[~nan].view("uint32"), b[~nan].view("uint32")))


def odd_inputs():
    """Vectors that have what is rare."""
    yield np.zeros(777, np.float32)
    yield -np.zeros(777, np.float32)
    yield np.full(777, -3.25, np.float32)
    for scale in (1e-45, 1e-42, 1e-38, 1.4e-36, 1.6e-36, 1e-30, 1e-8, 1e4, 1e30, LARGEST / 8):
        yield normal(777) * np.float32(scale)
    yield np.array([LARGEST, -LARGEST, 0, 1] * 200, np.float32)
    yield np.array([np.nextafter(np.float32(LARGEST), np.float32(0)), 1e-45] * 300, np.float32)
    for bad in (np.inf, -np.inf, np.nan, -np.nan):
        for place in (0, 300, 776):
            x = normal(777)
            x[place] = bad
            yield x
    yield np.random.default_rng(3).integers(0, 1 << 32, 9000, np.uint32).view("float32")


@every_codec
def test_lost_and_decoded_make_the_input(codec, by):
    for n in lengths(codec):
        x = normal(n, seed=n)
        lost = np.full(n, np.nan, np.float32)
        payload = encoded(codec, x, lost=lost)
        out = decoded(codec, payload, n)
        assert np.array_equal(lost, x - out)
        assert np.array_equal(payload, encoded(codec, x)), "without lost"
        assert np.array_equal(added(codec, payload, x), x + out)
        assert codec.is_finite(payload, n) is True
        in_place = x.copy()
        assert np.array_equal(payload, encoded(codec, in_place, lost=in_place[:]))
        assert np.array_equal(in_place, lost)


@every_codec
def test_decoded_is_near(codec, by):
    x = normal(5000)
    error = np.abs(decoded(codec, encoded(codec, x), x.size) - x)
    if isinstance(codec, SixteenBit):
        assert (error <= np.abs(x) * 2.0**(-11 if codec.dtype == "float16" else -8) + 1e-7).all()
    else:
        starts = np.arange(0, x.size, codec.alignment)
        peaks = np.maximum.reduceat(np.abs(x), starts)
        counts = np.diff([*starts, x.size])
        means = np.add.reduceat(np.abs(x), starts) / counts
        # One step of 127, or the distance from the mean magnitude.
        want = np.repeat(peaks / 126.9, counts) if isinstance(codec, EightBit) else (
            np.abs(np.abs(x) - np.repeat(means, counts)) + 1e-5)
        assert (error <= want).all()


@every_codec
def test_numba_and_numpy_give_the_same_bits(codec, request):
    needed("numba")
    inputs = [normal(n, seed=n) for n in lengths(codec)] + list(odd_inputs())
    results = []
    for way in ("numba", "NumPy"):
        if way == "NumPy":
            assert cache._codes and None not in cache._codes.values(), "numba was not used"
            request.getfixturevalue("without_numba")
        for x in inputs:
            lost = np.empty_like(x)
            payload = encoded(codec, x, 7, lost)
            results.append((payload, lost, decoded(codec, payload, x.size),
                            added(codec, payload, np.abs(x))))
    for x, by_numba, by_numpy in zip(inputs, results[:len(inputs)], results[len(inputs):]):
        assert np.array_equal(by_numba[0], by_numpy[0]), f"payload of {x}"
        for a, b in zip(by_numba[1:], by_numpy[1:]):
            assert same(a, b), f"of {x}"


@every_codec
def test_not_finite_is_seen_and_stays(codec, by):
    for x in odd_inputs():
        lost = np.empty_like(x)
        payload = encoded(codec, x, lost=lost)
        out = decoded(codec, payload, x.size)
        with np.errstate(all="ignore"):
            assert same(lost, x - out)
        finite = codec.is_finite(payload, x.size)
        assert finite == np.isfinite(out).all()
        # What is finite may overflow in the code: in float16, and in sums of magnitudes.
        assert np.isfinite(x).all() or not finite
        if isinstance(codec, EightBit):
            assert np.isfinite(x).all() == finite


@every_codec
def test_no_byte_beside_is_touched_at_any_address(codec, by):
    n = 2 * codec.alignment + 37 if codec.alignment < 1000 else codec.alignment + 37
    x = normal(n)
    want, size = encoded(codec, x), codec.payload_size(n)
    for offset in (1, 2, 3, 4):
        memory = np.full(size + 8, 0x77, np.uint8)
        codec.encode(x, memory[offset:offset + size], None, 1)
        assert np.array_equal(memory[offset:offset + size], want)
        assert (memory[:offset] == 0x77).all() and (memory[offset + size:] == 0x77).all()
        out = np.full(n + 1, 7, np.float32)
        codec.decode(memory[offset:offset + size], out[:n])
        assert out[n] == 7 and np.array_equal(out[:n], decoded(codec, want, n))
        assert codec.is_finite(memory[offset:offset + size], n)


@pytest.mark.parametrize("codec", IN_BLOCKS, ids=repr)
def test_blocks_are_apart(codec, by):
    block = codec.alignment
    x = normal(3 * block + 5)
    x[block + 1] = np.nan
    out = decoded(codec, encoded(codec, x), x.size)
    bad = np.arange(block, 2 * block)
    assert not np.isfinite(out[bad]).any() and np.isfinite(np.delete(out, bad)).all()


@every_codec
def test_many_threads(codec, by):
    vectors = [normal(20_000, seed) for seed in range(4)]
    want = [encoded(codec, x, 5) for x in vectors]
    wrong = []

    def work(x, payload):
        for _ in range(5):
            lost = x.copy()
            if not np.array_equal(encoded(codec, lost, 5, lost), payload):
                wrong.append("payload")
            if not np.array_equal(added(codec, payload, lost), decoded(codec, payload, x.size)
                                  + (x - decoded(codec, payload, x.size))):
                wrong.append("sum")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, vectors, want))
    assert not wrong


@every_codec
def test_a_payload_of_another_length_is_refused(codec):
    payload = np.empty(codec.payload_size(10) + 1, np.uint8)
    for call in (lambda: codec.encode(normal(10), payload, None, 0),
                 lambda: codec.decode(payload, normal(10)),
                 lambda: codec.decode(payload, normal(10), adds=True),
                 lambda: codec.is_finite(payload, 10)):
        with pytest.raises(ConfigError, match="expected .* bytes, as payload_size"):
            call()


@pytest.mark.parametrize(("make", "value"), [(SixteenBit, "float32"), (EightBit, 0), (Sign, 33)])
def test_wrong_settings(make, value):
    with pytest.raises(ConfigError, match="expected"):
        make(value)


def test_eight_bits_are_unbiased_and_change_with_the_key(by):
    codec, x, keys = EightBit(64), normal(256), 2000
    steps = np.repeat(np.abs(x).reshape(4, 64).max(axis=1) / 127, 64)
    total = np.zeros(x.size, np.float64)
    for key in range(keys):
        total += decoded(codec, encoded(codec, x, key), x.size)
    error = (total / keys - x) / steps
    # Each rounding is off by at most half a step, root mean square: 5 deviations of the mean.
    assert np.abs(error).max() < 5 * 0.5 / keys**0.5
    assert np.abs(error.mean()) < 5 * 0.5 / (keys * x.size)**0.5
    assert not np.array_equal(encoded(codec, x, 1), encoded(codec, x, 2))


def test_errors_of_eight_bits_are_independent(by):
    codec, x = EightBit(256), normal(1 << 16)
    lost = [np.empty_like(x), np.empty_like(x)]
    for key in (0, 1):
        encoded(codec, x, key, lost[key])
    a, b = lost
    correlations = [np.corrcoef(a[:-lag], a[lag:])[0, 1] for lag in (1, 2, 3, 8, 256, 4096)]
    assert np.abs([*correlations, np.corrcoef(a, b)[0, 1]]).max() < 5 / x.size**0.5


@pytest.mark.parametrize("peak", [127 * 2.0**-126, 1.0, 127.0, 1e30, LARGEST])
def test_the_largest_of_eight_bits_is_exact_to_float32(peak, by):
    x = np.array([peak, -peak, 0, -0.0] * 25, np.float32)
    out = decoded(EightBit(100), encoded(EightBit(100), x), 100)
    np.testing.assert_allclose(out, x, rtol=3e-7)


def test_blocks_too_small_for_a_scale_are_lost_as_a_whole(by):
    x = normal(300) * np.float32(1e-38)
    lost = np.empty_like(x)
    payload = encoded(EightBit(100), x, 3, lost)
    assert not payload.any() and same(lost, x)
    assert not decoded(EightBit(100), payload, 300).any()


def test_signs_are_the_mean_magnitude(by):
    x = np.array([3, -1, -0.0, 4], np.float32)
    payload = encoded(Sign(32), x)
    assert decoded(Sign(32), payload, 4).tolist() == [2, -2, -2, 2]
    assert payload.tolist() == [0, 0, 0, 0x40, 0b0110, 0, 0, 0]


@pytest.mark.parametrize("codec", [SixteenBit("bfloat16"), EightBit(64), Sign(64)], ids=repr)
def test_without_numba_numpy_encodes_and_the_log_says_so_once(codec, monkeypatch, caplog):
    caplog.set_level("INFO", "mpiring")
    monkeypatch.setattr(cache, "_codes", {})
    monkeypatch.setitem(sys.modules, "numba", None)
    x = normal(300)
    for _ in range(2):
        assert codec.is_finite(encoded(codec, x), x.size)
    (message,) = caplog.messages
    assert "are made by NumPy, which takes longer" in message
