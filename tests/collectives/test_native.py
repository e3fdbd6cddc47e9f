"""Tests which of MPI's own collectives are trusted, and that they are posted in turn."""

import ml_dtypes
import numpy as np
import pytest

from mpiring.collectives import native
from mpiring.collectives.select import RING_FROM_BYTES, choose
from mpiring.errors import ConfigError


def test_mpi_is_not_asked_for_what_it_gets_wrong():
    assert native.supports("float32", "sum") and native.supports("int8", "max")
    assert not native.supports("float32", "max"), "MPI drops NaN"
    assert not native.supports("float16", "sum"), "MPI has no such type"
    assert not native.supports(ml_dtypes.bfloat16, "sum")


def test_choice_by_size():
    assert choose(np.empty(8), "sum") == "native"
    assert choose(np.empty(RING_FROM_BYTES // 8), "sum") == "ring"
    assert choose(np.empty(8), "max") == "ring"
    assert choose(np.empty(8), "sum", "ring") == "ring"
    with pytest.raises(ConfigError, match="MPI's own max is wrong or missing for float64"):
        choose(np.empty(8), "max", "native")
    with pytest.raises(ConfigError, match="expected 'auto', 'ring' or 'native'"):
        choose(np.empty(8), "sum", "tree")


def test_turns_are_taken_in_order():
    turns = native.Turns()
    first, second = turns.join(3), turns.join(5)
    assert first.test() and not second.test()
    first.leave()
    assert first.test() and second.test()
    with pytest.raises(RuntimeError, match="#4 wants a native collective after #5 did"):
        turns.join(4)
