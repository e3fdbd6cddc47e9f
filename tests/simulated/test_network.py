"""Tests the simulated network itself: prices, faults, determinism, reports."""

from functools import partial

import numpy as np
import pytest

from mpiring.collectives import chain, ring
from mpiring.errors import StallError
from mpiring.memory.reduction import Reduction
from mpiring.simulated.prices import Computing, Link, PricedCombine, ghost
from mpiring.simulated.network import Dead, Lost, SimulatedNetwork, Slow


def allreduce(net, n=8):
    x = np.ones(n)
    yield from ring.allreduce(net, x, np.empty(n), Reduction("sum", "float64", net.size))
    return x


def one_message(net, source, dest, n=1000):
    x = np.zeros(n, np.uint8)
    if net.rank == source:
        yield (net.isend(x, dest),)
    elif net.rank == dest:
        yield (net.irecv(x, source),)


def test_a_message_costs_latency_and_bytes_over_bandwidth():
    net = SimulatedNetwork(2, between=Link(1e-3, 1e6))
    for runs in (1, 2):
        net.run(lambda channel: one_message(channel, 0, 1))
        assert net.time_s == pytest.approx(runs * (1e-3 + 1000 / 1e6))


def test_the_ranks_of_a_node_share_its_nic_each_way():
    for source_or_dest in ((0, 2), (1, 3)), ((0, 2), (1, 2)), ((0, 2), (0, 3)):
        net = SimulatedNetwork(4, between=Link(0, 1e6), node_of=2)
        net.run(*(lambda channel, pair=pair: one_message(channel, *pair)
                  for pair in source_or_dest))
        assert net.time_s == pytest.approx(2 * 1000 / 1e6)
    net = SimulatedNetwork(4, between=Link(0, 1e6), node_of=2)
    net.run(lambda channel: one_message(channel, 0, 2), lambda channel: one_message(channel, 3, 1))
    assert net.time_s == pytest.approx(1000 / 1e6), "the two directions are independent"


@pytest.mark.parametrize(("long", "short"), [((0, 1), (0, 2)), ((1, 0), (2, 0))])
def test_messages_that_meet_at_a_nic_share_it(long, short):
    """Going out, and coming in; the short one does not wait for the end of the long one."""
    quarter = 1 << 20
    net, arrivals = SimulatedNetwork(3, between=Link(0, quarter)), {}

    def program(channel, pair, n):
        yield from one_message(channel, *pair, n)
        arrivals[n] = net.time_s

    net.run(lambda channel: program(channel, long, 4 * quarter),
            lambda channel: program(channel, short, quarter))
    assert arrivals == {quarter: pytest.approx(2, abs=0.3), 4 * quarter: pytest.approx(5)}


def test_equal_seeds_give_equal_runs():
    def trace(seed):
        net, log = SimulatedNetwork(5, seed=seed), []

        def program(channel):
            for _ in range(3):
                yield from allreduce(channel)
                log.append((channel.rank, net.time_s))
        net.run(program)
        return log

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_an_adversary_delivers_out_of_order_across_channels_only():
    overtaken = 0
    for seed in range(50):
        log = []

        def program(channel, log=log):
            x = np.zeros(1)
            for number in range(4):
                if channel.rank == 0:
                    yield (channel.isend(np.array([number + 0.0]), 1),)
                else:
                    yield (channel.irecv(x, 0),)
                    log.append((channel.tag, x[0]))
        SimulatedNetwork(2, seed=seed).run(program, program)
        for tag in (0, 1):
            assert [number for other, number in log if other == tag] == [0, 1, 2, 3]
        overtaken += [tag for tag, _ in log] != sorted(tag for tag, _ in log)
    assert overtaken > 10


@pytest.mark.parametrize("early", [0, 1])
def test_a_schedule_that_uses_a_buffer_too_early_is_caught(early):
    """Rank 0 changes what it sends, or rank 1 reads what it receives."""
    def program(net):
        x = np.full(3, 5.0 * (net.rank == 0))
        request = net.irecv(x, 0) if net.rank else net.isend(x, 1)
        early_copy = x.copy()
        if net.rank == early == 0:
            x[...] = 0
        yield (request,)
        return early_copy if net.rank == early else x

    assert any((SimulatedNetwork(2, seed=seed).run(program)[1] != 5).any() for seed in range(20))


def test_a_schedule_that_relies_on_buffered_sends_is_caught():
    def program(net):
        x = np.zeros(3)
        yield (net.isend(x, 1 - net.rank),)
        yield (net.irecv(x, 1 - net.rank),)

    stalls = 0
    for seed in range(20):
        try:
            SimulatedNetwork(2, seed=seed).run(program)
        except StallError as error:
            stalls += 1
            assert "a send of 24 bytes to rank" in str(error)
    assert stalls


