"""Rounds: the same protocol as schedules', to the bit, however the ranks of a node interleave."""

import itertools
import random
from types import SimpleNamespace

import contract
import ml_dtypes
import numpy as np
import pytest
from node_calls import COMBINE, KINDS, check, plan_of

from mpiring.collectives import shared
from mpiring.collectives.operation import Tuning
from mpiring.errors import BufferMismatchError
from mpiring.jit import cache
from mpiring.memory.arrays import dtype_name
from mpiring.memory.reduction import reduction
from mpiring.operations.agreement import Call, agreed, refuse_others
from mpiring.record.counter import OperationCounter
from mpiring.transport import compiled
from mpiring.transport.base import Task
from mpiring.transport.layout import (
    BEGIN, DISAGREE, DONE, FALLBACK, GATED, IDLE, IN_SLOT, LATE, NODE_MEMORY_BYTES, NOWHERE, POLL,
    PUBLISH, WINDOWS)
from mpiring.transport.node_memory import NodeMemory
from mpiring.transport.node_call import NodeCall, piece_call, slot_call
from mpiring.transport.windows import Windows

FLOAT32 = np.dtype(np.float32)
OPS = "sum", "max"
# With pieces of private vectors so short that there are several.
TUNING = Tuning(staged_bytes=16 << 10)


class Rank:
    """One rank of a node, in this process."""

    def __init__(self, segments, rank, compiled):
        self.compiled = compiled
        self.counter = OperationCounter()
        self.memory = NodeMemory(segments, rank, range(len(segments)), self.counter)
        self.rounds, self.windows = {}, Windows()

    def round(self, n, op="sum", kind="allreduce", dtype=FLOAT32, **settings):
        """By slots; or in place, given where."""
        key = n, op, kind, *settings.values()
        if key not in self.rounds:
            call = Call(kind, f"{op} of {n}", nbytes=4 * n)
            identity = self.counter.identity_of(call, "eager")
            size, op = len(self.memory.ranks), op if kind in COMBINE else ""
            combine = reduction(op, dtype, size) if op else None
            if settings.get("note") == NOWHERE:
                a = piece_call(self.memory, dtype, n, TUNING.staged_bytes, combine)
            elif "find" in settings:
                a = NodeCall(self.memory, dtype, n, WINDOWS, combine)
            else:
                a = slot_call(self.memory, dtype, n, self.plan(kind, n), combine)
            a.make_operation(call, identity, op, compiled.code(
                op, dtype_name(dtype), size) if self.compiled else None, **settings)
            self.rounds[key] = call, a
        return self.rounds[key]

    def plan(self, kind, n):
        return plan_of(kind, n, self.memory.rank, len(self.memory.ranks))

    def by_round(self, x, op="sum", kind="allreduce", **settings):
        """A collective, in steps."""
        call, a = self.round(x.size, op, kind, x.dtype, **settings)
        status = a.run(BEGIN, x)
        while status == LATE:
            yield
            status = a.run(POLL, x)
        if status == DISAGREE:
            refuse_others(call, a.node())
        if status == FALLBACK:
            yield from self.rest(a, x)
            status = DONE
        assert status == DONE and a.stage == IDLE

    def by_schedule(self, x, op="sum", kind="allreduce", in_place=False):
        call, a = self.round(x.size, op, kind)
        node = self.memory.node(self.counter.sequence, call.header, call.digest)
        self.counter.sequence += 1
        combine = reduction(op, x.dtype, node.size)
        yield from stepped(agreed(
            None, node, None, call, shared.allreduce(self.operation(node), x, op, combine)
            if in_place else shared.by_plan(node, x, self.plan(kind, x.size), combine)))

    def operation(self, node):
        return SimpleNamespace(node=node, windows=self.windows, tuning=TUNING)

    # Of vectors that may be in windows; only compiled rounds are in place.

    def by_slices(self, x):
        position = self.windows.position_of(x)
        if not self.compiled and position != NOWHERE:
            return self.by_schedule(x, in_place=True)
        return self.by_round(x, note=position, find=self.windows.vectors)

    def rest(self, a, x):
        """As engine.fast_calls does it."""
        node = a.node()
        yield from stepped(shared.located(
            self.operation(node), node.notes(2), x, a.op, reduction(a.op, a.dtype, node.size)))
        node.leave()
        a.stage = IDLE

    def started(self, x):
        """It may come back late."""
        return self.by_round(x, note=IN_SLOT, barriers=3)


def stepped(schedule):
    task = Task(schedule)
    while not task.done:
        task.step()
        yield


@pytest.fixture(params=["Python", "compiled", "either"])
def node(request):
    """Return a function that returns the ranks of a node, whose rounds run in some form."""
    if request.param != "Python":
        request.getfixturevalue("machine_code")

    def made(size):
        segments = [np.zeros(NODE_MEMORY_BYTES, np.uint8) for _ in range(size)]
        return [Rank(segments, rank, request.param == "compiled" or request.param == "either"
                     and rank % 2 == 1) for rank in range(size)]

    return made


