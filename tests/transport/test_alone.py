"""Tests that a rank alone on its node needs nobody."""

from types import SimpleNamespace

import numpy as np

from mpiring.collectives import shared
from mpiring.memory.reduction import Reduction
from mpiring.transport.alone import Alone
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


def test_schedules_of_a_node_run_on_it():
    x = np.arange(5.0)
    alone = SimpleNamespace(node=Alone(2))
    finished(shared.eager(alone, x, "sum", Reduction("sum", x.dtype, 1)))
    finished(shared.staged(Alone(2), x, Reduction("sum", x.dtype, 1)))
    assert list(x) == [0, 1, 2, 3, 4]
