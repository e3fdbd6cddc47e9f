"""Rounds: the same protocol as schedules', to the bit, however the ranks of a node interleave."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.collectives import shared
from mpiring.errors import BufferMismatchError
from mpiring.memory.reduction import reduction
from mpiring.operations.agreement import Call, agreed, refuse_others
from mpiring.record.ledger import Ledger
from mpiring.transport.base import Task
from mpiring.transport.layout import (
    BEGIN, DISAGREE, DONE, GATED, LATE, LEDGER_GATE, LEDGER_SEQUENCE, LOOK, NODE_MEMORY_BYTES,
    NOTHING, PUBLISH, ROUND_BEGAN, ROUND_SEQUENCE, ROUND_STAGE)
from mpiring.transport.node_memory import NodeMemory
from mpiring.transport.rounds import Round

FLOAT32 = np.dtype(np.float32)
OPS = "sum", "max"


class Rank:
    """One rank of a node, in this process."""

    def __init__(self, segments, rank):
        self.ledger = Ledger()
        self.memory = NodeMemory(segments, rank, range(len(segments)), self.ledger.words)
        self.rounds = {}

    def round(self, n, op="sum"):
        if (n, op) not in self.rounds:
            call = Call("allreduce", f"{op} of {n}", nbytes=4 * n)
            identity = self.ledger.identity_of(call, "eager")
            self.rounds[n, op] = call, Round(
                self.memory, identity, call.header, call.digest, op, FLOAT32, n)
        return self.rounds[n, op]

    def by_round(self, x, op="sum"):
        """An allreduce, in steps."""
        call, a = self.round(x.size, op)
        status = a.run(BEGIN, x)
        while status == LATE:
            yield
            status = a.run(LOOK, x)
        if status == DISAGREE:
            refuse_others(call, self.memory.node(a.words[ROUND_SEQUENCE], a.header, a.digest))
        assert status == DONE and a.words[ROUND_STAGE] == NOTHING

    def by_schedule(self, x, op="sum"):
        call, _ = self.round(x.size, op)
        node = self.memory.node(self.ledger.sequence, call.header, call.digest)
        self.ledger.words[LEDGER_SEQUENCE] += 1
        combine = reduction(op, x.dtype, node.size)
        task = Task(agreed(None, node, None, call, shared.eager(
            SimpleNamespace(node=node), x, op, combine)))
        while not task.done:
            task.step()
            yield


def node(size):
    segments = [np.zeros(NODE_MEMORY_BYTES, np.uint8) for _ in range(size)]
    return [Rank(segments, rank) for rank in range(size)]


def together(programs):
    """Step several, in turns, to their ends."""
    while programs:
        programs = [one for one in programs if next(one, "over") != "over"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rounds_and_schedules_mix_whoever_is_late(size):
    ranks, chance = node(size), random.Random(size)
    lengths = [chance.choice([0, 1, 3, 1000]) for _ in range(300)]

    def program(rank, mine):
        for step, n in enumerate(lengths):
            x = np.full(n, (rank + 1) * step, np.float32)
            way = ranks[rank].by_round if mine.random() < 0.6 else ranks[rank].by_schedule
            yield from way(x)
            assert (x == step * size * (size + 1) // 2).all()

    left = [program(rank, random.Random(100 + rank)) for rank in range(size)]
    while left:
        one = chance.choice(left)
        # Long turns, too: a rank may come four operations late.
        for _ in range(chance.choice([1, 1, 1, 30])):
            try:
                next(one)
            except StopIteration:
                left.remove(one)
                break
    for rank in ranks:
        assert rank.ledger.sequence == len(lengths)
        sequences = [flight.sequence for flight in rank.ledger.flights()]
        assert sequences == sorted(set(sequences)) and rank.ledger.rounds == len(sequences) > 100


@pytest.mark.parametrize("ways", [("by_round", "by_round"), ("by_round", "by_schedule"),
                                  ("by_schedule", "by_round")])
def test_another_call_is_refused_before_anything_is_used(ways):
    ranks = node(2)
    # The headers of these lie in the areas, too.
    for n in (5, 7, 5, 7, 7):
        together([rank.by_round(np.ones(n, np.float32)) for rank in ranks])
    xs = [np.ones(5, np.float32) for _ in ranks]
    steps = [getattr(rank, way)(x, op) for rank, way, x, op in zip(ranks, ways, xs, OPS)]
    errors = []
    for step in steps * 2:
        try:
            next(step, None)
        except BufferMismatchError as error:
            errors.append(str(error).partition(";")[0])
    assert sorted(errors) == [
        "rank 0 called allreduce sum of 5, but rank 1 called allreduce max of 5",
        "rank 1 called allreduce max of 5, but rank 0 called allreduce sum of 5"]
    assert all((x == 1).all() for x in xs)


def test_a_round_begins_only_where_the_gate_is_open_and_none_of_its_own_is_under_way():
    first, second = node(2)
    x, y = np.ones(3, np.float32), np.ones(3, np.float32)
    (_, a), (_, b) = first.round(3), second.round(3)
    assert a.run(PUBLISH, x) == DONE and a.words[ROUND_STAGE]
    assert a.run(BEGIN, x) == GATED and a.run(PUBLISH, x) == GATED
    assert a.run(LOOK, x) == LATE
    second.ledger.close(4)
    assert b.run(BEGIN, y) == GATED and second.ledger.sequence == 0
    second.ledger.words[LEDGER_GATE] = 0
    assert b.run(BEGIN, y) == DONE
    a.words[ROUND_BEGAN] = 0
    assert a.run(LOOK, x) == DONE and x[0] == y[0] == 2
    # Whose record the engine keeps, the ledger does not.
    assert first.ledger.rounds == 0 and second.ledger.rounds == 1
