"""Tests the predictions of training steps: what is read of a trace, strategies, command line."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from launching import needed
from traces import metadata, piece, written

from mpiring.__main__ import main
from mpiring.buckets.bucket import TensorSpec
from mpiring.errors import ConfigError
from mpiring.tools.busy import ProcessorUse
from mpiring.tools.simulate import counted, step_command
from mpiring.tools.simulate.algorithms import predict
from mpiring.tools.simulate.cluster import Cluster
from mpiring.tools.simulate.codecs import REDUCERS, measured
from mpiring.tools.simulate.profile import Profile, StepCompute, read_profile
from mpiring.tools.simulate.step import Workload, predict_step, slowest
from mpiring.tools.simulate.step_command import verdict
from mpiring.tools.simulate.strategies import (
    _compressed, _sharded_with_overlap, averaged, sharded, strategies,
)

TENSORS = [["first", [1000, 500], "float32"], ["last", [500], "float32"]]
SPECS = metadata(0, "model", tensors=TENSORS, overlap=True)
USE = ProcessorUse(1.0, "host", 1.0, 2, frozenset({0, 1}), float("inf"))
# Everything costs nothing but bytes between nodes.
CLUSTER = Cluster(latency_s=0.0, bandwidth=1e9, goodput=1.0, overhead_s=0.0, reduction_rate=1e15,
                  node_latency_s=0.0, node_bandwidth=1e15, barrier_s=0.0)


def step_events(number, began, *, slow=1.0):
    """Return the events of a step of 100 ms, of which 10 are spent with waiting amid forward.

    Update 10 ms, forward to 50, the last layer's gradient at 60, the first one's at 80.
    """
    def at(ms):
        return began + 1000 * slow * ms

    return [piece("phase", at(0), at(10), name="optimizer"),
            piece("wait", at(30), at(40), group="", sequence=number),
            piece("phase", at(20), at(50), name="forward"),
            piece("ready", at(60), at(80), at_us=[20_000 * slow, 0]),
            piece("wait", at(80), at(100), group="", sequence=number),
            piece("step", at(0), at(100), step=number)]


def steps(count, **options):
    return [event for number in range(1, count + 1)
            for event in step_events(number, 1e5 * number, **options)]


def profile_of(*steps, tensors=TENSORS):
    """Return a profile of these steps of one rank."""
    specs = [TensorSpec(name, tuple(shape), np.dtype(dtype)) for name, shape, dtype in tensors]
    return Profile(specs, steps, 0.1, 1, 1, True, "made up")


@functools.cache
def named():
    """Return the strategies by name; their codecs are measured once."""
    return {strategy.name: strategy for strategy in strategies(profile_of(compute()))}


def compute(scale=1.0, update_s=0.01):
    return StepCompute(update_s, (0.02 * scale, 0.04 * scale), (0.07 * scale, 0.05 * scale),
                       0.07 * scale, 0.1)


def test_waits_are_left_out_of_what_a_step_computes(tmp_path):
    written(tmp_path, SPECS, *steps(4), drift=0)
    profile = read_profile(str(tmp_path), None)
    assert len(profile.steps) == 3, "the first step warms up"
    for step in profile.steps:
        assert step.update_s == pytest.approx(0.01)
        assert step.forward_s == pytest.approx((0.02, 0.04))
        assert step.ready_s == pytest.approx((0.07, 0.05)) and step.compute_s == step.ready_s[0]
    assert profile.nbytes == 4 * 500_500 and profile.overlap
    assert profile.step_s == pytest.approx(0.1) and (profile.ranks, profile.nodes) == (1, 1)


def test_a_long_step_and_one_that_is_cut_off_do_not_count(tmp_path):
    events = [*steps(5), *step_events(6, 1e6, slow=5), piece("step", 2e6, 2.1e6, step=7)]
    path = written(tmp_path, SPECS, *events, drift=0)
    assert len(read_profile(str(tmp_path), None).steps) == 4
    path.write_text(path.read_text()[:-900])
    assert len(read_profile(str(tmp_path), None).steps) == 4


@pytest.mark.parametrize(("events", "problem"), [
    ([SPECS, *steps(4), metadata(0, "model", tensors=TENSORS[:1], overlap=True)],
     "several models were trained"),
    ([SPECS, *steps(1)], "does not say when gradients became ready"),
    (steps(4), "does not say when gradients became ready"),
    ([metadata(0, "model", tensors=[["x", [3], "string"]], overlap=True), *steps(4)],
     "model cannot be read"),
    ([metadata(0, "model", tensors=[["x", [10**9, 10**3], "float32"]], overlap=True), *steps(4)],
     "model cannot be read: an array of 4000000000000 bytes: expected 1 to"),
    ([metadata(0, "model", tensors=[*TENSORS, TENSORS[0]], overlap=True), *steps(4)],
     "times of 2 gradients, but its model has 3"),
    ([metadata(0, "model", tensors=[[1, 2]], overlap=True), *steps(4)],
     "rank00000.json, line 4: 'model': tensors=a list: expected a list, and in it name, shape")])
def test_a_trace_that_does_not_tell_is_refused(tmp_path, events, problem):
    written(tmp_path, *events)
    with pytest.raises(ConfigError, match=problem):
        read_profile(str(tmp_path), None)


def test_what_the_wire_cannot_hide_is_exposed():
    work = Workload(profile_of(compute()), replace(CLUSTER, nodes=2))
    assert [[tensor.name for tensor in bucket.tensors] for bucket in work.buckets] == [
        ["first"], ["last"]]
    # Each of two nodes sends the array once: 2 ms, all of it after the last gradient.
    assert predict_step(work, averaged).seconds == pytest.approx(0.07 + 0.002, rel=0.01)
    alone = predict_step(Workload(profile_of(compute()), CLUSTER), averaged)
    assert alone.seconds == pytest.approx(alone.compute_s) == 0.07
    # Ten times as long, the wire is busy from the first gradient on.
    slow = Workload(profile_of(compute(), tensors=[["a", [5_000_000], "float32"]] * 2),
                    replace(CLUSTER, nodes=2))
    assert predict_step(slow, averaged).seconds == pytest.approx(0.05 + 0.04, rel=0.01)


def test_buckets_wait_for_the_end_where_they_do_not_overlap():
    profile = profile_of(compute(), tensors=[["a", [5_000_000], "float32"]] * 2)
    cluster = replace(CLUSTER, ranks_per_node=2, reduction_rate=1e9, barrier_s=5e-3)
    each = predict("shared", cluster, 20_000_000).seconds
    times = [predict_step(Workload(replace(profile, overlap=overlap), cluster), averaged).seconds
             for overlap in (True, False)]
    assert times[1] == pytest.approx(0.07 + 2 * each, rel=0.01)
    # Sums take the processor time that the compute would have; only barriers can be hidden.
    assert 0.07 + each < times[0] < times[1] - 5e-3


def test_gpus_compute_while_their_cores_add():
    profile = profile_of(compute(), tensors=[["a", [5_000_000], "float32"]] * 2)
    cluster = replace(CLUSTER, ranks_per_node=2, reduction_rate=1e9, gpus=True)
    each = predict("shared", cluster, 20_000_000).seconds
    assert each > 0.02
    step = predict_step(Workload(profile, cluster), averaged)
    assert step.seconds == pytest.approx(0.05 + 2 * each, rel=0.01)
    assert step.compute_s == pytest.approx(0.07)


@pytest.mark.parametrize("strategy", [averaged, sharded, _sharded_with_overlap])
def test_gpus_make_no_difference_if_cores_have_nothing_to_do(strategy):
    profile = profile_of(compute(), tensors=[["a", [5_000_000], "float32"]] * 2)
    cores, gpus = (predict_step(Workload(profile, replace(CLUSTER, nodes=2, gpus=gpus)), strategy)
                   for gpus in (False, True))
    # A core looks for messages once per millisecond.
    assert gpus.seconds == pytest.approx(cores.seconds, abs=2e-3)


@pytest.mark.parametrize("strategy", [averaged, sharded])
@pytest.mark.parametrize("nodes", [4, 10])
def test_one_node_stands_for_all(strategy, nodes):
    cluster = Cluster(nodes, 2, latency_s=1e-4, bandwidth=1e9)
    work = Workload(profile_of(compute()), cluster)
    folded, stepped = (predict_step(work, strategy, fold=fold) for fold in (True, False))
    assert (folded.how, stepped.how) == ("symmetry", "stepped")
    assert folded.seconds == pytest.approx(stepped.seconds, rel=0.01)


def test_a_step_waits_for_the_slowest_of_all_ranks():
    profile = profile_of(*[compute()] * 9, compute(2.0))
    for fold in (True, False):
        times = [predict_step(Workload(profile, CLUSTER.of(nodes, 1)), averaged, steps=30,
                              fold=fold).compute_s for nodes in (1, 2, 8)]
        expected = [0.07 * (2 - 0.9 ** nodes) for nodes in (1, 2, 8)]
        assert times == pytest.approx(expected, rel=0.1)


def test_the_slowest_step_gets_to_each_point_last():
    early, late = compute(), replace(compute(), update_s=0.02, forward_s=(0.03, 0.035),
                                     ready_s=(0.06, 0.055))
    assert slowest([early, late]) == replace(
        early, update_s=0.02, forward_s=(0.03, 0.04), ready_s=(0.07, 0.055))


def test_ranks_that_share_cores_compute_in_turns():
    work = [Workload(profile_of(compute()), replace(CLUSTER, nodes=nodes, cores=2))
            for nodes in (2, 3, 4)]
    two, three, four = (predict_step(workload, averaged).seconds for workload in work)
    assert two < 0.08 and 0.13 < three < 0.16 and 0.13 < four < 0.16


def test_copies_of_the_system_take_time_from_the_compute():
    profile = profile_of(compute(), tensors=[["a", [5_000_000], "float32"]] * 2)
    cluster = replace(CLUSTER, nodes=2, bandwidth=1e12, cores=2)
    free, copied = (predict_step(Workload(profile, replace(cluster, copy_rate=rate)),
                                 averaged).seconds for rate in (0.0, 1e9))
    # Each node sends and receives the array once, 40 MB each way.
    assert copied - free == pytest.approx(0.08, rel=0.1)


def test_sharded_updates_slices_and_overlap_hides_their_way():
    tensors = [["a", [5_000_000], "float32"]] * 2
    cluster = replace(CLUSTER, nodes=2, bandwidth=2e9)
    work = Workload(profile_of(compute(), tensors=tensors), cluster)
    plain, sliced, hidden = (named()[name].predict(work) for name in (
        "DataParallel", "Sharded", "Sharded(overlap=True)"))
    # Half of the update is another rank's.
    assert sliced.compute_s == pytest.approx(plain.compute_s - 0.005)
    assert hidden.seconds < sliced.seconds - 0.005
    assert named()['Sharded(weights="node")'].predict(work) is None, "there are single ranks only"
    no_forward = replace(work, profile=profile_of(replace(compute(), forward_s=(0.0, 0.0))))
    assert named()["Sharded(overlap=True)"].predict(no_forward) is None


def test_local_steps_average_the_noise_and_send_once_in_sixteen():
    profile = profile_of(*[compute()] * 9, compute(2.0))
    cluster = CLUSTER.of(16, 1)
    time = named()["DiLoCo(every=16)"].predict(Workload(profile, cluster))
    dense_s = predict("ring", cluster, profile.nbytes).seconds
    assert time.seconds - time.compute_s == pytest.approx(dense_s / 16, rel=0.05)
    assert 0.077 < time.compute_s < 0.1, "the mean is 0.077, the slowest step 0.14"


def test_codecs_are_measured_on_the_model():
    codecs = dict(zip((name for name, *_ in REDUCERS), measured(profile_of(compute()))))
    assert codecs['Cast("bfloat16")'].reduced == pytest.approx(0.5, rel=0.01)
    assert codecs["Int8()"].reduced == pytest.approx(0.25, rel=0.05)
    # Two factors of rank 2 of a matrix of 1000 x 500, in two turns.
    assert codecs["PowerSGD(rank=2)"].reduced == pytest.approx(2 * 1500 / 500_000, rel=0.5)
    for name, codec in codecs.items():
        assert codec.encode_s > 0 and codec.decode_s >= 0, name
        assert (codec.gathered > 1e-4) == (name == "TopK(0.001)"), (name, codec)


def test_compression_pays_where_the_wire_is_slow():
    profile = profile_of(compute(), tensors=[["a", [1000, 1000], "float32"]] * 2)
    slow, alone = (Workload(profile, replace(CLUSTER, nodes=nodes, bandwidth=5e7,
                                             ranks_per_node=2)) for nodes in (2, 1))
    # A busy machine may take any time to encode.
    codec = replace(measured(profile_of(compute()))[0], encode_s=0.0, decode_s=0.0)
    cast = _compressed(codec, slow).seconds
    dense = named()["DataParallel"].predict(slow).seconds
    assert dense - cast == pytest.approx(0.5 * 8e6 / 5e7, rel=0.1)
    assert named()["reducer=Int8()"].predict(alone) is None


def row(strategy, ms, loss):
    """Return a prediction; strategies with other training compute more."""
    compute_ms = 50 + loss
    return {"nodes": 2, "ranks": 4, "strategy": strategy, "step_ms": ms, "loss": loss,
            "compute_ms": compute_ms, "exposed_ms": ms - compute_ms}


@pytest.mark.parametrize(("rows", "texts"), [
    ([], ["4 ranks on 2 nodes: take DataParallel: no other strategy is predicted to save 10 %"]),
    ([row("Sharded", 80, 0), row("Cast", 78, 1)],
     ["take Sharded, predicted to take 0.80 of the time of DataParallel's step, with the same "
      "training. Per step: 0.00 ms less compute, 20.0 ms less exposed communication."]),
    ([row("Sharded", 95, 0), row("Cast", 78, 1), row("TopK", 40, 3)],
     ["take Cast, predicted to take 0.78 of the time of DataParallel's step. It rounds gradients "
      "to 16 bits. Per step: 1.00 ms more compute, 23.0 ms less exposed communication.",
      "TopK is predicted to take 0.40 of the time of DataParallel's step. It approximates gradi"]),
])
def test_the_gentlest_that_pays_is_taken(rows, texts):
    said = list(verdict([row("DataParallel", 100, 0), *rows]))
    assert len(said) == len(texts)
    for text, beginning in zip(said, texts):
        assert beginning in text


def test_the_command_prints_compares_and_draws(tmp_path, capsys, monkeypatch):
    needed("matplotlib")
    monkeypatch.setattr(counted, "_LINES_S", 0.0)
    monkeypatch.setattr(step_command, "processor_use", lambda: USE._replace(share=0.5))
    traces = tmp_path / "traces"
    traces.mkdir()
    written(traces, SPECS, *steps(4), drift=0)
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "png")}
    command = ["simulate", "step", "--trace", str(traces), "--ranks-per-node", "2"]
    assert main([*command, "--nodes", "1,3", "--bandwidth", "1gbit", "--compare", "--json",
                 files["json"], "--plot", files["png"]]) == 0
    said, progress = capsys.readouterr()
    assert "recorded: job 20260101-000000-aaaa: 1 rank on 1 node, 3 steps; 2002000 B of " in said
    before, recommended, after = said.partition("\n6 ranks on 3 nodes: take ")
    assert recommended and "strategy" not in before and "strategy" in after, "the table is long"
    assert "machine is busy: rank 0 got 50% of a core" in before
    assert "simulate step: measure codecs: 1 of 5" in progress
    assert "simulate step: 20 of 20" in progress, "10 strategies for each number of nodes"
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["benchmark"] == "predicted steps"
    assert {row["nodes"] for row in content["rows"]} == {1, 3}
    assert len(content["rows"]) == 5 + 10
    for each in content["rows"]:
        assert each["step_ms"] > 0 and each["exposed_ms"] >= 0 and each["efficiency_percent"] > 0
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert main([*command, "--against", str(traces), "--compare"]) == 2
    assert "leave out --compare and --plot" in capsys.readouterr().err


def test_predictions_stand_beside_other_traces(tmp_path, capsys):
    for name, size in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        for rank in range(size):
            written(tmp_path / name, SPECS, *steps(4), rank=rank, size=size, node=rank, drift=0)
    out = str(tmp_path / "out.json")
    assert main(["simulate", "step", "--trace", str(tmp_path / "one"), "--against",
                 str(tmp_path / "two"), "--cores", "1", "--json", out]) == 0
    assert "With more ranks than the 1 cores, the system decides" in capsys.readouterr().out
    (each,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (each["nodes"], each["ranks"]) == (2, 2) and each["measured_ms"] == pytest.approx(100)
    assert each["ratio"] == pytest.approx(each["step_ms"] / 100) and each["step_ms"] > 140


def train(comm):
    import torch

    from mpiring.torch import DataParallel
    torch.manual_seed(0)
    model = DataParallel(torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.ReLU(),
                                             torch.nn.Linear(300, 100)), comm)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(8, 200)).square().mean().backward()
        optimizer.step()


@pytest.mark.launch
def test_the_trace_of_a_real_job_tells_enough(tmp_path, capsys, ranks):
    needed("torch")
    ranks(2, train, MPIRING_TRACE=tmp_path)
    profile = read_profile(str(tmp_path), None)
    assert [tensor.name for tensor in profile.tensors] == [
        "0.weight", "0.bias", "2.weight", "2.bias"]
    # Of seven that are traced; a busy machine makes some of them long.
    assert 2 * 3 <= len(profile.steps) <= 2 * 6
    for step in profile.steps:
        assert 0 < step.update_s <= step.forward_s[0] < step.forward_s[1]
        assert step.forward_s[1] <= min(step.ready_s) < max(step.ready_s) <= step.compute_s
    assert main(["simulate", "step", "--trace", str(tmp_path), "--nodes", "2"]) == 0
    assert "DataParallel" in capsys.readouterr().out