def test_a_lost_message_is_reported_with_what_each_rank_waits_for():
    with pytest.raises(StallError) as caught:
        SimulatedNetwork(3, faults=[Lost(0, 1, index=1)]).run(allreduce)
    text = str(caught.value)
    assert "rank 1 waits for 24 bytes from rank 0 (channel 0)" in text
    assert "rank 2 waits for 24 bytes from rank 1" in text
    assert "rank 0 waits for" in text


def test_a_dead_rank_is_named():
    for after in range(6):
        with pytest.raises(StallError, match="rank 2 is dead"):
            SimulatedNetwork(4, faults=[Dead(2, after)]).run(allreduce)


def test_a_slow_rank_slows_everybody():
    usual, slow = SimulatedNetwork(4, between=Link(1e-3)), SimulatedNetwork(
        4, between=Link(1e-3), faults=[Slow(1, 10)])
    usual.run(allreduce)
    slow.run(allreduce)
    assert slow.time_s > 3 * usual.time_s


def test_errors_of_some_ranks_can_be_looked_at():
    def program(net):
        if net.rank == 1:
            raise ValueError("a bug")
        yield from chain.barrier(net)
        return "done"

    first, second, third = SimulatedNetwork(3).run(program, return_errors=True)
    assert isinstance(second, ValueError)
    assert isinstance(first, StallError) and isinstance(third, StallError)
    with pytest.raises(ValueError, match="a bug"):
        SimulatedNetwork(3).run(program)


def test_a_busy_rank_posts_later_and_goes_on_later():
    net, went_on = SimulatedNetwork(2, between=Link(1e-3, 1e6)), []

    def program(channel):
        if channel.rank == 0:
            net.work(0, 0.5)
            net.work(0, 0.25)
            yield (channel.isend(np.zeros(1000, np.uint8), 1),)
        else:
            received = channel.irecv(np.zeros(1000, np.uint8), 0)
            net.work(1, 3)
            yield (received,)
        went_on.append((channel.rank, net.time_s))

    net.run(program)
    assert went_on == [(0, pytest.approx(0.75 + 1000 / 1e6)), (1, 3)]


def test_ranks_that_share_cores_take_turns():
    net = SimulatedNetwork(3, computing=Computing(cores=2))

    def program(channel):
        net.work(channel.rank, 1 + channel.rank)
        net.work(channel.rank, 1)
        yield ()
        clock_s = net.clock_s(channel.rank)
        net.work(2, 3 * (channel.rank == 2))
        return clock_s

    assert net.run(program) == [2, 3, 6]
    assert net.time_s == 9, "work at the end counts, too"


@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_ring_with_prices_takes_what_theory_says(p):
    n, latency, rate, combining, overhead = p * 1000, 1e-3, 1e6, 2e5, 1e-4
    net = SimulatedNetwork(p, between=Link(latency, rate), computing=Computing(overhead),
                           payload=False)
    net.run(lambda channel: ring.allreduce(
        channel, ghost(n, "uint8"), ghost(1000, "uint8"),
        PricedCombine(partial(net.work, channel.rank), combining)))
    step = 2 * overhead + latency + 1000 / rate
    assert net.time_s == pytest.approx(2 * (p - 1) * step + (p - 1) * 3 * 1000 / combining)


def test_a_message_within_a_node_is_a_copy_that_its_sender_makes():
    def program(channel):
        if channel.rank == 0:
            yield [channel.isend(np.zeros(1000, np.uint8), 1) for _ in range(3)]
        else:
            yield [channel.irecv(np.zeros(1000, np.uint8), 0) for _ in range(3)]

    net = SimulatedNetwork(2, between=Link(9, 1), within=Link(0.5, 1000), node_of=2)
    net.run(program)
    assert net.time_s == pytest.approx(3 + 0.5)


def test_bursts_pass_at_once_and_come_back_with_time():
    net = SimulatedNetwork(2, between=Link(0, 1000, burst_bytes=1500))

    def took(n):
        began = net.time_s
        net.run(lambda channel: one_message(channel, 0, 1, n))
        return net.time_s - began

    assert took(1000) == 0
    assert took(1000) == pytest.approx(0.5)
    net.time_s += 0.25
    assert took(1000) == pytest.approx(0.75)
    net.time_s += 100
    assert took(2000) == pytest.approx(0.5)


def test_ghosts_hold_nothing_and_price_copies():
    copies = []
    x = ghost(10**12, "float32", copies.append)
    x[5:8][...] = 1
    x[:10] = np.ones(10)
    np.copyto(x[:100], ghost(100, "float32"))
    assert copies == [12, 40, 400] and x.nbytes == 4 * 10**12
    assert np.add(x[:3], 1).shape == (3,)
