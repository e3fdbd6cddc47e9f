"""Tests that ranks which pass different values learn of it, all of them, by both values."""

import gc
import math
import re
import weakref

import numpy as np
import pytest
from launching import needed
from threads import on_ranks

from mpiring.errors import BufferMismatchError, ConfigError, ReplicaError
from mpiring.sharding.sliced import Sliced
from mpiring.operations.consistency import same_on_all, text_of


def outcomes(size, block, **options):
    """Return the type and the text of what `same_on_all` raised on each rank, or None."""
    def rank(comm):
        try:
            with same_on_all(comm, "Thing", **options) as same:
                block(comm.rank, same)
        except Exception as exc:
            return type(exc), str(exc)
        return None
    return on_ranks(size, rank)


def test_equal_values_pass():
    def block(rank, same):
        same["lr"] = 0.5
        same["state"] = {"w": [np.arange(3.), None, float("nan")], "step": 4 if rank else 4.0}
    assert outcomes(3, block) == [None] * 3


@pytest.mark.parametrize(("value", "text0", "text1"), [
    (lambda rank: {"lr": 0.1 * (1 + rank)}, "0.1", r"\['lr'\]=0.2"),
    (lambda rank: [1, 2][rank], "1", "2"),
    (lambda rank: [1, "1"][rank], "1", "'1'"),
    (lambda rank: [True, 1][rank], "True", "1"),
    (lambda rank: [None, {"a": 3}][rank], "None", "nothing"),
    (lambda rank: np.full((2, 3), [[0, 0, 0], [0, 5 + rank, rank]]), "5", r"\[1, 1\]=6"),
    (lambda rank: np.float32([0.5, math.nan, rank]), "0.0", r"\[2\]=1.0"),
    (lambda rank: np.zeros(3, [np.int64, np.float32][rank]), "int64", "float32"),
    (lambda rank: [max, None][rank], "builtin_function", "None"),
    (lambda rank: Sliced((2 + rank,), {}, "f4"), r"\(2,\)", r"\(3,\)"),
])
def test_the_first_difference_is_named_on_all_ranks(value, text0, text1):
    errors = outcomes(3, lambda rank, same: same.update(x=value(rank % 2)), remedy="do that")
    kind, text = errors[0]
    assert kind is ConfigError and errors == [(kind, text)] * 3
    assert re.fullmatch(
        fr"rank 1: Thing has x.*{text1}.*, but on rank 0 it is .*({text0}).*; do that", text)


def test_what_differs_by_nature_is_not_compared():
    def block(rank, same):
        same["f"] = lambda: rank
        same["slices"] = Sliced((4,), {(rank, rank + 1): np.ones(1)})
        same["names"] = {"a", "b"} if rank else {"b", "a"}
    assert outcomes(2, block) == [None, None]


def test_the_error_of_one_rank_is_raised_on_all():
    def block(rank, same):
        same["x"] = rank
        if rank == 1:
            raise ReplicaError("rank 1: its weights")
    assert outcomes(3, block) == [
        (ReplicaError, "rank 1: its weights")] * 3


@pytest.mark.parametrize("kind", [ConfigError, KeyError])
def test_an_error_leaves_nothing_to_the_garbage_collector(kind):
    class Thing:
        pass

    def block(rank, same):
        local = Thing()
        left.append(weakref.ref(local))
        raise kind("a")

    left = []
    gc.disable()
    try:
        outcomes(2, block)
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_an_unforeseen_error_is_told_to_others_as_theirs():
    def block(rank, same):
        if rank == 1:
            {}["params"]
    first, second = outcomes(2, block, error=BufferMismatchError)
    assert second[0] is KeyError
    assert first == (BufferMismatchError, "rank 1: KeyError: 'params'")


def test_texts_of_values():
    assert text_of(3.0) == text_of(3) == "3" and text_of(0.1) == "0.1"
    assert text_of(float("nan")) == "nan" and text_of(float("inf")) == "inf"
    assert text_of(np.ones((2, 2))) == text_of(np.ones((2, 2), order="F"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8", "bool"])
def test_tensors_are_compared_by_their_values(dtype):
    torch = needed("torch")

    def block(rank, same):
        x = torch.eye(2, dtype=getattr(torch, dtype))
        same["state"] = {"equal": x.t() if rank else x, "one": torch.tensor(3.0) if rank else 3,
                         "x": x.conj() if rank != 1 else torch.zeros_like(x)}
    ((kind, text), *others) = outcomes(3, block)
    assert kind is ConfigError and others == [(kind, text)] * 2
    assert re.match(
        r"rank 1: Thing has state\['x'\]\[0, 0\]=.*, but on rank 0 it is .*; pass", text)