def together(programs):
    """Step several, in turns, to their ends."""
    while programs:
        programs = [program for program in programs if next(program, "over") != "over"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rounds_and_schedules_mix_whoever_is_late(node, size):
    ranks, chance = node(size), random.Random(size)
    calls = [(chance.choice([0, 1, 3, 1000]), chance.choice(KINDS)) for _ in range(400)]

    def program(rank, dice):
        for step, (n, kind) in enumerate(calls):
            before = [np.arange(n, dtype=np.float32) + (r + 1) * step for r in range(size)]
            way = ranks[rank].by_round if dice.random() < 0.6 else ranks[rank].by_schedule
            x = before[rank].copy()
            yield from way(x, kind=kind)
            check(kind, x, before, rank)

    in_any_order(chance, [program(rank, random.Random(100 + rank)) for rank in range(size)])
    for rank in ranks:
        assert rank.counter.sequence == len(calls)
        sequences = [flight.sequence for flight in rank.counter.flights()]
        assert sequences == sorted(set(sequences))
        assert rank.counter.fast_calls == len(sequences) > 100


def in_any_order(chance, left):
    """Step programs to their ends."""
    while left:
        program = chance.choice(left)
        # Long turns, too: a rank may come four operations late.
        for _ in range(chance.choice([1, 1, 1, 30])):
            try:
                next(program)
            except StopIteration:
                left.remove(program)
                break


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rounds_in_place_mix_wherever_vectors_are(node, size):
    ranks, chance = node(size), random.Random(size)
    arrays = {rank: [np.zeros(20_000, np.float32)] for rank in ranks}
    for number in (5, 6):
        roots = [np.zeros(100_000, np.uint8) for _ in ranks]
        for rank, root in zip(ranks, roots):
            rank.windows.add(root, number, roots, ranks.index(rank))
            arrays[rank].append(root[:80_000].view(np.float32))
    # Mostly all ranks' vectors lie at the same place of one window, but it may be any.
    steps = [(chance.choice([1, 5, 2000, 19_000]), chance.choice([0, 1, 1, 1, 2, 2]),
              chance.choice([0, 0, 0, 7, 900])) for _ in range(300)]

    def program(position, dice):
        rank = ranks[position]
        for step, (n, window, offset) in enumerate(steps):
            if dice.random() < 0.05:
                window, offset = dice.choice([0, 1, 2]), dice.choice([0, 3, 500])
            x = arrays[rank][window][offset:offset + n]
            x[:] = (position + 1) * step
            others = rank.started, lambda x: rank.by_schedule(x, in_place=True)
            way = rank.by_slices if dice.random() < 0.8 else dice.choice(others)
            yield from way(x)
            assert (x == step * size * (size + 1) // 2).all()

    in_any_order(chance, [program(rank, random.Random(100 + rank)) for rank in range(size)])
    places = {rank: sum(a.by_slices for _, a in rank.rounds.values()) for rank in ranks}
    assert all(places[rank] > 10 for rank in ranks if rank.compiled)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", [("by_round", "by_round"), ("by_round", "by_schedule"),
                                  ("by_schedule", "by_round")])
def test_another_call_is_refused_before_anything_is_used(node, ways, kind):
    ranks = node(2)
    # The headers of these lie in the areas, too.
    for n in (5, 7, 5, 7, 7):
        together([rank.by_round(np.ones(n, np.float32), kind="broadcast") for rank in ranks])
    xs = [np.ones(5, np.float32) for _ in ranks]
    steps = [getattr(rank, way)(x, op, kind) for rank, way, x, op in zip(ranks, ways, xs, OPS)]
    errors = []
    for step in steps * 2:
        try:
            next(step, None)
        except BufferMismatchError as error:
            errors.append(str(error).partition(";")[0])
    assert sorted(errors) == [
        f"rank 0 called {kind} sum of 5, but rank 1 called {kind} max of 5",
        f"rank 1 called {kind} max of 5, but rank 0 called {kind} sum of 5"]
    assert all((x == 1).all() for x in xs)


def test_a_round_begins_only_where_the_gate_is_open_and_none_of_its_own_is_under_way(node):
    first, second = node(2)
    x, y = np.ones(3, np.float32), np.ones(3, np.float32)
    (_, a), (_, b) = first.round(3), second.round(3)
    assert a.run(PUBLISH, x) == DONE and a.stage
    assert a.run(BEGIN, x) == GATED and a.run(PUBLISH, x) == GATED
    assert a.run(POLL, x) == LATE
    second.counter.close(4)
    assert b.run(BEGIN, y) == GATED and second.counter.sequence == 0
    second.counter.gate = 0
    assert b.run(BEGIN, y) == DONE
    a.began = 0
    assert a.run(POLL, x) == DONE and x[0] == y[0] == 2
    # Whose record the engine keeps, the counter does not.
    assert first.counter.fast_calls == 0 and second.counter.fast_calls == 1


