"""Holds pair averaging's schedules to the conservation of the mean, on an adversary network."""

import random

import numpy as np
import pytest

from mpiring.asynchronous.pair_averaging import Exchanges, partner
from mpiring.simulated.network import SimulatedNetwork


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_matching_is_perfect_and_known_to_all(size):
    met = set()
    for number in range(200):
        partners = [partner(3, number, rank, size) for rank in range(size)]
        assert sum(other is None for other in partners) == size % 2
        for rank, other in enumerate(partners):
            assert other != rank and (other is None or partners[other] == rank)
        met |= {(rank, other) for rank, other in enumerate(partners) if other is not None}
    assert len(met) == size * (size - 1)
    if size > 2:
        assert ([partner(4, number, 0, size) for number in range(50)]
                != [partner(3, number, 0, size) for number in range(50)])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_mean_is_conserved_however_many_rounds_each_rank_trains(size):
    for seed in range(15):
        dice = random.Random(seed)
        steps = [dice.choice([0, 3, 8, 15]) for _ in range(size)]
        x = [np.array([float(2**rank)]) for rank in range(size)]
        learnt, ends = [0.0], [0] * size

        def program(net):
            rank = net.rank
            exchanges = Exchanges(rank, size)
            copied, received = np.empty(1), np.empty(1)

            def partner_of(number):
                return partner(seed, number, rank, size)

            def snapshot():
                copied[:] = x[rank]
                return [copied]

            def take():
                x[rank] += (received - copied) / 2

            for number in range(steps[rank]):
                other = partner_of(number)
                if other is not None:
                    sent = snapshot()
                    # Whatever is learnt while snapshots travel.
                    x[rank] += number
                    learnt[0] += number
                    yield from exchanges.exchange(net, other, sent, [received])
                    take()
            end = yield from exchanges.answer(
                net, steps[rank], partner_of, snapshot, [received], take)
            ends[rank] = end
            # All is clean for more.
            assert exchanges.training == {*range(size)} - {rank}
            return end

        SimulatedNetwork(size, seed=seed).run(program)
        assert sum(x)[0] == pytest.approx(2**size - 1 + learnt[0])
        assert max(ends) >= max(steps)
        if size > 1 and min(steps) > 12:
            assert np.ptp(x) < 2**size
