"""Tests predictions from measured times, and the choice that follows from them."""

import pytest

from mpiring.operations.model import Curve, Model

LINE = Curve(((100, 1e-3), (10_000, 1e-3), (1_000_000, 1e-1)))
FAST = Curve(((100, 2e-3), (1_000_000, 3e-2)))
MODEL = Model((("native", LINE), ("ring", FAST)))


def test_measured_sizes_have_their_measured_times():
    for size, seconds in LINE.points:
        assert LINE.time_s(size) == pytest.approx(seconds)


def test_between_below_and_beyond():
    assert LINE.time_s(1000) == pytest.approx(1e-3)
    assert LINE.time_s(100_000) == pytest.approx(1e-2), "halfway on logarithmic axes"
    assert LINE.time_s(0) == LINE.time_s(1) == 1e-3
    slope = (1e-1 - 1e-3) / 990_000
    assert LINE.time_s(3_000_000) == pytest.approx(1e-1 + 2_000_000 * slope)
    assert Curve(((64, 1e-3),)).time_s(128) == pytest.approx(2e-3), "one point: proportional"


def test_time_never_falls_beyond_the_measured_sizes():
    falling = Curve(((64, 2e-3), (4096, 1e-3)))
    assert falling.time_s(1 << 20) > falling.time_s(4096) * 10


def test_the_fastest_candidate_is_taken():
    assert MODEL.best(100, ["native", "ring"]) == "native"
    assert MODEL.best(1_000_000, ["native", "ring"]) == "ring"
    assert MODEL.best(1_000_000, ["native"]) == "native"
    even = Model((("native", FAST), ("ring", FAST)))
    assert even.best(1_000_000, ["native", "ring"]) == "native"
    assert even.best(1_000_001, ["native", "ring"]) == "ring", "beyond what was measured"
    hasty = Model((("native", Curve(((64, 2e-4), (4096, 1e-4)))),
                   ("ring", Curve(((64, 2e-4), (4096, 9e-4))))))
    assert hasty.best(4096 * 3, ["native", "ring"]) == "native"
    assert hasty.best(4096 * 5, ["native", "ring"]) == "ring", "too far from what was measured"
    assert MODEL.best(100, ["direct"]) == "direct", "not measured, but the only one"


def test_buckets_are_long_enough_to_forget_latency():
    fast_wire = Model((("ring", Curve(((64, 5e-6), (1 << 20, 1e-4)))),))
    slow_wire = Model((("ring", Curve(((64, 1e-2), (1 << 20, 2e-2)))),))
    assert fast_wire.bucket_bytes == 1 << 20
    assert slow_wire.bucket_bytes == 16 << 20
    assert Model(()).bucket_bytes == 25 << 20


def test_a_model_survives_being_written_down():
    assert Model.from_json(MODEL.to_json()) == MODEL


@pytest.mark.parametrize("text", [
    "", "3", "[]", '{"ring": []}', '{"ring": [[64, 0]]}', '{"ring": [[64, 1], [64, 2]]}',
    '{"ring": [[0, 1]]}', '{"ring": 5}', '{"ring": [["x", 1]]}'])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        Model.from_json(text)
