"""Tests when the processors of ranks count as busy, and what a warning says of the cause."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
from launching import launch

from mpiring.tools import busy
from mpiring.tools.busy import ProcessorUse, busy_warning

IDLE = ProcessorUse(0.99, "n1", 0.1, 64, frozenset({4, 5}), math.inf)


def test_the_time_of_this_rank_counts(monkeypatch):
    """Its own clock shows what it gets, whatever else runs on the machine."""
    used, now_s = iter([0.0, 0.03]), itertools.count(0, 0.02)
    monkeypatch.setattr(busy, "time", SimpleNamespace(
        perf_counter=lambda: next(now_s), thread_time=lambda: next(used)))
    use = busy.processor_use()
    assert use.share == pytest.approx(0.25) and use.allowed and use.quota > 0
    assert "rank 1 got 25%" in busy_warning([IDLE, use, IDLE], "")


def test_the_load_of_other_processors_is_no_reason():
    """Slurm may give the other processors of the node to other jobs."""
    assert busy_warning([IDLE._replace(load=60.0)] * 2, "It is wrong.") == ""


@pytest.mark.parametrize(("uses", "cause"), [
    ([IDLE, IDLE._replace(share=0.5, load=60.2)],
     "rank 1 got 50% of a core while all ranks computed. On n1, 2 ranks may use 2 of 64 "
     "processors, and the load average is 60.2. It is wrong. Other programs use the same"),
    ([IDLE._replace(share=0.66)] * 3 + [IDLE._replace(host="n2")],
     "On n1, 3 ranks may use 2 of 64 processors, and the load average is 0.1. It is wrong. Start "
     "at most 2 ranks there,"),
    ([IDLE._replace(share=0.75, quota=1.5)] * 2,
     "may use 2 of 64 processors, of which a cgroup grants 1.5, and the load average is 0.1. It "
     "is wrong. Start at most 1 rank there"),
    ([IDLE._replace(allowed=frozenset({number}), share=0.5) for number in (1, 2)],
     "2 ranks may use 2 of 64 processors")])
def test_the_warning_names_the_load_and_the_cause(uses, cause):
    text = busy_warning(uses, "It is wrong.")
    assert cause in text.replace("\n", " ") and max(map(len, text.splitlines())) <= 100


@pytest.mark.launch
@pytest.mark.any_mpi
def test_bench_and_tune_warn_and_tune_writes_json(tmp_path):
    """Here all ranks get half of a core."""
    program = tmp_path / "busy.py"
    program.write_text(
        "import sys\n"
        "from mpiring.__main__ import main\n"
        "from mpiring.tools.bench import world\n"
        "from mpiring.tools.tune import command\n"
        "for module in (world, command):\n"
        "    use = module.processor_use\n"
        "    module.processor_use = lambda use=use: use()._replace(share=0.5)\n"
        "tiny = '--sizes 8 --algorithms auto --contenders mpiring --rounds 1 --budget 0.001'\n"
        "sys.exit(main(['tune', '--json', sys.argv[1]])\n"
        "         or main(['bench', 'allreduce', *tiny.split()]))\n")
    ended = launch(2, program, tmp_path / "tune.json")
    text = ended.output.replace("\n", " ")
    assert ended.status == 0, ended.output
    assert text.count("WARNING: the machine is busy: rank 0 got 50% of a core") == 2
    assert "may name the wrong algorithm" in text and "do not compare contenders" in text
    tuned = json.loads((tmp_path / "tune.json").read_text())
    assert tuned["benchmark"] == "tune" and "is busy" in tuned["environment"]["warning"]
    assert tuned["environment"]["combining_bytes_per_s"] > 0
    assert {row["algorithm"] for row in tuned["rows"] if row["selected"]} == {"shared"}
    assert {"auto", "native"} < {row["algorithm"] for row in tuned["rows"]}
    assert all(row["us"] > 0 and row["ranks"] == 2 for row in tuned["rows"])
