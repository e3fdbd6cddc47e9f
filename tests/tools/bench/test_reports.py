"""Tests the rows and pictures of results."""

import math
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from launching import needed

from mpiring import ConfigError, MissingDependencyError
from mpiring.operations.algorithms import NAMES
from mpiring.tools import picture, plot
from mpiring.tools.bench import allreduce, contenders, latency, overlap, reducers, steps
from mpiring.tools.bench.benchmark import Measurement, pooled
from mpiring.tools.bench.contenders import NATIVE

ABOUT = {
    "ranks": 4, "nodes": 1, "cpu": "A CPU", "mpi_library": "MPICH 5", "thread_level": "multiple",
    "mpiring": "1", "cores": 2, "mpi4py": "4", "numpy": "2", "python": "3"}
OPTIONS = Namespace(link_rate=None, goodput=0.5)


def of_allreduce(contender, seconds, nbytes=1 << 20, level="multiple"):
    return Measurement({"bytes": nbytes, "dtype": "float32", "buffer": "empty",
                        "thread_level": level, "contender": contender}, {"call": seconds})


FOUND = [of_allreduce("MPI_Allreduce", [4e-3, 2e-3, 3e-3]), of_allreduce("mpiring auto", [1e-3]),
         of_allreduce("mpiring ring", []), of_allreduce("memory copy", [0.5e-3])]


def test_rows_of_an_allreduce():
    native, ours, none, copy = allreduce.rows(FOUND, ABOUT, OPTIONS)
    assert native["median_us"] == pytest.approx(3000) and native["calls"] == 3
    assert native["p95_us"] == native["max_us"] == pytest.approx(4000)
    assert native["min_us"] == pytest.approx(2000) and native["native_over_this"] == 1
    assert ours["native_over_this"] == pytest.approx(3)
    assert ours["algbw_GBps"] == pytest.approx((1 << 20) / 1e-3 / 1e9)
    assert ours["busbw_GBps"] == pytest.approx(ours["algbw_GBps"] * 1.5)
    assert ours["limit_us"] == pytest.approx(500) and ours["this_over_limit"] == pytest.approx(2)
    assert none["calls"] == 0 and none["median_us"] != none["median_us"]
    assert copy["this_over_limit"] == 1


def test_the_reference_is_the_faster_thread_level_of_the_same_case():
    results = [*FOUND, of_allreduce("MPI_Allreduce", [1e-4], nbytes=8),
               of_allreduce("MPI_Allreduce", [2e-3], level="serialized"),
               of_allreduce("mpiring auto", [4e-3], level="serialized")]
    rows = allreduce.rows(results, ABOUT, OPTIONS)
    assert [row["bytes"] for row in rows] == 6 * [1 << 20] + [8]
    ratios = {(row["contender"], row["thread_level"]): row["native_over_this"] for row in rows[:6]}
    assert ratios["MPI_Allreduce", "multiple"] == pytest.approx(2 / 3)
    assert ratios["mpiring auto", "multiple"] == pytest.approx(2)
    assert ratios["mpiring auto", "serialized"] == pytest.approx(0.5)


def test_the_limit_between_hosts_is_the_links():
    (row,) = allreduce.rows([of_allreduce("MPI_Allreduce", [1.0], nbytes=1000)],
                            {**ABOUT, "nodes": 4}, Namespace(link_rate=1e4, goodput=0.5))
    assert row["limit_us"] == pytest.approx(2 * 3 / 4 * 1000 / 5e3 * 1e6)


def test_rows_of_an_overlap_and_of_steps():
    labels = {"bytes": 8, "contender": "Gloo", "compute": "numpy"}
    (row,) = overlap.rows([Measurement(labels, {
        "compute": [2.0, 4.0, 2.0], "communication": [1.0, 2.0, 1.0],
        "total": [2.25, 4.5, 9.0]})], ABOUT, OPTIONS)
    # Of each round: in the second one the whole machine was half as fast.
    assert row["overlap_percent"] == 75 and row["total_over_longest"] == 1.125
    assert row["rounds"] == 3 and row["compute_ms"] == 2000 and row["total_ms"] == 4500
    labels = {"batch": 8, "thread_level": "multiple"}
    rows = steps.numpy_rows([
        Measurement({**labels, "contender": contenders.ALONE}, {"step": [0.1], "extra_bytes": [0]}),
        Measurement({**labels, "contender": "other"}, {"step": [0.4], "extra_bytes": [0, 3 << 20]}),
    ], ABOUT, OPTIONS)
    assert rows[1]["efficiency_percent"] == pytest.approx(25)
    assert rows[1]["samples_per_s"] == pytest.approx(80) and rows[1]["extra_MiB"] == 3