def combined(size, dtype, op, compiled):
    """Return what rounds make of vectors that try the edges of a dtype, on each rank."""
    xs = [contract.contribution(rank, 1003, dtype) for rank in range(size)]
    if np.dtype(dtype).kind != "i":
        # Sums that overflow, or are not a number.
        for rank, x in enumerate(xs):
            with np.errstate(over="ignore"):
                x[:4] = (3e38, (-1) ** rank * np.inf, np.inf, np.nan)
    segments = [np.zeros(NODE_MEMORY_BYTES, np.uint8) for _ in range(size)]
    ranks = [Rank(segments, rank, compiled) for rank in range(size)]
    steps = []
    for rank, x in zip(ranks, xs):
        _, a = rank.round(x.size, op, dtype=x.dtype)
        assert (a.code is not None) == (compiled and (size <= 4 or x.dtype.itemsize > 2))
        steps.append(rank.by_round(x, op))
    together(steps)
    return xs


@pytest.mark.parametrize("size", [2, 3, 4])
def test_long_parts_are_reduced_wherever_they_are(node, size):
    """Ranks in Python and compiled ones mix; lengths differ, and no part is next to another."""
    chance, dice = random.Random(size), np.random.default_rng(size)
    ranks = node(size)
    for step in range(24):
        dtype = np.dtype(chance.choice(["float32", "float64", "int8"]))
        lengths = [chance.choice([0, 1, 1000, 131_072 // dtype.itemsize, 200_000]) for _ in ranks]
        # NumPy alone can add numbers at odd addresses, so such ranks use Python.
        rooms = [[np.zeros(1 + n * dtype.itemsize + 8, np.uint8) for n in lengths] for _ in ranks]
        starts = [chance.choice([0, 0, 1]) for _ in ranks]
        parts = [[room[start:start + n * dtype.itemsize].view(dtype)
                  for room, n in zip(row, lengths)] for row, start in zip(rooms, starts)]
        values = [[dice.integers(0, 9, n).astype(dtype) for n in lengths] for _ in ranks]
        for row, value in zip(parts, values):
            for x, y in zip(row, value):
                x[:] = y
        call = Call("reduce_scatter", f"step {step}")

        def program(position):
            rank, row = ranks[position], parts[position]
            node = rank.memory.node(rank.counter.sequence, call.header, call.digest)
            rank.counter.sequence += 1
            schedule = shared.reduce_rows(node, row, reduction("sum", dtype, size), 128 << 10)
            return stepped(agreed(None, node, None, call, schedule))

        in_any_order(chance, [program(position) for position in range(size)])
        for position, row in enumerate(parts):
            assert np.array_equal(
                row[position], sum(value[position] for value in values).astype(dtype))
            # Nothing is written around a part.
            start = starts[position]
            assert not any(room[:start].any() or room[start + x.nbytes:].any()
                           for room, x in zip(rooms[position], row))


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "float16",
                                   ml_dtypes.bfloat16])
def test_compiled_rounds_have_the_bits_of_numpy(dtype, size):
    for op in ("sum", "mean"):
        if contract.defined(op, dtype):
            by_numpy, by_code = (combined(size, dtype, op, way) for way in (False, True))
            for results in (by_numpy, by_code):
                assert all(x.tobytes() == results[0].tobytes() for x in results)
            a, b = by_numpy[0], by_code[0]
            numbers = a == a
            assert a[numbers].tobytes() == b[numbers].tobytes()
            assert (b[~numbers] != b[~numbers]).all()


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_any_16_bits_in_place_are_rounded_once(dtype, size):
    dice = np.random.default_rng(size)
    segments = [np.zeros(NODE_MEMORY_BYTES, np.uint8) for _ in range(size)]
    ranks = [Rank(segments, rank, compiled=True) for rank in range(size)]
    roots = [np.zeros(10_000, np.uint16) for _ in ranks]
    for position, rank in enumerate(ranks):
        rank.windows.add(roots[position].view(np.uint8), 5, roots, position)
    # Where two numbers begin on a word, and where they do not.
    for n, start, op in itertools.product((1, 2, 5, 3000, 3333), (0, 1), ("sum", "mean")):
        xs = [root[start:start + n].view(dtype) for root in roots]
        for root in roots:
            root[:] = dice.integers(0, 1 << 16, root.size)
        before, want = [root.copy() for root in roots], contract.rounded_once(xs, op)
        together([rank.by_round(x, op, note=rank.windows.position_of(x), find=rank.windows.vectors)
                  for rank, x in zip(ranks, xs)])
        for x, root, old in zip(xs, roots, before):
            assert contract.same_bits(x, want)
            assert np.array_equal(root[:start], old[:start])
            assert np.array_equal(root[start + n:], old[start + n:])
    assert all(a.code is not None for rank in ranks for _, a in rank.rounds.values())


def test_a_python_without_its_lock_calls_no_compiled_code(machine_code, monkeypatch):
    monkeypatch.setattr(cache, "_folder", machine_code)
    assert compiled.code("sum", "float32", 2) is not None
    monkeypatch.setattr(compiled, "_HAS_LOCK", False)
    assert compiled.code("sum", "float32", 2) is None
