"""Tests how jobs in a child process end, and what is returned of their output."""

import sys
import time

import pytest
from launching import SOON_S

from mpiring.launch.child_job import ChildResult, last_lines, run


@pytest.mark.parametrize(("code", "status"), [
    ("print('hello')", 0), ("print('hello'); raise SystemExit(3)", 3),
    ("import os; print('hello', flush=True); os.kill(os.getpid(), 9)", -9)])
def test_the_end_and_the_output_are_returned(code, status):
    for in_place in False, True:
        assert run([sys.executable, "-c", code], 60.0, in_place=in_place) == ChildResult(
            status, ["hello"])


def test_what_hangs_is_ended_with_its_children():
    began = time.monotonic()
    ended = run(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert ended == ChildResult(None, ["begun"]) and time.monotonic() - began < SOON_S


def test_last_lines_are_those_that_say_something():
    lines = ["first", "-----", "", "MPI_Init failed ", "  at rank 0"]
    assert last_lines(lines, 2) == ["MPI_Init failed", "  at rank 0"]


def test_a_command_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        run(["/nowhere/mpiexec"], 1.0)
