"""Tests the predictions for clusters that are not here: models, folding, command line."""

import json
from dataclasses import replace

import contract
import numpy as np
import pytest
from launching import python

from mpiring.__main__ import main
from mpiring.collectives.operation import Tuning
from mpiring.errors import StallError
from mpiring.memory.reduction import Reduction
from mpiring.tools.simulate import mpich
from mpiring.tools.simulate.algorithms import ALGORITHMS, SHARDED, predict, selected, symmetry_of
from mpiring.tools.simulate.cluster import Cluster
from mpiring.simulated.network import SimulatedNetwork, SymmetricNetwork, cyclic

# Numbers with which everything matters a little.
CLUSTER = Cluster(latency_s=1e-4, bandwidth=1e9, goodput=0.9, overhead_s=1e-5,
                  reduction_rate=6e9, node_latency_s=1e-5, node_bandwidth=3e9, barrier_s=1e-5)


@pytest.mark.parametrize("nbytes", [1000, 65536, 3_000_001])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (3, 2), (8, 2), (5, 4), (16, 1)])
@pytest.mark.parametrize("name", [*ALGORITHMS, "once per node"])
def test_one_node_stands_for_all(name, nodes, ranks_per_node, nbytes):
    cluster = CLUSTER.of(nodes, ranks_per_node)
    symmetric, stepped = (predict(name, cluster, nbytes, fold=fold) for fold in (True, False))
    if symmetric is None:
        assert stepped is None and name in ("shared", "hierarchical")
        return
    assert stepped.how == "stepped"
    symmetry = symmetry_of(name, cluster, nbytes)
    assert symmetric.how == ("stepped" if symmetry is None else "symmetry")
    # Among messages that come to an interface at the same time, another one may be first.
    many = name == "direct" or name == "hierarchical" and nbytes <= Tuning.short_bytes
    assert symmetric.seconds == pytest.approx(stepped.seconds, rel=0.03 if many else 1e-3)


def test_a_schedule_that_prefers_a_node_cannot_be_simulated_by_one():
    def only_from_rank_0(net):
        x = np.empty(1)
        yield (net.isend(x, 2),) if net.rank == 0 else (net.irecv(x, 0),)

    with pytest.raises(StallError, match="rank 1 waits for"):
        SymmetricNetwork(4, 2, cyclic).run(only_from_rank_0)


@pytest.mark.parametrize(("p", "ranks_per_node"), [
    *((p, 1) for p in range(1, 10)), (2, 2), (6, 2), (12, 2), (3, 3), (9, 3)])
@pytest.mark.parametrize("n", [0, 40, 2000])
def test_the_model_of_mpich_is_an_allreduce(p, ranks_per_node, n):
    xs = [contract.contribution(rank, n, "float32") for rank in range(p)]
    SimulatedNetwork(p, node_of=ranks_per_node, seed=n).run(lambda net: mpich.allreduce(
        net, ranks_per_node, xs[net.rank], np.empty(n, "float32"), Reduction("sum", "float32", p)))
    contract.check(xs[0], p, "sum")
    assert all(x.tobytes() == xs[0].tobytes() for x in xs)


def test_copies_on_the_node_are_hidden_by_the_wire_or_hide_it():
    """One read and seven writes, of what the rank's ring has brought, while more is on the wire."""
    n, fast = 100_000_000, Cluster().of(16, 8)
    for cluster, longest in ((fast, fast.limit_s(n)), (replace(fast, node_bandwidth=1e9), 0.05)):
        each, once = (predict(name, cluster, n).seconds for name in SHARDED)
        assert longest == pytest.approx(max(4 * n / 8 / cluster.node_bandwidth, fast.limit_s(n)))
        # The gradients' half is the same in both.
        assert once == pytest.approx(fast.limit_s(n), rel=0.05)
        assert longest < each < longest + 0.7 * once


def test_eight_ranks_per_node_reach_most_of_a_fast_network():
    cluster, n = Cluster().of(16, 8), 100_000_000
    assert cluster.limit_s(n) > 0.9 * predict("hierarchical", cluster, n).seconds


