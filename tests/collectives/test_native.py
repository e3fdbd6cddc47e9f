"""Tests which of MPI's own collectives are trusted, and that they are posted in turn."""

import ml_dtypes
import numpy as np
import pytest

from mpiring.collectives import native
from mpiring.collectives.operation import Tuning
from mpiring.operations.algorithms import (
    EAGER_HALVES, TABLE, Case, candidates, choose, choose_halves)
from mpiring.errors import ConfigError


def test_mpi_is_not_asked_for_what_it_gets_wrong():
    assert native.supports("float32", "sum") and native.supports("int8", "max")
    assert not native.supports("float32", "max"), "MPI drops NaN"
    assert not native.supports("float16", "sum"), "MPI has no such type"
    assert not native.supports(ml_dtypes.bfloat16, "sum")


def chosen(n, op="sum", requested="auto", dtype="float64", ranks=8, nodes=8, **tuning):
    dtype = np.dtype(dtype)
    case = Case(n * dtype.itemsize, dtype, op, ranks, nodes, Tuning(**tuning))
    return choose(case, requested).name


def test_choice_by_size():
    assert chosen(8) == "native"
    assert chosen(Tuning.native_below_bytes // 8) == "ring"
    assert chosen(8, "max") == "ring", "MPI drops NaN"
    assert chosen(8, requested="ring") == "ring"
    with pytest.raises(ConfigError, match="MPI's own max is wrong or missing for float64"):
        chosen(8, "max", "native")
    with pytest.raises(ConfigError, match="expected one of auto, nccl, shared"):
        chosen(8, requested="tree")


def test_direct_is_taken_where_a_ring_would_round_at_every_hop():
    for dtype in ("float16", ml_dtypes.bfloat16):
        assert {chosen(8, op, dtype=dtype) for op in ("sum", "mean", "prod")} == {"direct"}
        assert chosen(8, "max", dtype=dtype) == chosen(8, requested="ring", dtype=dtype) == "ring"
    assert chosen(8, requested="direct") == "direct"


def test_choice_by_nodes():
    assert chosen(8, nodes=1) == chosen(8, nodes=1, requested="shared") == "eager"
    assert chosen(Tuning.eager_bytes // 8, nodes=1) == "shared"
    n = Tuning.compiled_eager_bytes // 64
    for op, more, algorithm in (("sum", 0, "eager"), ("sum", 1, "shared"), ("max", 1, "eager")):
        assert chosen(n + more, op, nodes=1, compiles=True) == algorithm
    assert chosen(n + 1, nodes=1) == "eager"
    assert chosen(8, nodes=1, dtype="longdouble") == "shared", "no rank may leave its own padding"
    for nodes in (2, 4, 7):
        assert chosen(8, nodes=nodes) == "native"
        assert chosen(8, "max", nodes=nodes) == chosen(
            8, nodes=nodes, requested="hierarchical") == "short"
        assert chosen(Tuning.short_bytes, "max", nodes=nodes) == "hierarchical"
        assert chosen(8, dtype="longdouble", nodes=nodes) == "hierarchical"
        assert chosen(Tuning.native_below_bytes // 8, nodes=nodes) == "hierarchical"
        assert chosen(1 << 20, requested="ring", nodes=nodes) == "ring"
        with pytest.raises(ConfigError, match="not all ranks share one node's memory"):
            chosen(8, requested="shared", nodes=nodes)
    for nodes, ranks in ((1, 1), (1, 8), (8, 8)):
        with pytest.raises(ConfigError, match=f"here are {ranks} ranks and {nodes} node"):
            chosen(8, requested="hierarchical", ranks=ranks, nodes=nodes)


def test_candidates_round_no_worse_than_what_auto_takes():
    narrow = [np.dtype(dtype) for dtype in ("float16", ml_dtypes.bfloat16)]
    assert candidates(8, 1) == ("shared", "native") and candidates(8, 8) == ("native", "ring")
    assert candidates(8, 4) == ("native", "ring", "hierarchical")
    for dtypes in (narrow, [np.dtype("float32"), narrow[0]]):
        assert candidates(8, 4, dtypes) == ("hierarchical",)
        assert candidates(8, 8, dtypes) == () and candidates(8, 1, dtypes) == ("shared",)
    assert candidates(8, 1, gpu="GPU 0") == ("shared",)


def test_many_nodes_take_a_logarithm_of_messages_for_few_bytes():
    for nodes, name in ((Tuning.direct_nodes, "ring"), (Tuning.direct_nodes + 1, "doubling")):
        assert chosen(8, "max", "ring", ranks=nodes, nodes=nodes) == name
        assert chosen(Tuning.short_bytes, "max", "ring", ranks=nodes, nodes=nodes) == "ring"
    assert chosen(8, requested="direct", ranks=100, nodes=100) == "direct", "sums are in rank order"
    assert chosen(8, ranks=100, nodes=100, dtype="float16") == "doubling"
    assert chosen(8, requested="ring", ranks=100, nodes=100, dtype="longdouble") == "ring"


def test_what_cannot_be_halved_gives_way():
    def halves(ranks, nodes, requested, op="sum", dtype="float32", nbytes=8):
        chosen = choose_halves(Case(nbytes, np.dtype(dtype), op, ranks, nodes, Tuning()), requested)
        return "eager" if chosen is EAGER_HALVES else next(
            row.name for row in TABLE if row.halves is chosen)

    for requested in ("auto", "native"):
        assert halves(4, 4, requested) == "ring"
        assert halves(4, 2, requested) == "hierarchical", "also where an allreduce would be short"
        assert halves(4, 1, requested) == "eager"
        assert halves(4, 1, requested, nbytes=Tuning.moved_bytes + 1) == "shared"
    assert halves(4, 4, "auto", dtype="float16") == "direct"
    assert halves(4, 2, "ring") == "ring"


def test_turns_are_taken_in_order():
    turns = native.Turns()
    first, second = turns.join(3), turns.join(5)
    assert first.test() and not second.test()
    first.leave()
    assert first.test() and second.test()
    with pytest.raises(RuntimeError, match="#4 wants a native collective after #5 did"):
        turns.join(4)
