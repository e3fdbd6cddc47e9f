"""Tests the pool of receive buffers."""

import numpy as np
import pytest

from mpiring.memory.scratch import Scratch


def test_buffers_are_reused_and_few_are_kept():
    scratch = Scratch(keep=2)
    with scratch.borrow(1000, "float32") as first, scratch.borrow(10, "int8") as second:
        assert first.shape == (1000,) and first.dtype == np.float32 and second.shape == (10,)
        assert not np.shares_memory(first, second)
    with scratch.borrow(900, "float32") as again:
        assert np.shares_memory(first, again)
    with scratch.borrow(5, "float64"), scratch.borrow(5, "float64"), scratch.borrow(0, "int8"):
        pass
    assert len(scratch._idle) == 2


def test_a_buffer_of_a_failed_operation_is_not_lent_again():
    scratch = Scratch(keep=2)
    with pytest.raises(RuntimeError), scratch.borrow(10, "float32"):
        raise RuntimeError("MPI may still write here")
    assert scratch._idle == []