def test_the_time_of_mpich_is_that_of_its_paper():
    n, c = 1 << 20, CLUSTER
    wire, combining = n / (c.bandwidth * c.goodput), 3 * n / c.reduction_rate
    eight = predict("native", c.of(8, 1), n).seconds
    assert eight == pytest.approx(2 * 3 * c.latency_s + 7 / 8 * (2 * wire + combining))
    short = predict("native", c.of(8, 1), 1024).seconds
    assert short == pytest.approx(3 * (c.latency_s + (wire + combining) / 1024))
    # Of six, two step aside; the other four go on.
    six = predict("native", c.of(6, 1), n).seconds
    four = predict("native", c.of(4, 1), n).seconds
    assert 2 * wire < six - four < 2.2 * wire + combining + 2 * c.latency_s


def test_shared_memory_takes_two_barriers_and_reads_and_writes_each_byte_once():
    n, c = 4 << 20, CLUSTER.of(1, 4)
    assert predict("shared", c, n).seconds == pytest.approx(
        2 * c.barrier_s + 2 * n / c.reduction_rate)
    assert predict("shared", CLUSTER.of(2, 4), n) is None


def test_ranks_that_share_cores_compute_in_turns():
    c, n = CLUSTER.of(8, 1), 1000
    alone, lab = (predict("native", replace(c, mpi_overhead_s=1e-3, cores=cores), n)
                  for cores in (0, 2))
    assert (alone.how, lab.how) == ("symmetry", "stepped")
    steps = 3 * c.latency_s + 9 * n / c.reduction_rate + 3 * n / (c.bandwidth * c.goodput)
    assert alone.seconds == pytest.approx(3 * 2e-3 + steps)
    assert lab.seconds == pytest.approx(4 * alone.seconds, rel=0.2)
    assert predict("native", replace(c, mpi_overhead_s=1e-3, cores=8), n).seconds == (
        pytest.approx(alone.seconds))


def test_a_leader_in_three_hosts_takes_two_messages_at_once():
    """MPICH's rank 1 takes n bytes of rank 0, and meanwhile half as many of rank 2."""
    c, n = replace(CLUSTER.of(3, 1), cores=2), 10**8
    wire = n / (c.bandwidth * c.goodput)
    halves, full, back = wire, wire / 2, wire
    shared = 2 * halves + (full - halves) + full + full + back
    assert predict("native", c, n).seconds == pytest.approx(
        shared + 4.5 * n / c.reduction_rate, rel=0.01)


def test_bursts_help_as_far_as_they_come_back():
    c = replace(CLUSTER.of(2, 1), burst_bytes=10**6, overhead_s=0.0, latency_s=1e-6)
    n, rate = 10**5, c.bandwidth * c.goodput
    assert predict("ring", c, n).seconds == pytest.approx(n / rate, rel=0.05)
    slow = replace(c, mpi_overhead_s=1e-4)
    assert predict("ring", slow, n).seconds < predict("ring", replace(
        slow, burst_bytes=0), n).seconds - 0.9 * n / rate


def test_what_auto_would_take():
    assert selected(CLUSTER.of(1, 8), 1 << 20, {"shared": 2, "native": 1}) == "shared"
    times = {"ring": 2.0, "native": 1.0, "direct": 0.5}
    assert selected(CLUSTER.of(8, 1), 100, times) == "native"
    assert selected(CLUSTER.of(8, 1), 100, {**times, "ring": 0.5}) == "ring"
    assert selected(CLUSTER.of(8, 2), 100, {**times, "hierarchical": 0.5}) == "hierarchical"


