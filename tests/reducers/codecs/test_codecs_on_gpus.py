"""Holds the codecs' NumPy operations, on a simulated GPU, to the bits of the host's loops."""

import kernel_cases as cases
import numpy as np
import pytest
from gpu_memory import GpuMemory
from simulated_gpu import SimulatedGpu

from mpiring.errors import ConfigError
from mpiring.gpu.device import Device
from mpiring.reducers.codecs.blocks import EightBit


@pytest.fixture
def memory():
    return GpuMemory(Device(SimulatedGpu()))


@pytest.mark.parametrize("codec", cases.CODECS, ids=repr)
def test_payloads_and_what_they_decode_to_have_the_bits_of_the_host(memory, codec):
    cases.check_codec(memory, codec)


def test_wrong_payloads_are_refused_and_empty_ones_are_nothing(memory):
    codec, x = EightBit(512), memory.put(np.zeros(8, np.float32))
    with pytest.raises(ConfigError, match="a payload of 3 bytes for 8 elements"):
        codec.encode(x, memory.put(np.zeros(3, np.uint8)), None, 0)
    nothing = memory.put(np.zeros(0, np.uint8))
    codec.encode(x[:0], nothing, x[:0], 0)
    codec.decode(nothing, x[:0], adds=True)
    assert codec.is_finite(memory.put(np.zeros(12, np.uint8)), 8)