def of_torch(contender, step, communication=(0.1,), peak=0, model="mlp"):
    labels = {"model": model, "parameters": 1 << 18, "batch": 8, "calls": 2,
              "thread_level": "multiple", "contender": contender}
    return Measurement(labels, {
        "step": step, "communication": list(communication), "peak_bytes": [peak],
        "node_bytes": [33 << 18]})


TORCH = [of_torch(contenders.ALONE, [0.1, 0.1, 0.2, 0.2], peak=5 << 20),
         of_torch(contenders.OURS, [0.11, 0.11, 0.24, 0.24], [0.05, 0.05], peak=6 << 20),
         of_torch(contenders.GLOO, [0.2, 0.2, 0.32, 0.32], [0.1], peak=9 << 20)]


def test_rows_of_training_with_pytorch():
    options = Namespace(link_rate=2 ** 20 / 0.4, goodput=0.5)
    results = [*TORCH, of_torch(contenders.ALONE, [1, 1], model="convnet")]
    alone, ours, gloo, other = steps.torch_rows(results, {**ABOUT, "nodes": 2}, options)
    assert alone["over_compute"] == alone["efficiency_percent"] / 100 == 1
    # Of the medians of two rounds; the ends of the intervals are those of a single round.
    assert ours["over_compute"] == pytest.approx(175 / 150)
    assert ours["over_compute_low"] == pytest.approx(1.1)
    assert ours["over_compute_high"] == pytest.approx(1.2)
    assert ours["over_gloo"] == pytest.approx(175 / 260) and gloo["over_gloo"] == 1
    assert other["over_compute"] == 1 and math.isnan(other["over_compute_low"])
    assert ours["median_ms"] == pytest.approx(175) and ours["communication_ms"] == 50
    assert ours["hidden_percent"] == pytest.approx(50)
    assert gloo["hidden_percent"] == pytest.approx(0)
    assert ours["extra_MiB"] == 1 and gloo["extra_over_gradients"] == 4
    assert ours["node_bytes_per_parameter"] == 33
    # 2 (2-1)/2 of a MiB, at half of the rate; with the other model, computing takes longer.
    assert ours["bound_ms"] == pytest.approx(800) and other["bound_ms"] == 1000
    assert ours["over_bound"] == pytest.approx(0.175 / 0.8)
    assert other["over_gloo"] != other["over_gloo"] and alone["extra_MiB"] != alone["extra_MiB"]
    (ours,) = steps.torch_rows(TORCH, ABOUT, OPTIONS)[1:2]
    assert ours["bound_ms"] != ours["bound_ms"]


def test_the_table_of_a_model_has_a_title_and_the_columns_that_have_values():
    lines = []
    report = steps.TORCH_STEPS.report(lines.append)
    rows = steps.torch_rows(TORCH, ABOUT, OPTIONS)
    report.add(rows)
    report.add([{**row, "model": "convnet"} for row in rows])
    assert lines[1] == "# mlp of 0.3 M parameters, batch 8 per rank"
    assert lines[2].split("  ")[-1] == "extra MiB" and "/bound" not in lines[2]
    assert lines[3].split() == [
        "compute", "only", "150.0", "1.00", "0.577", "(0.500-0.625)", "-", "-"]
    assert "1.17 (1.10-1.20)" in lines[4]
    assert max(map(len, lines)) <= 100
    assert lines[7].startswith("# convnet") and len(lines) == 12


