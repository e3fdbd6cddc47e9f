"""Checks the arithmetic on NumPy arrays, and which of them are accepted."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.horovod.arrays import NumPyArrays, scale
from mpiring.horovod.operations import Operations
from mpiring.memory.arrays import may_overlap


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("divisor", [2, 7, 200])
def test_integers_are_rounded_toward_zero(dtype, divisor):
    limits = np.iinfo(dtype)
    values = [limits.min, limits.min + 1, limits.min // 3, 0, 5, limits.max]
    x = np.array(values, dtype)
    scale(x, 1.0, divisor)
    assert x.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]


OVERLAPPING = np.lib.stride_tricks.as_strided(np.ones(4), (3, 2), (8, 8))
READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(("x", "text"), [
    (READ_ONLY, "read-only"), (READ_ONLY[::2], "read-only"),
    (OVERLAPPING, "elements may share memory"), ([1.0, 2.0], "got builtins.list"),
    (np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), "elements may share memory")])
def test_arrays_that_cannot_take_a_result(x, text):
    operations, ranks = Operations(NumPyArrays()), SimpleNamespace(matcher=None)
    for call in (operations.allreduce_async_, operations.allreduce_,
                 lambda x, process_set: operations.grouped_allreduce_(
                     [np.ones(2), x], process_set=process_set),
                 lambda x, process_set: operations.grouped_allreduce_async_(
                     [np.ones(2), x], process_set=process_set)):
        with pytest.raises(ValueError, match=text):
            call(x, process_set=ranks)
    # Other calls only read it.
    with pytest.raises(AttributeError, match="submit"):
        operations.allreduce_async(x, process_set=ranks)


@pytest.mark.parametrize(("x", "text"), [
    (np.ma.masked_less(np.arange(3.0), 1), "masked arrays would lose their mask"),
    (np.ones(3, ">f4"), "foreign byte order; convert"), (np.array(["a"]), "cannot travel"),
    (np.zeros(2, "f4,i4"), "cannot travel")])
def test_arrays_that_are_refused(x, text):
    """By each function, before anything is sent."""
    operations, ranks = Operations(NumPyArrays()), SimpleNamespace(
        matcher=None, root=lambda rank: rank, comm=SimpleNamespace(size=1, rank=0))
    for name in ("allreduce", "allreduce_", "allgather", "alltoall", "reducescatter", "broadcast",
                 "broadcast_", "grouped_allreduce", "grouped_allreduce_", "grouped_allgather",
                 "grouped_reducescatter"):
        argument = [x, x] if name.startswith("grouped") else x
        root = (0,) if name.startswith("broadcast") else ()
        with pytest.raises(ValueError, match=text):
            getattr(operations, name)(argument, *root, process_set=ranks)


def test_overlap_is_found():
    x = np.zeros((4, 6, 2))
    for view in (x, x.T, x[::-1, ::2], x[:, :1], x[1:1], x[..., ::-1], np.zeros(()),
                 x.transpose(1, 2, 0)[:, ::-1]):
        assert not may_overlap(view.shape, view.strides, view.itemsize)
    for shape, strides in (((3, 2), (8, 8)), ((2,), (0,)), ((2, 2), (8, 12)), ((5,), (-4,))):
        assert may_overlap(shape, strides, 8)
