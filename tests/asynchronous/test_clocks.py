"""Holds the parameter server's schedules to the stale-synchronous clock, on an adversary network.

Weights count: element w of a slice is how many pushes of worker w it contains.
"""

import random
from functools import partial

import numpy as np
import pytest

from mpiring.asynchronous.clocks import Condition, SliceOwner, SliceWorker
from mpiring.simulated.network import SimulatedNetwork
from mpiring.transport.base import run_together

VOID_EVERY = 5


class Counts:
    """A slice that counts pushes, and how they were applied."""

    def __init__(self, p):
        self.weights = [np.zeros(p), np.zeros(1, np.float32)]
        self.rates, self.together = [], []

    def update(self, gradients, rate):
        self.rates.append(rate)
        self.together.append([int(np.argmax(x)) for x, _ in gradients])
        for x, count in gradients:
            self.weights[0] += x
            self.weights[1] += count


class Pause:
    """A worker's own time, by the network's clock."""

    complete = False

    def test(self):
        return self.complete


def train(p, steps, staleness, seed, *, reads=True):
    """Run workers of `steps[rank]` steps; return the owners, and per rank what each pull read."""
    network = SimulatedNetwork(p, seed=seed)
    owners = [SliceOwner(p, staleness, Counts(p), damped=True) for _ in range(p)]
    dice = random.Random(seed)
    slow = dice.randrange(p)

    def worker(net):
        rank, self, seen = net.rank, SliceWorker(), []
        own = np.eye(p)[rank]
        gradients = [[own.copy(), np.ones(1, np.float32)] for _ in range(p)]
        weights = [[np.empty(p), np.empty(1, np.float32)] for _ in range(p)]
        for clock in range(1, steps[rank] + 1):
            pause = Pause()
            network.later(dice.choice([0, 1, 20 * (rank == slow)]), rank,
                          partial(setattr, pause, "complete", True))
            yield (pause,)
            void = (clock + rank) % VOID_EVERY == 0
            yield from self.push(net, clock, None if void else gradients)
            if reads:
                yield from self.pull(net, clock, weights)
                assert not self.unanswered
                seen.append((clock, [list(slices[0]) for slices in weights]))
                # As they were at one time, whatever is pushed while they travel.
                assert all(total == sum(counts) for counts, total in weights)
        yield from self.finish(net, steps[rank])
        return seen

    def program(net):
        results = yield from run_together([owners[net.rank].serve(net), worker(net)])
        return results[1]

    return owners, network.run(program)


def pushes(rank, clock):
    """Return how many of a worker's first pushes are not void."""
    return sum((c + rank) % VOID_EVERY != 0 for c in range(1, clock + 1))


@pytest.mark.parametrize("staleness", [0, 1, 4, None])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_nobody_reads_what_is_too_old_or_runs_too_far_ahead(p, staleness):
    oldest = False
    for seed in range(12):
        steps = [random.Random(seed * p + rank).choice([9, 9, 4, 1]) for rank in range(p)]
        owners, seen = train(p, steps, staleness, seed)
        for rank in range(p):
            for clock, slices in seen[rank]:
                for counts in slices:
                    # Everybody sees what it has pushed itself.
                    assert counts[rank] == pushes(rank, clock)
                    for other in range(p):
                        if staleness is None:
                            continue
                        least = min(max(clock - staleness, 0), steps[other])
                        most = min(clock + staleness + 1, steps[other])
                        assert pushes(other, least) <= counts[other] <= pushes(other, most)
                        if clock >= staleness and other != rank:
                            oldest |= counts[other] < pushes(other, min(least + 1, steps[other]))
                        if staleness == 0:
                            assert counts[other] == pushes(other, min(clock, steps[other]))
        for owner in owners:
            # Each push was applied exactly once.
            expected = [pushes(rank, steps[rank]) for rank in range(p)]
            assert list(owner.store.weights[0]) == expected
            assert owner.store.weights[1] == sum(expected)
            assert owner.clocks == steps and all(owner.finished)
            # Those that are void are no updates.
            assert len(owner.store.together) == owner.updates and all(owner.store.together)
            assert staleness == 0 or owner.updates == sum(expected)
    # Nobody waits for more than that.
    assert oldest == (p > 1 and staleness is not None)


def test_pushes_of_a_clock_are_applied_together_and_in_order():
    owners, _ = train(4, [7, 7, 3, 7], 0, seed=5)
    for owner in owners:
        assert all(ranks == sorted(ranks) for ranks in owner.store.together)
        assert len(owner.store.together) == owner.updates == 7
        assert set(owner.store.rates) == {1.0}


def test_a_late_push_has_a_smaller_rate():
    owners, _ = train(3, [20] * 3, None, seed=1)
    for owner in owners:
        # Of p - 1 other workers, most have pushed once since a worker's pull.
        assert all(len(ranks) == 1 for ranks in owner.store.together)
        assert {1.0, 1 / 2, 1 / 3} <= set(owner.store.rates)
    alone, _ = train(1, [20], None, seed=1)
    assert set(alone[0].store.rates) == {1.0}


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_workers_that_never_read(staleness):
    owners, _ = train(3, [6, 2, 6], staleness, seed=2, reads=False)
    for owner in owners:
        assert owner.clocks == [6, 2, 6]


def test_who_is_behind():
    owner = SliceOwner(4, 2, Counts(4), damped=True)
    owner.clocks[:] = [5, 3, 2, 0]
    owner.finished[3] = True
    assert owner.behind(5) == [2] and owner.behind(4) == [] and owner.behind(6) == [1, 2]
    assert "clock 5 of rank 1" in repr(Condition(lambda: False, "clock 5 of rank 1"))
