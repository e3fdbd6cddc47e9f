"""Fast calls on simulated memory: whatever flags are seen late, and however ranks interleave."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from node_calls import KINDS, check, plan_of

from mpiring.memory.reduction import reduction
from mpiring.simulated.network import SimulatedNetwork
from mpiring.simulated.node import SimulatedMemory
from mpiring.transport.layout import (
    AREAS, BEGIN, DISAGREE, DONE, LATE, POLL, NOWHERE, PUBLISH)
from mpiring.transport.node_call import piece_call, slot_call

FLOAT32 = np.dtype(np.float32)
# The longest vector in one piece.
LONGEST = 100


class Changed:
    """Complete when another rank's flag was seen, or its own rank looks again."""

    def __init__(self, call, how, x):
        self.call, self.status, self.x = call, call.run(how, x), x

    def test(self):
        if self.status == LATE:
            self.status = self.call.run(POLL, self.x)
        return self.status != LATE


def calls_of(memory, rank, size):
    """Calls per kind and length, as a program makes them again and again; several may be open."""
    made = {}

    def call(kind, n, copy=0):
        if (kind, n, copy) not in made:
            number = 1 + KINDS.index(kind) * 100 + n
            combine = reduction("sum", FLOAT32, size)
            if n > LONGEST:
                made[kind, n, copy] = piece_call(
                    memory.ranks[rank], FLOAT32, n, 4 * LONGEST, combine)
            else:
                made[kind, n, copy] = slot_call(
                    memory.ranks[rank], FLOAT32, n, plan_of(kind, n, rank, size), combine)
            made[kind, n, copy].make_operation(
                SimpleNamespace(header=b"h" * 192, digest=number), number, "sum", None,
                note=NOWHERE if n > LONGEST else (0, 0))
        return made[kind, n, copy]

    return call


def ended(call, x, kind, before, rank, how=POLL):
    """Let a call end, and check its result."""
    changed = Changed(call, how, x)
    yield (changed,)
    assert changed.status == DONE
    check(kind, x, before, rank)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_right_whatever_is_seen_late(size, seed):
    network = SimulatedNetwork(size, node_of=size, seed=seed)
    memory, chance = SimulatedMemory(network), random.Random(seed)
    steps = [(chance.choice(KINDS), chance.choice([1, 5, LONGEST])) for _ in range(25)]
    steps += [("allreduce", chance.choice([101, 330, 1000])) for _ in range(10)]
    chance.shuffle(steps)

    def program(net):
        call_of, rank, begun = calls_of(memory, net.rank, size), net.rank, deque()
        dice = random.Random(seed + 7 * rank)
        for step, (kind, n) in enumerate(steps):
            # Nobody has more of them open than there are areas.
            while begun and (begun[0][0].sequence == step - AREAS or dice.random() < 0.3):
                yield from ended(*begun.popleft(), rank)
            before = [np.arange(n, dtype=np.float32) + 10 * step + r for r in range(size)]
            x, open_calls = before[rank].copy(), [call for call, *_ in begun]
            call = next(call for copy in range(AREAS + 1)
                        if (call := call_of(kind, n, copy)) not in open_calls)
            # Only calls of one barrier are started: the others cannot end while this rank waits.
            if n > LONGEST or not begun and dice.random() < 0.7:
                yield from ended(call, x, kind, before, rank, BEGIN)
            elif call.run(PUBLISH, x) == DONE:
                # Started, and finished later.
                begun.append((call, x, kind, before))
            else:
                yield from ended(call, x, kind, before, rank)
        while begun:
            yield from ended(*begun.popleft(), rank)

    network.run(program)


@pytest.mark.parametrize("seed", range(5))
def test_another_call_is_found_before_anything_is_used(seed):
    network = SimulatedNetwork(2, node_of=2, seed=seed)
    memory = SimulatedMemory(network)

    def program(net):
        x = np.ones(5, np.float32)
        changed = Changed(calls_of(memory, net.rank, 2)(
            "allreduce" if net.rank else "broadcast", 5), BEGIN, x)
        yield (changed,)
        assert changed.status == DISAGREE and (x == 1).all()

    network.run(program)
