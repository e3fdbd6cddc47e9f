"""Tests copies past the caches."""

import numpy as np
import pytest

from mpiring.memory import machine, streams


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(machine, "_folder", tmp_path)
    assert streams.code(compiles=True) is not None


def test_all_bytes_are_copied_and_no_others(compiled):
    numbers = np.random.default_rng(0)
    for nbytes in (0, 1, 63, 64, 65, 200, 4097):
        x = numbers.integers(1, 255, nbytes + 64, dtype=np.uint8)
        for at in (0, 1, 4, 63):
            for start in (0, 3, 8):
                y = np.zeros(nbytes + 128, np.uint8)
                assert streams.copy(y.ctypes.data + at, x.ctypes.data + start, nbytes)
                assert (y[at:at + nbytes] == x[start:start + nbytes]).all()
                assert not y[:at].any() and not y[at + nbytes:].any()


def test_without_code_nothing_is_done(monkeypatch):
    monkeypatch.setattr(streams, "code", lambda: None)
    x, y = np.ones(9), np.zeros(9)
    assert not streams.copy(y.ctypes.data, x.ctypes.data, x.nbytes) and not y.any()


@pytest.mark.parametrize("sizes, nbytes, exceeds", [
    (["32K", "1024K", "32768K"], 32 << 20, False),
    (["32K", "1024K", "32768K"], (32 << 20) + 1, True), ([], 1 << 40, False),
    (["32K", "of no use"], 1 << 40, False)])
def test_what_the_caches_hold(sizes, nbytes, exceeds, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_CACHES", tmp_path)
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert streams.exceeds_caches(nbytes) == exceeds
