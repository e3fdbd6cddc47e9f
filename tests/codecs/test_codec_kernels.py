"""Holds the codecs' kernels to the bits of the host's codecs, on the host."""

import numpy as np
import pytest
from host_kernels import HostStream, compiled, complaints, placed, same, vector

from mpiring.codecs import kernels
from mpiring.codecs.blocks import EightBit
from mpiring.codecs.halves import Halves
from mpiring.codecs.signs import Sign
from mpiring.errors import ConfigError

CODECS = [EightBit(512), EightBit(2048), EightBit(7), Sign(32), Sign(1024), Halves("float16"),
          Halves("bfloat16")]
ALL = [make(codec, flag) for codec in CODECS for make in (kernels.encoder, kernels.decoder)
       for flag in (False, True)]
# One element, a part of a block, blocks and a part that is no pack, and whole blocks.
LENGTHS = [1, 100, 3001, 4096]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return HostStream(compiled(ALL, tmp_path_factory.mktemp("kernels")))


def _vector(n, kind):
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n)).astype(np.float32)
    if kind == "not finite":
        x[rng.integers(0, n)] = np.nan
        x[rng.integers(0, n)] = np.inf
    elif kind == "small":
        x[:] = np.float32(1e-42)
    elif kind == "large":
        x *= np.float32(1e34)
        x[n // 2] = np.finfo(np.float32).max
    return x


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", ["normal", "not finite", "small", "large"])
@pytest.mark.parametrize("offset", [0, 4], ids=["packed", "by elements"])
def test_payloads_have_the_bits_of_the_host(stream, codec, n, kind, offset):
    x = placed(_vector(n, kind), offset)
    expected = np.zeros(codec.payload_size(n), np.uint8)
    expected_lost = np.zeros(n, np.float32)
    codec.encode(x, expected, expected_lost, 5)
    payload = placed(np.zeros_like(expected), offset)
    kernels.encode(stream, codec, vector(x), vector(payload), None, 5)
    assert _same_payload(codec, payload, expected, n)
    lost = placed(np.zeros_like(x), offset)
    kernels.encode(stream, codec, vector(x), vector(payload), vector(lost), 5)
    assert _same_payload(codec, payload, expected, n) and same(lost, expected_lost)
    kernels.encode(stream, codec, vector(x), vector(payload), vector(x), 5)
    assert same(x, expected_lost)
    assert bool(stream.launched[-1]["packed"]) == (offset == 0 and codec.alignment != 7 and (
        isinstance(codec, Halves) or payload.ctypes.data % 4 == 0))


def _same_payload(codec, payload, expected, n):
    """Compare payloads; those of float16 may have other bits where they hold NaN."""
    if isinstance(codec, Halves):
        decoded = np.empty((2, n), np.float32)
        codec.decode(payload, decoded[0])
        codec.decode(expected, decoded[1])
        return same(decoded[0], decoded[1])
    return payload.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("offset", [0, 4], ids=["packed", "by elements"])
def test_what_is_decoded_has_the_bits_of_the_host(stream, codec, n, offset):
    payload = np.zeros(codec.payload_size(n), np.uint8)
    codec.encode(_vector(n, "not finite" if n == 100 else "normal"), payload, None, 3)
    for adds in (False, True):
        expected = _vector(n, "normal")
        out = placed(expected, offset)
        (codec.add if adds else codec.decode)(payload, expected)
        kernels.decode(stream, codec, vector(placed(payload, offset)), vector(out), adds)
        assert same(out, expected)


def test_wrong_payloads_are_refused_and_empty_ones_are_nothing(stream):
    x = np.zeros(8, np.float32)
    with pytest.raises(ConfigError, match="a payload of 3 bytes for 8 elements"):
        kernels.encode(stream, CODECS[0], vector(x), vector(np.zeros(3, np.uint8)), None, 0)
    launches = len(stream.launched)
    kernels.encode(stream, CODECS[0], vector(x[:0]), vector(np.zeros(0, np.uint8)), None, 0)
    assert len(stream.launched) == launches


def test_the_compiler_of_gpus_takes_all_kernels():
    """Where it is there: NVRTC, which needs no GPU; g++ has taken all of them in any case."""
    assert complaints(ALL) == {}
