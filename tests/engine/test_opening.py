"""Tests that nobody waits for ever for a rank that never opens a group, by a simulated clock."""

from types import SimpleNamespace

import pytest

from mpiring import Config, StallError
from mpiring.engine import opening

pytestmark = pytest.mark.usefixtures("own_engines")


class Comm:
    """What is asked of an MPI communicator; the other rank comes after some seconds."""

    rank, size = 0, 2

    def __init__(self, clock, after_s):
        self._clock, self._come_s = clock, after_s

    def Iallreduce(self, in_place, numbers, op):
        return SimpleNamespace(Test=lambda: self._clock.now_s >= self._come_s)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(opening, "time", SimpleNamespace(
        monotonic=lambda: clock.now_s,
        sleep=lambda seconds: setattr(clock, "now_s", clock.now_s + max(seconds, 1.0))))
    return clock


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(5, 600), (5000, 5000), (0, None)])
def test_a_rank_that_never_comes(timeout_s, limit_s, clock, capsys):
    config = Config(stall_warning_s=60, stall_timeout_s=timeout_s)
    opening.await_all(Comm(clock, 0), config, {})
    opening.await_all(Comm(clock, 30), config, {})
    assert not capsys.readouterr().err
    clock.now_s = 0.0
    if limit_s is None:
        opening.await_all(Comm(clock, 9000), config, {})
    else:
        with pytest.raises(StallError, match="not all ranks have called it"):
            opening.await_all(Comm(clock, 9000), config, {})
        assert limit_s <= clock.now_s < limit_s + 2
    error = capsys.readouterr().err
    assert error.count("mpiring: rank 0 of 2 has waited 60 s in mpiring.init()") == 1
