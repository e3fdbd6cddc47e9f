"""Tests that the commands of `run.py` exist, and runs the model of a GPU that takes only time."""

import re
import runpy
from pathlib import Path

import cupy_or_host
import pytest
from launching import ROOT, launch, python

RUN = Path(__file__).with_name("run.py")


@pytest.fixture(scope="module")
def steps():
    parts = runpy.run_path(str(RUN))["PARTS"]
    return [step for part in parts.values() for step in part(Path("out"))]


def test_every_program_and_test_file_exists(steps):
    named = [word for step in steps for word in step.command
             if word.startswith(("tests/", "examples/"))]
    assert len(named) > 10 and not [word for word in named if not (ROOT / word).exists()]


def test_every_benchmark_knows_its_options(steps):
    commands = {step.command[1:4]: step.command for step in steps
                if step.command[:2] in (("-m", "mpiring"), ("-m", "benchmarks.prefetch"),
                                        ("-m", "benchmarks.codecs"))}
    assert len(commands) >= 5
    for command in commands.values():
        # argparse names all options that it does not know.
        ended = python(*command, "--last")
        assert ended.returncode == 2
        assert ended.stderr.strip().endswith("error: unrecognized arguments: --last"), ended.stderr


@pytest.mark.launch
@pytest.mark.any_mpi
def test_the_overhead_of_staged_copies_is_estimated():
    ended = launch(2, ROOT / "tests/helpers/timed_gpu.py", "--mib", "4")
    assert re.search(r"4 MiB on 2 ranks: [\d.]+ ms; copies alone 0\.17 ms", ended.output)


@pytest.mark.launch
@pytest.mark.any_mpi
def test_barriers_are_measured(monkeypatch):
    cupy_or_host.installed(monkeypatch)
    ended = launch(2, ROOT / "tests/gpu/barriers.py")
    assert ended.status == 0 and ended.output.count("gpu_us") == 2, ended.output