def test_the_bytes_on_the_wire(tmp_path):
    def interface(name, nbytes):
        (tmp_path / name / "statistics").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "statistics/tx_bytes").write_text(f"{nbytes}\n")

    for name, nbytes in (("lo", 100), ("eth0", 200), ("bridge0", 300)):
        interface(name, nbytes)
    (tmp_path / "bonding_masters").write_text("")
    before = reducers.sent_bytes(tmp_path)
    assert before == {"eth0": 200, "bridge0": 300}
    for name, nbytes in (("lo", 10_000), ("eth0", 1200), ("bridge0", 1290), ("eth1", 10_000)):
        interface(name, nbytes)
    assert reducers.max_growth(before, reducers.sent_bytes(tmp_path)) == 1000
    assert reducers.sent_bytes(tmp_path / "missing") == {} and reducers.max_growth({}, before) == 0


@pytest.mark.parametrize(("hosts", "counted", "sent"), [
    ([0, 0, 1], [50, 50, 40], 90), ([0, 0, 0], [50, 50, 50], None), ([0, 1, 2], [50, 50, 9], None),
])
def test_the_traffic_of_all_hosts(monkeypatch, hosts, counted, sent):
    def gathered(traffic):
        assert traffic == (30, counted[0], 0)
        return [(30 - 10 * rank, counted[rank], hosts[:rank].count(host))
                for rank, host in enumerate(hosts)]

    comm = SimpleNamespace(
        num_nodes=len(set(hosts)), local_rank=0, allgather_object=gathered)
    readings = iter([5, 5 + counted[0]])
    monkeypatch.setattr(reducers, "sent_bytes", lambda: {"eth0": next(readings)})
    traffic = reducers.HostTraffic(SimpleNamespace(comm=comm, barrier=lambda: None))
    total = traffic.end(30)
    assert total == sent if sent else total != total


def test_readings_of_several_jobs_are_pooled():
    again = [of_allreduce("mpiring auto", [7e-3]), of_allreduce("mpiring auto", [1.0], nbytes=8)]
    joined = pooled([*FOUND, *again])
    assert [len(result.readings["call"]) for result in joined] == [3, 2, 0, 1, 1]
    assert joined[1].readings["call"] == [1e-3, 7e-3]


def of_latency(contender, seconds, test="allreduce", level="multiple", **others):
    """Take one call in each of two rounds on two ranks."""
    labels = {"test": test, "bytes": 4, "buffer": "empty", "calls": 10, "barrier": False,
              "thread_level": level, "contender": contender}
    return Measurement(labels, {"call": seconds, **others})


LATENCIES = [
    of_latency("mpiring auto", [2e-6, 4e-6, 4e-6, 8e-6]),
    of_latency("mpiring auto", [8e-6] * 4, "iallreduce", init=[1e-6] * 4, compute=[8e-6] * 4,
               wait=[3e-6] * 4),
    of_latency("MPI_Iallreduce", [6e-6] * 4, "iallreduce", init=[1e-6] * 4, compute=[6e-6] * 4,
               wait=[5e-6] * 4),
    of_latency("MPI_Allreduce", [9e-6] * 4),
    of_latency("MPI_Allreduce", [9e-6] * 4, level="serialized")]


def test_latencies_as_osu_counts_and_prints_them():
    """The mean of each rank's calls, and of these the mean, the least and the most."""
    rows = latency.rows(LATENCIES, {**ABOUT, "ranks": 2}, OPTIONS)
    assert [row["contender"] for row in rows] == [
        "MPI_Allreduce", "MPI_Allreduce", "mpiring auto", "MPI_Iallreduce", "mpiring auto"]
    ours, hidden = rows[2], rows[4]
    assert [ours[key] for key in ("avg_us", "min_us", "max_us", "iterations")] == pytest.approx(
        [4.5, 3, 6, 20])
    assert ours["median_us"] == pytest.approx(4.5) and ours["native_over_this"] == pytest.approx(2)
    assert hidden["overlap_percent"] == pytest.approx(50) and "init_us" not in ours
    lines = []
    report = latency.LATENCY.report(lines.append, ["multiple", "serialized"])
    report.add(rows[:3])
    report.add(rows[3:])
    assert lines == [
        "", "# allreduce in comm.empty: mean us of a call, back to back, and MPI's over ours",
        "    size  threads     MPI    auto  MPI/auto",
        "     4 B  multi      9.00    4.50*     2.00",
        "          serial     9.00       -         -",
        "", "# iallreduce in comm.empty: mean us of a call alone, back to back, and % hidden "
        "behind compute",
        "    size  threads     MPI    auto   MPI %  auto %",
        "     4 B  multi      6.00*   8.00    0.00    50.0"]


