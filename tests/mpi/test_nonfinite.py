"""Tests that ranks whose gradients were NaN or Inf are named, on real MPI."""

import gc

import numpy as np
import pytest

from mpiring.buckets.bucket import TensorSpec
from mpiring.numpy import DataParallel, LossScaler
from mpiring.reducers import TopK
from mpiring.training.averager import HOPELESS_STEPS, Averager
from mpiring.training.fused import Fusion

pytestmark = pytest.mark.mpi

NAMES = ["front", "middle", "back"]
WORDS = "NaN or Inf in gradients before they were averaged, and so in the means of all ranks"


@pytest.fixture
def dp(comm):
    """A model of three buckets; the front, computed last, is in the last one."""
    return DataParallel({name: np.zeros(50, np.float32) for name in NAMES}, comm, bucket_bytes=1)


def step(dp, **bad):
    """Take a step; `bad` are ranks by name, or (rank, value)."""
    for name in reversed(NAMES):
        dp.grads[name][...] = 1
        rank, value = bad[name] if isinstance(bad.get(name), tuple) else (bad.get(name), np.nan)
        if rank == dp.comm.rank or rank == "all":
            dp.grads[name][17] = value
        dp.ready(name)
    dp.wait()


def everybody(comm):
    return "rank 0" if comm.size == 1 else f"ranks {', '.join(map(str, range(comm.size)))}"


def logged(caplog):
    texts = [record.getMessage() for record in caplog.records if record.name == "mpiring"]
    caplog.clear()
    return texts


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_rank_the_step_and_the_parameter_are_named(dp, comm, caplog, value):
    last = comm.size - 1
    step(dp)
    assert dp.nonfinite == {}
    step(dp, front=(last, value))
    assert dp.nonfinite == {last: ["front"]}
    assert not logged(caplog), "the program may yet ask"
    step(dp)
    text = (f"step 1: {WORDS}: rank {last} in front (of those that leave last: others were not "
            f"looked at)")
    assert logged(caplog) == [text] * (comm.rank == 0)
    assert dp.nonfinite == {}
    step(dp)
    assert not logged(caplog)


def test_after_one_all_gradients_are_looked_at(dp, comm, caplog):
    step(dp, back=0)
    assert dp.nonfinite == {}, "it was not in the bucket that leaves last"
    step(dp, front="all")
    assert dp.nonfinite == {rank: ["front"] for rank in range(comm.size)}
    step(dp, back=0, middle=comm.size - 1)
    assert dp.nonfinite == ({0: ["back"], comm.size - 1: ["middle"]} if comm.size > 1
                            else {0: ["back", "middle"]})
    step(dp)
    assert logged(caplog) == [
        f"step 0: {WORDS}, of back (of an unknown rank: these were not looked at before; in the "
        f"next 10 steps all are)",
        f"step 1: {WORDS}: {everybody(comm)} in front"] * (comm.rank == 0), "told once by name"
    step(dp, back=0)
    assert dp.nonfinite == {0: ["back"]}
    for _ in range(10):
        step(dp)
    assert logged(caplog) == [f"step 4: {WORDS}: rank 0 in back"] * (comm.rank == 0)
    step(dp, back=0)
    assert dp.nonfinite == {}, "looked closely for longer than ten steps"


def test_who_asks_is_not_warned(dp, comm, caplog):
    scaler = LossScaler(dp)
    for number in range(HOPELESS_STEPS):
        assert not logged(caplog)
        step(dp, front="all")
        assert not scaler.step() and not dp.finite
    (text,) = logged(caplog) or [""] * (comm.rank > 0)
    assert comm.rank > 0 or f"{HOPELESS_STEPS}th such step in a row" in text
    step(dp, front=0)
    assert not logged(caplog)
    step(dp)
    assert dp.finite


def test_who_has_asked_once_is_warned_of_later_steps(dp, comm, caplog):
    assert dp.finite, "as a program does that looks at everything"
    for asks in (True, False, True):
        step(dp, front=0)
        assert not asks or not dp.finite
        step(dp)
        assert len(logged(caplog)) == (comm.rank == 0 and not asks)


def test_finite_is_known_of_all_gradients(dp):
    step(dp, back=0)
    assert not dp.finite and dp.nonfinite == {}
    dp.ready("back")
    assert not dp.finite, "is kept until the next step is complete"
    for name in ("middle", "front"):
        dp.ready(name)
    dp.wait()
    step(dp)
    assert dp.finite


@pytest.mark.parametrize(("element", "scales", "reducer"), [
    (0, True, None), (300_000, False, None), (599_999, False, TopK(0.5)), (0, True, TopK(0.5))])
def test_one_element_of_an_early_bucket_is_enough(comm, caplog, element, scales, reducer):
    """Whose means are so long that each rank checks its slices of them."""
    dp = DataParallel({name: np.zeros(600_000) for name in NAMES[1:]}, comm, reducer=reducer)
    scaler = LossScaler(dp, initial_scale=2.0**20) if scales else None
    bad = range(comm.size)[-2:]
    for number in range(HOPELESS_STEPS + 1):
        for name in reversed(NAMES[1:]):
            dp.grads[name][...] = 1
            if name == "back" and number and comm.rank in bad:
                dp.grads[name][element] = np.inf
            dp.ready(name)
        dp.wait()
        assert scaler is None or scaler.step() == (number == 0)
        assert dp.nonfinite == ({rank: ["back"] for rank in bad} if number > 1 else {})
    texts = logged(caplog)
    assert len(texts) == (comm.rank == 0) * (1 if scales else 2)
    if texts:
        names = f"rank{'s' * (comm.size > 1)} {', '.join(map(str, bad))} in back"
        assert names in texts[-1] and (f"{HOPELESS_STEPS}th such" in texts[-1]) == scales
        assert scales or texts[0].startswith("step 1") and "unknown rank" in texts[0]


def test_a_sum_that_overflows_is_told_too(comm, caplog):
    dp = DataParallel({"w": np.zeros(50, np.float32)}, comm)
    for _ in range(2):
        dp.grads["w"][...] = np.finfo(np.float32).max
        dp.ready("w")
        dp.wait()
        assert dp.nonfinite == {}
    del dp
    gc.collect()
    texts = logged(caplog)
    assert len(texts) == 2 * (comm.rank == 0 and comm.size > 1)
    assert not texts or "the means of w, although all ranks' gradients were finite" in texts[1]


def test_padding_does_not_count(comm):
    gradients = Averager([TensorSpec("w", (3,), np.dtype("float32"))], comm, Fusion(1))
    gradients.buckets[0].flat[5] = np.nan
    gradients.ready("w")
    gradients.wait()
    assert gradients.nonfinite.by_rank == {}
