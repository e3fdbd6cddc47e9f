"""Tests collectives on numbers of Python and NumPy, and on arrays without dimensions."""

import operator
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from mpiring import ConfigError

pytestmark = pytest.mark.mpi

OPS = {"sum": operator.add, "prod": operator.mul, "max": max, "min": min, "band": operator.and_,
       "bor": operator.or_, "bxor": operator.xor}
FLOATS = float, np.float64, np.float32, np.float16, np.longdouble, ml_dtypes.bfloat16
WHOLE = int, np.int64, np.int8, np.uint16, np.uint64
COMPLEX = complex, np.complex64
BOOLS = bool, np.bool_


def calls_of(comm, **arguments):
    """Return functions that combine a scalar: twice, because the second call is faster."""
    return 2 * [lambda x: comm.allreduce(x, **arguments),
                lambda x: comm.iallreduce(x, **arguments).wait()]


@pytest.mark.parametrize(("op", "kind"), [
    *((op, kind) for kind in FLOATS for op in ("sum", "prod", "max", "min")),
    *((op, kind) for kind in WHOLE for op in OPS),
    *((op, kind) for kind in COMPLEX for op in ("sum", "prod")),
    *((op, kind) for kind in BOOLS for op in ("max", "min", "band", "bor", "bxor"))])
def test_result_is_a_scalar_of_the_same_type(comm, op, kind):
    values = [kind(1 + rank % 2) for rank in range(comm.size)]
    for call in calls_of(comm, op=op):
        result = call(values[comm.rank])
        assert type(result) is kind and result == kind(reduce(OPS[op], values))


@pytest.mark.parametrize("kind", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("op", ["mean", "avg"])
def test_mean(comm, op, kind):
    for call in calls_of(comm, op=op):
        result = call(kind(comm.rank))
        assert type(result) is kind and result == (comm.size - 1) / 2


def test_mean_is_bitwise_identical_on_all_ranks(comm):
    for algorithm in ("auto", "ring", "direct", "native"):
        for call in calls_of(comm, op="mean", algorithm=algorithm):
            assert len({x.hex() for x in comm.allgather_object(call(0.1 + comm.rank / 3))}) == 1


def test_an_earlier_handle_keeps_its_value(comm):
    handles = [comm.iallreduce(float(i)) for i in range(8)]
    assert [handle.wait() for handle in handles] == [comm.size * float(i) for i in range(8)]
    assert handles[0].wait() == 0 and handles[0].test()


@pytest.mark.parametrize("kind", [*FLOATS, *WHOLE, *COMPLEX, *BOOLS])
def test_broadcast(comm, kind):
    for root in range(comm.size):
        result = comm.broadcast(kind(comm.rank == root), root=root)
        assert type(result) is kind and result == kind(1)


def test_nan(comm):
    x = np.nan if comm.rank == 0 else 1.0
    assert np.isnan(comm.allreduce(x, op="max")) and np.isnan(comm.allreduce(x))


def test_scalar_meets_an_array_without_dimensions(comm):
    torch = pytest.importorskip("torch")
    mine = [3.5, np.array(3.5), torch.tensor(3.5, dtype=torch.float64)][comm.rank % 3]
    for call in calls_of(comm, op="mean"):
        result = call(mine)
        assert result == 3.5 and type(result) is type(mine)


def test_arrays_without_dimensions_are_combined_in_place(comm):
    torch = pytest.importorskip("torch")
    for x in (np.array(1.5), torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16)):
        for factor, call in enumerate(calls_of(comm, op="sum")):
            assert call(x) is x and x.shape == () and x == 1.5 * comm.size**(factor + 1)


def test_gpu_array_without_dimensions(comm, gpu):
    for number in (1.5, 2):
        x = gpu.put(np.array(number))
        assert comm.allreduce(x) is x and x.shape == () and x.get() == number * comm.size


WIDE = 1 << 80
MISTAKES = [
    (3, "mean", r"'mean' is not defined for int64; .* float\(x\)"),
    (np.int8(3), "mean", r"'mean' is not defined for int8; .* float\(x\)"),
    (True, "sum", r"'sum' is not defined for bool; .* int\(x\)"),
    (1j, "max", "complex numbers have no order"),
    (1.0, "bor", "'bor' is not defined for float64"),
    (1.0, "median", "op='median': expected one of sum"),
    (WIDE, "sum", r"rank \d+: .* of an integer of 81 bits.*int64; pass float\(x\), or combine"),
    (WIDE, "max", r"rank \d+: .* of an integer of 81 bits"),
    (10**5000, "prod", r"rank \d+: .* of an integer of 16610 bits"),
    (2**63, "max", r"rank \d+: .* of 9223372036854775808: the max may exceed int64"),
    (np.str_("a"), "sum", "broadcast_object"), (np.datetime64("2026"), "sum", "broadcast_object"),
    ("a", "sum", "broadcast_object"), (None, "sum", "broadcast_object"),
]


@pytest.mark.parametrize(("x", "op", "told"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(comm, x, op, told):
    for call in calls_of(comm, op=op):
        with pytest.raises(ConfigError, match=told):
            call(x)
    assert comm.allreduce(1) == comm.size


def test_an_integer_result_never_wraps(comm):
    for x in (np.iinfo(np.int64).max, np.int8(127), np.uint8(255), np.int8(-128)):
        largest = abs(int(x)) // comm.size
        for op, most in (("sum", largest if x > 0 else -largest), ("prod", 1)):
            assert comm.allreduce(type(x)(most), op=op) == most * (op == "prod" or comm.size)
            if comm.size > 1:
                with pytest.raises(ConfigError, match=f"the {op} may exceed"):
                    comm.allreduce(x, op=op)
        assert comm.allreduce(x, op="max") == x


def test_calls_that_need_slices_or_memory_name_the_remedy(comm):
    for x in (3.5, np.float32(3), True, WIDE, 10**5000):
        for call, told in ((comm.allgather, "allgather_object"), (comm.reduce_scatter, "allreduce"),
                           (comm.persistent_allreduce, "numpy.asarray"),
                           (comm.persistent_broadcast, "numpy.asarray")):
            with pytest.raises(ConfigError, match=told):
                call(x)
    with pytest.raises(ConfigError, match="broadcast_object"):
        comm.broadcast(WIDE)
    for root in (comm.size, "0", None):
        with pytest.raises(ConfigError, match="root="):
            comm.broadcast(3.5, root=root)
    assert comm.allreduce(1) == comm.size
