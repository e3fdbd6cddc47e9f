"""Tests channels that join only some ranks, lanes, and schedules that run at once."""

import numpy as np
import pytest

from mpiring.errors import BufferMismatchError, StallError
from mpiring.transport.base import NO_BYTES, Members, run_together
from mpiring.simulated.network import Lost, SimulatedNetwork


def exchange(net, value):
    """Pass a number to the right, and return the left neighbor's."""
    received = np.zeros(1)
    yield (net.irecv(received, (net.rank - 1) % net.size),
           net.isend(np.array([float(value)]), (net.rank + 1) % net.size))
    return received[0]


def test_members_are_numbered_in_their_own_order():
    order = [4, 1, 3]

    def program(net):
        if net.rank not in order:
            return None
        members = Members(net, order)
        assert (members.size, members.ranks) == (3, (4, 1, 3))
        assert members.ranks[members.rank] == net.rank
        return (yield from exchange(members, net.rank))

    for seed in range(10):
        assert SimulatedNetwork(5, seed=seed).run(program) == [None, 4, None, 1, 3]


def test_members_of_members_keep_the_ranks_of_the_communicator():
    def program(net):
        inner = Members(Members(net, [3, 2, 1, 0]), [2, 0, 1, 3])
        return (yield from exchange(inner, net.rank)), inner.ranks
        yield

    for left, ranks in SimulatedNetwork(4).run(program):
        assert ranks == (1, 3, 2, 0)
    assert [left for left, _ in SimulatedNetwork(4).run(program)] == [2, 0, 3, 1]


def test_messages_of_different_lanes_never_meet():
    """Sent in one order and received in the other, of different lengths."""
    def program(net):
        for channel in (net, Members(net, [1, 0])):
            other = 1 - channel.rank
            a, b = np.zeros(1), np.zeros(2)
            sends = [channel.lane(lane).isend(np.ones(n), other) for lane, n in ((1, 1), (3, 2))]
            yield channel.lane(3).irecv(b, other), channel.lane(1).irecv(a, other), *sends
            assert a.all() and b.all()

    for seed in range(20):
        SimulatedNetwork(2, seed=seed).run(program)


def test_lane_0_is_the_channel_itself_and_a_lane_of_a_lane_is_the_operations():
    def program(net):
        first = net.isend(np.array([1.0]), 1 - net.rank)
        second = net.lane(2).lane(0).isend(np.array([2.0]), 1 - net.rank)
        received = np.zeros(1), np.zeros(1)
        yield net.lane(0).irecv(received[0], 1 - net.rank), net.irecv(received[1], 1 - net.rank)
        yield first, second
        return received[0][0], received[1][0]

    assert SimulatedNetwork(2, seed=3).run(program) == [(1, 2), (1, 2)]


@pytest.mark.parametrize("in_flight", [1, 2, 3, 10])
def test_together_returns_all_results_in_order_and_bounds_what_is_under_way(in_flight):
    def program(net):
        under_way, most = 0, 0

        def part(number):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            left = yield from exchange(net, number)
            under_way -= 1
            return left

        results = yield from run_together((part(i) for i in range(7)), in_flight)
        return results, most

    for seed in range(10):
        for results, most in SimulatedNetwork(3, seed=seed).run(program):
            assert results == list(range(7))
            assert most == min(in_flight, 7)


def test_together_of_none_and_of_schedules_that_wait_for_nothing():
    def nothing(number):
        return number
        yield

    def program(net):
        assert (yield from run_together([])) == []
        return (yield from run_together(nothing(i) for i in range(5)))

    assert SimulatedNetwork(1).run(program) == [[0, 1, 2, 3, 4]]


def test_together_begins_without_using_what_has_arrived():
    """An operation's first messages leave before its header is compared, but wait for it."""
    class Complete:
        def test(self):
            return True

    log = []

    def part():
        yield (Complete(),)
        log.append("used")

    schedule = run_together([part(), part()])
    first = tuple(next(schedule))
    assert log == []
    assert all(request.test() for request in first)
    assert log == ["used", "used"]


def test_an_error_of_a_part_is_raised():
    def wrong(net):
        yield (net.irecv(np.zeros(net.rank + 1), 1 - net.rank), net.isend(NO_BYTES, 1 - net.rank))

    def program(net):
        yield from run_together([exchange(net.lane(1), 0), wrong(net)])

    with pytest.raises(BufferMismatchError, match="expected 8 bytes from rank 1, got 0"):
        SimulatedNetwork(2).run(program)


def test_a_stall_says_what_each_part_waits_for():
    with pytest.raises(StallError) as caught:
        SimulatedNetwork(2, faults=[Lost(0, 1, index=1)]).run(
            lambda net: run_together([exchange(net.lane(i), 0) for i in range(2)]))
    assert "8 bytes from rank 0 (channel 0, lane 1)" in str(caught.value)
