"""Tests tuning in the first steps on real MPI, by a clock that the test turns; a rank is a node."""

import io
import logging
import math
import re
import types

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import Config
from mpiring.numpy import DataParallel
from mpiring.reducers import PowerSGD
from mpiring.training import autotune
from mpiring.training.search import Choice

pytestmark = pytest.mark.mpi

# Together below the length from which ranks share the check for NaN, in one more operation.
SHAPES = {f"w{i}": (20_000,) for i in range(12)}
MIB = 1 << 20
BEST = MIB // 4


def seconds_of(choice):
    """Return the seconds of a step: the fastest has buckets of 256 KiB, one in flight."""
    return (1 + 0.1 * math.log2(choice.bucket_bytes / BEST) + 0.1 * (choice.operations > 1)
            + 0.1 * (choice.long == "native" or choice.short == "native"))


class Steps:
    """Takes steps of a model, which last as long as `seconds_of` says; rank 0 has another clock."""

    def __init__(self, monkeypatch, comm, **options):
        self.dp, self.now_s, self.choices = DataParallel(
            model(), comm, bucket_bytes=MIB, **options), 0.0, []
        monkeypatch.setattr(autotune, "time", types.SimpleNamespace(
            perf_counter=lambda: self.now_s))

    def take(self, count):
        comm, dp = self.dp.comm, self.dp
        for _ in range(count):
            number = len(self.choices) + 1
            for name in SHAPES:
                dp.grads[name][...] = (comm.rank + 1) * number
                dp.ready(name)
            self.choices.append(dp.gradients.choice)
            seconds = seconds_of(dp.gradients.choice)
            # The slowest rank counts, and not rank 0, to which slow settings seem fast.
            self.now_s += seconds if comm.rank else 0.5 / seconds
            dp.wait()
            for gradient in dp.grads.values():
                np.testing.assert_array_equal(gradient, (comm.size + 1) / 2 * number)


@pytest.fixture
def ranks(tmp_path):
    """A communicator in which each rank is a node, and that saves what it finds."""
    config = Config(shared_memory=False, tuning=False, gpu_aware="no", tuning_folder=str(tmp_path))
    if MPI.COMM_WORLD.size == 1:
        pytest.skip(reason="there is no other rank")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as comm:
        yield comm


def model():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def test_ranks_agree_on_the_fastest_and_later_jobs_begin_with_it(ranks, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mpiring")
    steps = Steps(monkeypatch, ranks, autotune=True)
    steps.take(autotune.MAX_STEPS)
    chosen = steps.dp.gradients.choice
    assert (chosen.bucket_bytes, chosen.operations, chosen.long, chosen.short) == (
        BEST, 1, "auto", "auto")
    assert len(steps.dp.gradients.buckets) >= 4
    assert ranks.tunable.operations_in_flight == 1
    assert len(set(steps.choices)) > 5 and len(set(ranks.allgather_object(steps.choices[-1]))) == 1
    told = [text for text in caplog.messages if text.startswith("autotune: ")]
    assert [text.partition(": ")[2].partition(",")[0] for text in told] == (
        ["buckets of 0.25 MiB"] if ranks.rank == 0 else [])
    ranks.tunable.operations_in_flight = 2
    again = Steps(monkeypatch, ranks, autotune=True)
    again.take(4)
    assert again.choices == [Choice(MIB, 2), chosen, chosen, chosen]
    assert ("an earlier job has chosen" in caplog.text) == (ranks.rank == 0)
    other = Steps(monkeypatch, ranks, autotune=True, reducer={"w1": PowerSGD(start_step=9)})
    other.take(4)
    assert other.choices[1].bucket_bytes == MIB, "what is saved is of another Reducer"


def test_only_the_last_step_of_a_trial_has_one_more_operation(ranks, monkeypatch):
    steps, counts = Steps(monkeypatch, ranks, autotune=True), []
    steps.take(4)
    for _ in range(9):
        before = ranks.statistics.operations
        buckets = len(steps.dp.gradients.buckets)
        same = steps.dp.gradients.choice
        steps.take(1)
        if steps.dp.gradients.choice == same:
            counts.append(ranks.statistics.operations - before - buckets)
    assert set(counts) == {0} and len(counts) >= 6


def test_buckets_are_averaged_by_the_chosen_algorithms(ranks):
    dp, report = DataParallel(model(), ranks, bucket_bytes=MIB // 2), io.StringIO()
    for algorithm, slices in (("native", 3), ("ring", 1)):
        dp.gradients.use(Choice(MIB // 2, 2, short=algorithm, pieces=0.5, slices=slices))
        for name in SHAPES:
            dp.grads[name][...] = ranks.rank
            dp.ready(name)
        dp.wait()
    ranks.dump_flight(file=report)
    own, _, _ = report.getvalue().partition("in other communicators")
    algorithms = re.findall(r" bytes, (\w+): queued", own)
    assert algorithms == ["native", "native", "ring", "ring"], report.getvalue()


def test_buckets_stay_where_reducers_remember_them_or_slices_are_used(ranks, monkeypatch):
    remembering = Steps(monkeypatch, ranks, autotune=True, reducer=PowerSGD(start_step=99))
    remembering.take(30)
    scattered = Steps(monkeypatch, ranks, autotune=True)
    scattered.take(8)
    assert scattered.choices[-1].bucket_bytes != MIB
    scattered.dp.gradients.scatter()
    assert {choice.bucket_bytes for choice in remembering.choices} == {MIB}
    assert scattered.dp.gradients.choice == Choice(MIB, 2)


def test_it_is_off_unless_asked_for_and_where_bits_are_to_be_equal(
        ranks, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mpiring")
    config = Config(shared_memory=False, tuning=False, gpu_aware="no", tuning_folder="",
                    autotune=True)
    with pytest.raises(mpiring.ConfigError, match="autotune=True with deterministic=True: the fa"):
        DataParallel(model(), ranks, autotune=True, deterministic=True)
    with pytest.raises(mpiring.ConfigError, match="autotune='yes': expected True or False"):
        DataParallel(model(), ranks, autotune="yes")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as asked:
        for comm, options, changes in ((ranks, {}, False), (asked, {"autotune": False}, False),
                                       (asked, {"deterministic": True}, False), (asked, {}, True)):
            steps = Steps(monkeypatch, comm, **options)
            steps.take(8)
            assert (len(set(steps.choices)) > 1) == changes
    assert ("autotune is off: deterministic=True" in caplog.text) == (ranks.rank == 0)