def test_an_allreduce_side_by_side():
    """Limits are no contenders, and a contender that cannot do the case has no column."""
    lines = []
    report = allreduce.ALLREDUCE.report(lines.append)
    report.begin(ABOUT)
    for nbytes in (1 << 20, 1 << 26):
        results = [of_allreduce(result.labels["contender"], result.readings["call"], nbytes)
                   for result in FOUND]
        report.add(allreduce.rows(results, ABOUT, OPTIONS))
    assert lines[1:] == [
        "", "# float32 in comm.empty: median us of a call, and MPI's over auto's",
        "    size     MPI    auto    copy  MPI/auto",
        "   1 MiB    3000    1000*    500      3.00",
        "  64 MiB    3000    1000*    500      3.00"]
    names = [*(f"mpiring {name}" for name in NAMES if name != "nccl"), NATIVE, "Gloo", "Horovod"]
    for ours in ("hierarchical", "shared"):
        lines.clear()
        report = allreduce.ALLREDUCE.report(lines.append, ["multiple", "serialized"])
        report.add(allreduce.rows([of_allreduce(name, [1e-2]) for name in names
                                   if not name.endswith(ours)], {**ABOUT, "nodes": 2},
                                  Namespace(link_rate=1e9, goodput=0.9)))
        assert max(map(len, lines)) <= 100


def test_a_picture_of_pytorch_tells_what_was_hidden():
    axes = needed("matplotlib.figure").Figure().subplots(1, 1)
    rows = steps.torch_rows(TORCH, ABOUT, OPTIONS)
    plot.step_bars([axes], rows)
    assert [text.get_text() for text in axes.texts] == ["100 %", "86 %, 50 % hidden",
                                                        "58 %, 0 % hidden"]
    assert list(plot.DRAWINGS["steps"].panels(rows)) == ["mlp, 0.3 M parameters"]


def test_what_a_picture_shows():
    """No two curves look alike."""
    assert set(plot.LIMITS) == contenders.LIMITS.keys()
    names = [NATIVE, *(f"mpiring {name}" for name in NAMES), "Gloo", "Horovod"]
    results = [of_allreduce(name, [1e-3], nbytes) for name in names
               for nbytes in (8, 512, 8 << 10, 128 << 10, 1 << 20, 8 << 20)]
    time, bandwidth = axes = needed("matplotlib.figure").Figure().subplots(1, 2)
    plot._curves(axes, allreduce.rows([*results, FOUND[-1]], ABOUT, OPTIONS))
    *curves, limit = time.get_lines()
    assert {line.get_label() for line in curves} == set(names)
    looks = {(line.get_color(), line.get_marker()) for line in curves}
    assert len(looks) == len({color for color, _ in looks}) == len(names)
    assert list(limit.get_xdata()) == [1 << 20] and list(limit.get_ydata()) == [500]
    most = (1 << 20) / 0.5e-3 / 1e9 * 1.5
    assert list(bandwidth.get_lines()[-1].get_ydata()) == pytest.approx([most])
    assert "µs" in time.get_ylabel() and "GB/s" in bandwidth.get_ylabel()


def test_nothing_to_draw(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot.draw(tmp_path / "x.png", "allreduce", ABOUT, [], plot.DRAWINGS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r": pip install .*\[bench\]"):
        plot.draw(tmp_path / "x.png", "allreduce", ABOUT, allreduce.rows(FOUND, ABOUT, OPTIONS),
                  plot.DRAWINGS)


def test_curves_are_named_beside_their_ends(tmp_path):
    needed("matplotlib")
    with picture.picture(tmp_path / "x.svg", [3], 2, "caption") as ((left, right),):
        for number in range(3):
            left.plot([1, 2], [0, number], label=f"curve {number}")
            right.plot([1, 2], [0, 1 + number / 1e6], label=f"curve {number}")
    named = {text.get_text(): text.get_position()[1] for text in right.texts}
    assert list(named) == ["curve 0", "curve 1", "curve 2"] and not left.texts
    assert named["curve 1"] - named["curve 0"] == pytest.approx(named["curve 2"] - named["curve 1"])
    assert named["curve 2"] <= 1 and named["curve 1"] - named["curve 0"] > 0.05
