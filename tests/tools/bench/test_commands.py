"""Runs the benchmarks on real MPI, with tiny sizes."""

import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from jobs import run
from launching import PROGRAMS, installed, launch, mpiexec, needed, python

from mpiring.errors import ConfigError
from mpiring.tools.bench import benchmark, contenders, inputs, reducers

COMMON = ("--rounds", "2", "--contenders", "mpiring,mpi")
ALLREDUCE = ("allreduce", "--sizes", "8,64K", "--budget", "0.02", *COMMON)
LATENCY = ("latency", "--sizes", "4,12K", "--calls", "20", "--rounds", "2")
OVERLAP = ("overlap", "--size", "100K", "--bucket", "40K", "--ratio", "1", *COMMON)
STEPS = ("steps", "--width", "32", "--batch", "4", "--calls", "1", *COMMON)
TORCH = ("steps", "--framework", "torch", "--parameters", "60K", "--batch", "2", "--calls", "1",
         *COMMON[:-1], "mpiring,gloo")
REDUCERS = ("reducers", "--parameters", "60K", "--batch", "1", "--steps", "4")
EVERYTHING = {"date", "command", "mpiring", "python", "mpi4py", "numpy", "mpi_library",
              "thread_level", "system", "cpu", "cores", "load_average", "ranks", "nodes",
              "placement", "variables"}


def in_turn(ranks, *commands, wrong=False, on=(), **variables):
    """Run several benchmarks in one program."""
    words = [word for command in commands for word in (*command, ",")]
    # What is spoiled or simulated stays so.
    start = launch if wrong or on else run
    return start(ranks, *on, PROGRAMS / "bench_in_turn.py", *["--wrong"] * wrong, *words,
                 **variables)


@pytest.mark.launch
def test_allreduce_in_a_launchers_job(tmp_path):
    ended = run(2, "-m", "mpiring", "bench", *ALLREDUCE, "--sizes", "4K", "--algorithms",
                "auto,ring", "--dtypes", "float32,float16", "--buffers", "empty,private", "--json",
                tmp_path / "out.json", "--csv", tmp_path / "out.csv")
    assert ended.status == 0, ended.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["benchmark"] == "allreduce"
    about = content["environment"]
    assert EVERYTHING <= about.keys() and about["ranks"] == 2 and about["nodes"] == 1
    assert [place["rank"] for place in about["placement"]] == [0, 1]
    rows = content["rows"]
    assert [row["contender"] for row in rows] == 4 * [
        "MPI_Allreduce", "mpiring auto", "mpiring ring", "memory copy"]
    assert {(row["dtype"], row["buffer"], row["bytes"]) for row in rows} == {
        (dtype, buffer, 4096) for dtype in ("float32", "float16")
        for buffer in ("empty", "private")}
    for row in rows:
        if row["contender"] == "MPI_Allreduce" and row["dtype"] == "float16":
            assert row["median_us"] is None and row["calls"] == 0
        if row["contender"] == "mpiring auto":
            assert row["calls"] >= 4 and 0 < row["min_us"] <= row["median_us"] <= row["p95_us"]
            assert (row["native_over_this"] is None) == (row["dtype"] == "float16")
    assert len(re.findall("^   4 KiB ", ended.output, re.MULTILINE)) == 4
    assert re.search(r"^# float16 in private memory: .*\n +size    auto    ring    copy$",
                     ended.output, re.MULTILINE)
    assert (tmp_path / "out.csv").read_text().count("\n") == len(about) + 1 + len(rows)


