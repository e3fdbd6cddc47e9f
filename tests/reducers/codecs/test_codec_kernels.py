"""Holds the codecs' kernels to the bits of the host's codecs, on the host."""

import kernel_cases as cases
import numpy as np
import pytest
from host_kernels import HostMemory, HostStream, compiled, complaints

from mpiring.reducers.codecs import kernels
from mpiring.reducers.codecs.blocks import EightBit
from mpiring.errors import ConfigError

MEMORY = HostMemory()
OFFSETS = pytest.mark.parametrize("offset", [0, 4], ids=["packed", "by elements"])


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return HostStream(compiled(cases.coding_kernels(), tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize("codec", cases.CODECS, ids=repr)
@pytest.mark.parametrize("n", cases.CODED_LENGTHS)
@pytest.mark.parametrize("kind", cases.KINDS)
@OFFSETS
def test_payloads_have_the_bits_of_the_host(stream, codec, n, kind, offset):
    cases.check_encode(stream, MEMORY, codec, n, kind, offset)
    assert bool(stream.launched[-1]["packed"]) == (offset == 0 and codec.alignment != 7)


@pytest.mark.parametrize("codec", cases.CODECS, ids=repr)
@pytest.mark.parametrize("n", cases.CODED_LENGTHS)
@OFFSETS
def test_what_is_decoded_has_the_bits_of_the_host(stream, codec, n, offset):
    cases.check_decode(stream, MEMORY, codec, n, offset)


def test_wrong_payloads_are_refused_and_empty_ones_are_nothing(stream):
    codec, empty = kernels.OnDevice(EightBit(512), stream), np.zeros(0, np.uint8)
    x = MEMORY.put(np.zeros(8, np.float32))
    with pytest.raises(ConfigError, match="a payload of 3 bytes for 8 elements"):
        codec.encode(x, MEMORY.put(np.zeros(3, np.uint8)), None, 0)
    launches = len(stream.launched)
    codec.encode(x[:0], MEMORY.put(empty), None, 0)
    assert len(stream.launched) == launches


def test_the_compiler_of_gpus_takes_all_kernels():
    """Where it is there: NVRTC, which needs no GPU; g++ has taken all of them in any case."""
    assert complaints(cases.coding_kernels()) == {}
