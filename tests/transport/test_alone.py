"""Tests that a rank alone on its node needs nobody."""

from mpiring.transport.node_memory import Alone
from mpiring.transport.base import Task


def finished(schedule):
    task = Task(schedule)
    task.step()
    assert task.done
    return task.result


def test_it_meets_itself():
    node = Alone(7)
    assert (node.rank, node.size, list(node.ranks)) == (0, 1, [7])
    assert node.test() and node.agrees() and node.headers() == []
    assert finished(node.share(3, 4)) == [(3, 4)]
    assert node.lane(1).barrier().test()
