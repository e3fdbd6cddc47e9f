"""Tests that ranges of a tensor are joined, and that what does not fit is told."""

import ml_dtypes
import numpy as np
import pytest

from mpiring.errors import ConfigError
from mpiring.sharding.sliced import Sliced, whole


def sliced(x, *ranges):
    return Sliced(x.shape, {(a, b): x.ravel()[a:b] for a, b in ranges}, x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex128", ml_dtypes.bfloat16])
def test_every_range_of_every_cut_is_read(dtype):
    x = np.arange(12).astype(dtype).reshape(3, 4)
    for cuts in ([(0, 12)], [(5, 12), (0, 5)], [(0, 1), (4, 4), (1, 4), (4, 12)]):
        here = sliced(x, *cuts)
        assert (here.shape, here.size, here.dtype) == ((3, 4), 12, x.dtype)
        assert np.array_equal(here.whole(), x)
        for start in range(13):
            for stop in range(start, 13):
                elements = here.read(start, stop)
                assert elements.dtype == x.dtype and np.array_equal(elements, x.ravel()[start:stop])


def test_what_is_read_is_a_copy_and_what_is_not_is_not_touched(tmp_path):
    np.arange(8.0).tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", np.float64, "r")
    here = Sliced((2, 4), {(0, 8): x})
    copied = here.whole()
    assert here.pieces[0, 8] is x and type(copied) is np.ndarray
    copied[...] = 0
    assert x[7] == 7


def test_missing_elements_are_named():
    x = np.arange(12.0)
    here = sliced(x, (2, 4), (6, 9))
    assert np.array_equal(here.read(7, 9), x[7:9]) and here.read(0, 0).size == 0
    for ends, missing in (((0, 3), "0 to 1"), ((3, 8), "4 to 5"), ((4, 5), "4 to 4"),
                          ((8, 12), "9 to 11"), ((10, 11), "10 to 10")):
        with pytest.raises(ConfigError, match=f"elements {missing} of .*are missing: .*sharded"):
            here.read(*ends)
    with pytest.raises(ConfigError, match="elements 3 to 12 are not in a tensor"):
        here.read(3, 13)
    # As PyTorch does with state that it does not know.
    with pytest.raises(ConfigError, match="sliced .*shape .12,.* mpiring.resilience.whole"):
        type(here)(element for element in here)


def test_pieces_of_ranks_are_merged():
    x = np.arange(12.0).reshape(4, 3)
    parts = [sliced(x, (0, 5)), sliced(x), sliced(x, (8, 12), (5, 8))]
    assert np.array_equal(parts[1].merged([parts[2], parts[0]]).whole(), x)
    for other, told in ((sliced(x, (0, 5)), "0 to 4 .*two pieces"),
                        (sliced(x, (4, 6)), "4 to 4 .*two pieces"),
                        (sliced(x.ravel(), (5, 8)), r"shape \(12,\) with pieces"),
                        (sliced(x.astype("f4"), (5, 8)), "a float32 .* a float64")):
        with pytest.raises(ConfigError, match=told):
            parts[0].merged([other])


def test_tensors_without_elements_or_dimensions():
    assert Sliced((3, 0), {}, "float32").whole().shape == (3, 0)
    assert Sliced((), {(0, 1): np.ones(1)}).whole().shape == ()


@pytest.mark.parametrize("shape, pieces, told", [
    ((3,), {}, "give its dtype"), ((3,), {(1, 4): np.ones(3)}, "1 to 3 are not in a tensor"),
    ((3,), {(-1, 1): np.ones(2)}, "-1 to 0 are not"), ((3,), {(2, 1): np.ones(1)}, "are not in"),
    ((3,), {(0, 3): np.ones(2)}, r"shape \(2,\); expected a numpy.ndarray of shape \(3,\)"),
    ((3,), {(0, 2): np.ones((2, 1))}, r"shape \(2, 1\); expected"),
    ((1,), {(0, 1): [1.0]}, "is a list"),
    ((3,), {(0, 1): np.ones(1), (1, 2): np.ones(1, int)}, "has dtype int64; expected float64"),
    ((3,), {(0, 2): np.ones(2), (1, 3): np.ones(2)}, "elements 1 to 1 .* in two pieces")])
def test_pieces_that_do_not_fit_are_refused(shape, pieces, told):
    with pytest.raises(ConfigError, match=told):
        Sliced(shape, pieces)


def test_a_nest_becomes_whole():
    x = np.arange(6.0).reshape(2, 3)
    step = np.array(3)
    nest = {"state": {0: {"m": sliced(x, (0, 2), (2, 6)), "step": step}}, "groups": [{"lr": 1.0}]}
    joined = whole(nest)
    assert np.array_equal(joined["state"][0]["m"], x) and joined["state"][0]["step"] is step
    assert joined["groups"] == nest["groups"] and isinstance(nest["state"][0]["m"], Sliced)
