"""Tests by which command a new rank runs the same program."""

import sys

import pytest
from launching import python

from mpiring import ConfigError
from mpiring.elastic import joining


def started(monkeypatch, *words):
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    return joining.command([1, 3])[1:]


@pytest.mark.parametrize(("options", "program"), [
    ([], ["train.py", "-c", "1"]),
    (["-u", "-W", "error", "-Xdev", "-X", "utf8"], ["train.py"]),
    (["-u"], ["-m", "package.train", "--lr", "1"]),
])
def test_options_and_program_stay(monkeypatch, options, program):
    words = started(monkeypatch, *options, *program)
    assert words == [*options, "-c", joining._MAIN, "1,3", *program]
    # A new rank starts others in the same way.
    assert started(monkeypatch, *words) == words


@pytest.mark.parametrize("words", [[], ["-i"], ["-c", "print()"], ["-uc", "print()"]])
def test_programs_that_nobody_else_can_start(monkeypatch, words):
    with pytest.raises(ConfigError, match="neither a file nor a module"):
        started(monkeypatch, *words)


def test_run_is_called_once(monkeypatch):
    monkeypatch.setattr(joining, "_has_run", False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert joining.take(may_grow=True) is None
    assert joining.take(may_grow=False) is None
    with pytest.raises(ConfigError, match="call elastic.run once"):
        joining.take(may_grow=True)


def test_waiting_for_new_ranks_ends():
    """MPI itself would wait forever for one that has died before it has started MPI."""
    ended = python("-c", "from mpiring.elastic.recovery import _limit\nwith _limit(0.1):\n"
                         "    __import__('time').sleep(100)")
    assert ended.returncode == 1 and "have not joined for 0.1 s" in ended.stderr