def test_the_command_prints_and_writes(tmp_path, capsys):
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "csv", "png")}
    assert main(["simulate", "--nodes", "6", "--ranks-per-node", "2", "--size", "10MB", "--json",
                 files["json"], "--csv", files["csv"], "--plot", files["png"]]) == 0
    about, more, _, *table = capsys.readouterr().out.splitlines()
    assert "10 MB of float32, 2 ranks per node, 100 Gbit/s" in about and more.startswith("# ")
    lines = [line.split() for line in table]
    assert {(words[0], words[1]) for words in lines} == {
        ("1", "2"), ("2", "4"), ("4", "8"), ("6", "12")}
    chosen = [words[2] for words in lines if words[-1] == "auto"]
    assert chosen == ["shared", "hierarchical", "hierarchical", "hierarchical"]
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["benchmark"] == "simulate" and content["environment"]["latency_s"] == 2e-6
    assert len(content["rows"]) == len(lines)
    for row in content["rows"]:
        assert row["efficiency_percent"] == pytest.approx(100 * row["limit_ms"] / row["ms"])
    assert sum(row["selected"] for row in content["rows"]) == 4
    assert "nodes,ranks,bytes,algorithm" in (tmp_path / "out.csv").read_text()
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert main(["bench", "plot", files["json"], str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").stat().st_size > 10_000


@pytest.mark.parametrize(("option", "value", "remedy"), [
    ("--latency", "2", "as 2us"), ("--bandwidth", "fast", "as 1gbit"), ("--size", "big", "20MB"),
    ("--nodes", "1,x", "expected 1 or more"), ("--goodput", "0", "above 0"),
    ("--reduction-rate", "5", "as 5GB/s")])
def test_bad_numbers_are_refused_with_the_remedy(option, value, remedy, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", option, value])
    assert option in (text := capsys.readouterr().err) and remedy in text


def write_measured(path, **environment):
    rows = [{"bytes": 1 << 20, "contender": contender, "median_us": median} for contender, median
            in (("MPI_Allreduce", 2e4), ("mpiring ring", 1e4), ("mpiring auto", 1e4),
                ("mpiring native", None))]
    about = {"ranks": 4, "nodes": 2, "cores": 2, "placement": [{"host": "a"}] * 4, **environment}
    path.write_text(json.dumps({"benchmark": "allreduce", "environment": about, "rows": rows}))


def test_predictions_stand_beside_what_was_measured(tmp_path, capsys):
    measured, out = tmp_path / "measured.json", tmp_path / "out.json"
    write_measured(measured)
    assert main(["simulate", "--against", str(measured), "--bandwidth", "1gbit",
                 "--json", str(out)]) == 0
    assert "pred/meas" in capsys.readouterr().out
    native, ring = json.loads(out.read_text())["rows"]
    assert (native["contender"], ring["contender"]) == ("MPI_Allreduce", "mpiring ring")
    cluster = Cluster(2, 2, bandwidth=125e6, cores=2)
    assert ring["ms"] == pytest.approx(predict("ring", cluster, 1 << 20).seconds * 1e3)
    assert ring["measured_ms"] == 10 and ring["ratio"] == pytest.approx(ring["ms"] / 10)


def test_what_cannot_be_told_or_compared_is_refused(tmp_path, capsys):
    assert main(["simulate", "--nodes", "1", "--ranks-per-node", "1"]) == 2
    assert "a single rank sends nothing; raise" in capsys.readouterr().err
    measured = tmp_path / "measured.json"
    write_measured(measured, ranks=3)
    assert main(["simulate", "--against", str(measured)]) == 2
    assert "3 ranks on 2 nodes; expected a `bench allreduce`" in capsys.readouterr().err
    write_measured(measured)
    assert main(["simulate", "--against", str(measured), "--plot", "x.png"]) == 2
    assert "cannot be combined; leave out one" in capsys.readouterr().err


def test_it_needs_no_mpi_and_simulates_a_thousand_ranks():
    code = ("import sys; sys.modules['mpi4py.MPI'] = None; from mpiring.__main__ import main;"
            "sys.exit(main(['simulate', '--nodes', '128,9', '--size', '1MB']))")
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert " 1024  native" in ended.stdout and "stepped" in ended.stdout
