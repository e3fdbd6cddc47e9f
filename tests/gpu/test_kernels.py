"""Holds the kernels that combine vectors to the bits of the host's Reduction, on the host."""

import kernel_cases as cases
import numpy as np
import pytest
from host_kernels import HostMemory, HostStream, compiled, same

FLOAT = np.dtype(np.float32)
MEMORY = HostMemory()


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return HostStream(compiled(cases.combining_kernels(), tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize(("op", "name"), cases.CASES)
def test_results_have_the_bits_of_the_host(stream, op, name):
    cases.check_combine(stream, MEMORY, op, name)


@pytest.mark.parametrize(("offsets", "packs"), [((0, 0, 0), 250), ((8, 8, 8), 249),
                                                ((4, 52, 20), 249), ((0, 4, 0), 0)])
def test_any_place_will_do(stream, offsets, packs):
    """Whole packs are read wherever they lie alike, between elements that go one by one."""
    arrays = [cases.numbers(FLOAT, 1000, seed) for seed in range(2)]
    sources = [MEMORY.put(x, offset) for x, offset in zip(arrays, offsets)]
    out = MEMORY.put(np.zeros(1000, FLOAT), offsets[2])
    stream.combine("sum", sources, 1, [out])
    assert same(MEMORY.get(out), cases.expected("sum", arrays, 1))
    assert stream.launched[-1]["packs"] == packs


def test_a_single_source_is_divided_or_copied(stream):
    array = cases.numbers(FLOAT, 100, 0)
    x, out = MEMORY.put(array), MEMORY.put(np.zeros_like(array))
    stream.combine("mean", [x], 3.0, [out])
    assert same(MEMORY.get(out), array / np.float32(3))
    launches = len(stream.launched)
    stream.combine("mean", [x], 1, [x, out])
    assert same(MEMORY.get(out), array) and len(stream.launched) == launches
