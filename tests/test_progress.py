"""Tests the bar that a terminal shows, the lines that others see, and the file of metrics."""

import fcntl
import json
import os
import pty
import re
import struct
import termios

import numpy as np
import pytest
from launching import needed, python

from mpiring.progress import Progress

PROGRAM = """
from mpiring.progress import Progress
progress = Progress("bench it", 2)
progress.step()
progress.say("a line")
progress.step()
progress.close()
Progress("hidden", 2, shown=False).say("hidden, too")
"""


def test_a_terminal_shows_a_bar():
    needed("tqdm")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    ended = python("-c", PROGRAM, stderr=slave)
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert ended.returncode == 0 and ended.stdout == "a line\n"
    assert "bench it" in shown and "0/2" in shown and "hidden" not in shown


def test_elsewhere_there_are_only_lines():
    ended = python("-c", PROGRAM)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "a line\n", "")


def test_lines_tell_now_and_then_how_far_it_is(capsys):
    with Progress("training", 10, done=4, lines_every_s=0) as progress:
        progress.step()
    with Progress("training", 10, shown=False, lines_every_s=0) as progress:
        progress.step()
    assert re.fullmatch(r"training: 5 of 10, \S+ per s, [\d,]+ s left\n", capsys.readouterr().err)


# A limit on the size of files has the effect of a full disk.
ON_A_FULL_DISK = """
import resource, sys
from mpiring.progress import Progress
with Progress("training", 9, metrics=sys.argv[1], lines_every_s=0) as progress:
    progress.record(1, loss=0.5)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(map(len, open(sys.argv[1]))), limit[1]))
    sys.stderr, stderr = open("/dev/full", "w", buffering=1), sys.stderr
    progress.step()
    sys.stderr = stderr
    for step in range(2, 5):
        progress.record(step, loss=0.5)
"""


def test_a_full_disk_does_not_end_the_training(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ended = python("-c", ON_A_FULL_DISK, path)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert ended.stderr.count("the metrics end here; training continues") == 1, ended.stderr
    assert steps_in(path) == [1]


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_are_lines_of_json_that_are_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Progress("training", 10, metrics=path) as progress:
        progress.record(1, loss=np.float32(0.5), count=np.int64(3), bad=float("nan"), name="a")
        metrics = json.loads(path.read_text())
    assert metrics.pop("time") > 0
    assert metrics == {"step": 1, "loss": 0.5, "count": 3, "bad": None, "name": "a"}
    with Progress("training", 10, shown=False, metrics=tmp_path / "none") as progress:
        progress.record(1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("done, kept", [(0, []), (2, [1, 2]), (5, [1, 2, 3])])
def test_a_run_that_goes_on_replaces_the_steps_that_it_does_again(tmp_path, done, kept):
    path = tmp_path / "metrics.jsonl"
    with Progress("training", 10, metrics=path) as progress:
        for step in (1, 2, 3):
            progress.record(step)
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')         # the job was killed here
    with Progress("training", 10, done=done, metrics=path) as progress:
        assert steps_in(path) == kept
        progress.record(done + 1)
    assert steps_in(path) == [*kept, done + 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_are_no_link(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "victim").write_text("{}\n")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link, which is not followed.*metrics.jsonl"):
        Progress("training", 10, metrics=path)
    assert (tmp_path / "victim").read_text() == "{}\n"
