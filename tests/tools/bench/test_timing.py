"""Tests the clock's readings and what is made of them."""

import gc
import math
from types import SimpleNamespace

import pytest
from launching import SOON_S

from mpiring.tools.bench import overlap, timing
from mpiring.tools.bench.timing import calls_within, median, overlap_percentage, p95, timed


class Ranks:
    """Ranks of which another is always ten seconds slower."""

    def __init__(self, log=None):
        self.log = [] if log is None else log

    def barrier(self):
        self.log.append("barrier")

    def slowest(self, values):
        return [value + 10 for value in values]


def test_a_ratio_has_an_interval_by_rounds():
    # The machine was half as fast in the second round, for both.
    assert timing.over([[3, 3], [6, 6]], [[1, 1], [2, 2]]) == (3, 3, 3)
    ratio = timing.over([[1.0], [1.0], [1.0], [2.0]], 4 * [[1.0]])
    assert ratio.value == ratio.low == 1 and 1 < ratio.high <= 2
    assert ratio.of("x") == {"x": 1, "x_low": 1, "x_high": ratio.high}
    single = timing.over([[1.0], []], [[2.0], [3.0]])
    assert single.value == 0.5 and math.isnan(single.low) and math.isnan(single.high)
    assert math.isnan(timing.over([[1.0]], []).value)


def test_each_call_comes_after_a_barrier_and_the_slowest_rank_counts():
    ranks = Ranks()

    def call():
        ranks.log.append("call")
        assert not gc.isenabled()

    seconds = timed(ranks, call, 5, prepare=lambda: ranks.log.append("prepare"), every=2)
    pair = ["barrier", "call", "barrier", "call"]
    assert ranks.log == ["prepare", *pair, "prepare", *pair, "prepare", *pair[:2]]
    assert len(seconds) == 5 and all(10 < value < 10 + SOON_S for value in seconds)
    with pytest.raises(ZeroDivisionError):
        timed(Ranks(), lambda: 1 / 0, 1)
    assert gc.isenabled()


@pytest.mark.parametrize(("barrier", "log"), [
    (False, "prepare barrier call call prepare barrier call"),
    (True, "prepare barrier call barrier call prepare barrier call")])
def test_the_mean_of_calls_back_to_back_or_after_barriers(barrier, log, monkeypatch):
    ranks, now_s = Ranks(), [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def action(name, seconds):
        ranks.log.append(name)
        now_s[0] += seconds

    mean_s = timing.mean_seconds(ranks, lambda: action("call", 3), 3, barrier=barrier,
                                 prepare=lambda: action("prepare", 100), every=2)
    assert mean_s == 3 and " ".join(ranks.log) == log


def test_statistics():
    values = [float(value) for value in range(100, 0, -1)]
    assert median(values) == 50.5 and p95(values) == 95
    assert median([3.0]) == 3 and p95([1.0, 2.0, 9.0]) == 9
    assert math.isnan(median([])) and math.isnan(p95([]))
    assert calls_within(1.0, 0.1) == 10
    assert calls_within(1.0, 5.0) == 2 and calls_within(1.0, 0.0) == 200


def test_overlap_percentage():
    assert overlap_percentage(2, 1, 2) == 100
    assert overlap_percentage(2, 1, 3) == 0
    assert overlap_percentage(2, 1, 2.25) == 75
    assert overlap_percentage(2, 1, 4) == 0 and overlap_percentage(2, 1, 1) == 100
    assert overlap_percentage(2, 0, 2) == 100


@pytest.mark.parametrize("kind", overlap.COMPUTES)
def test_compute_is_calibrated(kind, monkeypatch):
    """On a clock that ticks with the work, whatever else the machine does."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    overlap._UNITS[kind]()()

    def unit():
        now[0] += 2e-4

    work = overlap.calibrated(SimpleNamespace(slowest=list, barrier=int), unit, 0.2)
    began = now[0]
    work()
    assert now[0] - began == pytest.approx(0.2)