@pytest.mark.launch
@pytest.mark.any_mpi
def test_allreduce_in_jobs_of_its_own():
    mpiexec()
    ended = python("-m", "mpiring", "bench", *ALLREDUCE, "--algorithms", "auto", "--ranks", 2,
                   "--json", "-")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert benchmark.BEAT not in ended.stderr
    assert re.findall(r"^ *(size|8 B|64 KiB)? +(threads|multi|serial) ", ended.stderr,
                      re.MULTILINE) == [("size", "threads"), ("8 B", "multi"), ("", "serial"),
                                        ("64 KiB", "multi"), ("", "serial")]
    content = json.loads(ended.stdout)
    assert content["environment"]["ranks"] == 2
    assert content["environment"]["thread_level"] == "multiple and serialized"
    command = content["environment"]["command"]
    assert "bench allreduce --sizes 8,64K" in command and " --part " not in command
    cases = [(row["bytes"], row["contender"], row["thread_level"]) for row in content["rows"]]
    assert cases == [(nbytes, name, level) for nbytes in (8, 65536)
                     for level in ("multiple", "serialized")
                     for name in ("MPI_Allreduce", "mpiring auto", "memory copy")]


@pytest.mark.launch
@pytest.mark.any_mpi
def test_steps_and_latencies(tmp_path):
    installed("matplotlib")
    ended = in_turn(
        2, (*STEPS, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
        (*LATENCY, "--barrier", "--tests", "allreduce", "--buffers", "private"),
        (*LATENCY, "--json", tmp_path / "latency.json", "--plot", tmp_path / "latency.png"),
        (*ALLREDUCE[:-1], "horovod"))
    assert ended.output.count("ended with status 0") == 6, ended.output
    check_latencies(json.loads((tmp_path / "latency.json").read_text())["rows"], ended.output)
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == [
        "compute only", "mpiring DataParallel", "MPI_Allreduce after backward",
        "mpiring auto after backward"]
    assert rows[0]["efficiency_percent"] == 100 and rows[0]["parameters"] == 3 * (32 * 32 + 32)
    for row in rows if sys.platform == "linux" else ():
        assert -1 < row["extra_MiB"] < 16, row
    assert (tmp_path / "out.png").stat().st_size > 10_000
    if "allreduce ended with status 2" in ended.output:
        assert "rank 0: the contender 'horovod' needs " in ended.output, "it is not installed"


def check_latencies(rows, output):
    assert {row["test"] for row in rows} == {
        "allreduce", "iallreduce", "allgather", "bcast", "reduce_scatter"}
    contenders = Counter(row["contender"] for row in rows)
    assert contenders == {"mpiring auto": 20, "mpiring persistent": 20, "MPI_Allreduce": 4,
                          "MPI_Iallreduce": 4, "MPI_Allgather": 4, "MPI_Bcast": 4,
                          "MPI_Reduce_scatter": 4}
    assert not any(row["barrier"] for row in rows)
    for row in rows:
        assert row["iterations"] == {4: 40, 12288: 4}[row["bytes"]]
        assert 0 < row["min_us"] <= row["avg_us"] <= row["max_us"] and row["median_us"] > 0
        assert ("overlap_percent" in row) == (row["test"] == "iallreduce")
    for size in ("     4 B", "  12 KiB"):
        assert len(re.findall(rf"^{size}( +[\d.]+\*?){{5}}$", output, re.MULTILINE)) == 1 + 2 * 4
        assert len(re.findall(rf"^{size}( +[\d.]+\*?){{6}}$", output, re.MULTILINE)) == 2
    assert output.count("a barrier before each call") == 1


@pytest.mark.launch
@pytest.mark.any_mpi
def test_steps_with_pytorch(tmp_path):
    installed("matplotlib"), installed("torch")
    ended = in_turn(2, (
        *TORCH, "--models", "mlp", "--link-rate", "1gbit", "--bucket", "64K", "--json",
        tmp_path / "out.json", "--plot", tmp_path / "out.png"), (
        *TORCH, "--rounds", "1", "--optimizer", "adamw", "--sharded", "--json",
        tmp_path / "sharded.json"))
    assert ended.output.count("ended with status 0") == 4, ended.output
    dense, sharded = (json.loads((tmp_path / name).read_text())["rows"]
                      for name in ("out.json", "sharded.json"))
    for rows, formula, *more in (dense, 16), (sharded, 32, "ZeRO", "FSDP2"):
        names = [row["contender"] for row in rows]
        ours = ["compute only", "mpiring DataParallel"]
        ours += [f"mpiring Sharded{kind}" for kind in ("", ", overlap", ", node")] if more else []
        peers = ["Gloo + PyTorch's DDP", *(f"Gloo + {name}" for name in more)]
        over = [name.replace("Gloo", "mpiring") for name in peers]
        assert names in (ours + over + peers, ours + peers)
        for row in rows:
            assert row["formula_bytes_per_parameter"] == {
                "Sharded": 24, "overlap": 24, "node": 20, "ZeRO": 24,
                "FSDP2": 16}.get(row["contender"].split()[-1], formula)
            assert row["node_bytes_per_parameter"] is not None, "the model is too small for more"
    for row in dense:
        assert row["steps"] == 2 and row["batch"] == 2 and row["median_ms"] > 0
        alone = row["contender"] == "compute only"
        assert (row["hidden_percent"] is None) == (row["extra_MiB"] is None) == alone
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.launch
@pytest.mark.any_mpi
def test_allreduce_on_a_gpu(tmp_path):
    """The GPU is simulated: its times mean nothing, but sums are checked."""
    installed("matplotlib")
    ended = in_turn(
        2, (*ALLREDUCE, "--device", "cuda", "--buffers", "empty,private", "--algorithms",
            "ring,native", "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
        (*ALLREDUCE[:-1], "nccl", "--device", "cuda"), on=[PROGRAMS / "on_simulated_gpu.py"])
    assert ended.output.count("allreduce ended with status 0") == 2, ended.output
    assert ended.output.count("the contender 'nccl' cannot run: ") == 2, ended.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == 4 * [
        "naive", "naive, pinned", "mpiring auto", "mpiring native", "mpiring ring", "device copy",
        "pinned copies"]
    for row in rows:
        assert row["device"] == "simulated GPU"
        assert (row["median_us"] is None) == (row["contender"] == "mpiring native")
        assert row["native_over_this"] == 1 or row["contender"] != "naive"
        limit = "pinned copies" if row["buffer"] == "private" else "device copy"
        assert row["this_over_limit"] == 1 or row["contender"] != limit
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.launch
@pytest.mark.any_mpi
def test_reducers(tmp_path):
    installed("matplotlib"), installed("torch")
    ended = in_turn(2, (*REDUCERS, "--json", tmp_path / "out.json", "--csv", tmp_path / "out.csv",
                        "--plot", tmp_path / "out.png"), MPIRING_SHARED_MEMORY="0")
    assert ended.output.count("ended with status 0") == 2, ended.output
    assert "share one node's memory" not in ended.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["reducer"] for row in rows] == list(reducers.NAMES)
    alone, dense, *compressed = rows
    assert alone["over_alone"] == dense["over_dense"] == 1 and alone["compression_ratio"] is None
    assert dense["compression_ratio"] == pytest.approx(1, rel=0.01)
    ratios = {row["reducer"]: row["compression_ratio"] for row in compressed}
    assert ratios["fp16"] == ratios["bf16"] == pytest.approx(2, rel=0.01)
    assert 3.8 < ratios["int8"] < 4 < ratios["powersgd4"] < ratios["powersgd"] < ratios["onebit"]
    assert 28 < ratios["onebit"] < 32 < ratios["topk"]
    # Where there is one host, there is no wire.
    assert all(row["steps"] == 4 and row["wire_ratio"] is None for row in rows)
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert (tmp_path / "out.csv").read_text().count("\ntopk,") == 1


@pytest.mark.parametrize(("nodes", "warned"), [(1, True), (2, False)])
def test_that_nothing_is_compressed_within_a_node_is_said(nodes, warned, caplog):
    comm = SimpleNamespace(memory_groups=[[0, 1]] * nodes)
    world = SimpleNamespace(rank=0, size=2, comm=comm)
    reducers.warn_if_nothing_is_compressed(world)
    assert ("all 2 ranks share one node's memory" in caplog.text) == warned


@pytest.mark.launch
@pytest.mark.any_mpi
def test_overlap_and_gloo(tmp_path):
    installed("matplotlib"), installed("torch")
    ended = in_turn(2, (*ALLREDUCE[:-1], "gloo", "--dtypes", "float32,bfloat16"),
                    (*OVERLAP[:-1], "mpiring,gloo", "--json", tmp_path / "out.json", "--plot",
                     tmp_path / "out.png"))
    assert ended.output.count("ended with status 0") == 4, ended.output
    assert len(re.findall(r"^ +size .*auto .*Gloo +copy", ended.output, re.MULTILINE)) == 2
    assert (tmp_path / "out.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {(row["contender"], row["compute"]) for row in rows} == {
        (name, compute) for name in ("MPI_Iallreduce", "mpiring auto", "Gloo")
        for compute in ("numpy", "python")}
    for row in rows:
        assert row["bytes"] == 102400 and row["buckets"] == 3 and row["rounds"] == 2
        assert 0 <= row["overlap_percent"] <= 100 and row["total_over_longest"] > 0


@pytest.mark.launch
@pytest.mark.any_mpi
def test_what_is_wrong_fails_the_benchmark():
    installed("torch")
    later = (*TORCH, "--models", "mlp")
    reducing = (*REDUCERS, "--reducers", "alone,dense,bf16")
    latencies = [(*LATENCY, "--tests", test) for test in ("allreduce", "iallreduce")]
    ended = in_turn(2, ALLREDUCE, *latencies, OVERLAP, STEPS, TORCH, later, reducing,
                    wrong=True, MPIRING_SHARED_MEMORY="0")
    assert ended.status == 0, ended.output
    statuses = re.findall(r"^(\w+) ended with status 1$", ended.output, re.MULTILINE)
    names = ["allreduce", "latency", "latency", "overlap", "steps", "steps", "steps", "reducers"]
    assert sorted(statuses) == sorted(2 * names), ended.output
    told = re.findall(r"^FAILED: (.*)", ended.output, re.MULTILINE)
    patterns = [
        r"wrong on rank 1: element 1 of 2 float32 is .*, which is not the sum",
        *2 * [r"wrong on rank 1: element 0 of 1 float32 is .*, which is not the sum"],
        r"wrong on rank 1: element \d+ of \d+ float32 is .*, which is not the sum",
        r"wrong after backward on rank 1: the gradients .*b2.* are not the means over ranks",
        r"wrong on rank 1: the gradients .*bias.* are not the means over ranks",
        r"wrong on rank 0: after training, the parameters .*bias.* are not those with Gloo",
        r"bf16 on rank 0: the parameters differ between ranks after training"]
    assert len(told) == len(patterns), told
    for text, pattern in zip(told, patterns):
        assert re.match(pattern, text), text


def test_horovod_declines_what_it_cannot_sum(monkeypatch):
    torch = needed("torch")
    done = []

    def begin(tensor, name, op):
        if tensor.dtype == torch.bfloat16:
            raise ValueError("Tensor type torch.BFloat16Tensor is not supported.")
        return name

    horovod = SimpleNamespace(init=lambda: None, allreduce_async_=begin, synchronize=done.append,
                              Sum="sum")
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=horovod))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    contender = contenders.horovod()
    again, wait = contender.blocking(np.ones(3)), contender.starting(np.ones(3))()
    for call in (again, again, wait):
        call()
    assert done == ["array 0", "array 0", "array 1"]
    bfloat16 = inputs.dtype_of("bfloat16")
    with pytest.raises(ConfigError, match="Horovod has no bfloat16"):
        contender.blocking(np.ones(3, bfloat16))()
