"""Tests the warning at the end of a job whose ranks have sent nothing to each other."""

import pytest
from jobs import run
from launching import PROGRAMS, installed, launch

WARNING = "mpiring has sent nothing between the 3 ranks of this job"
SILENT = ["nothing", "separate models", "close", "split", "empty", "prepare", "persistent",
          "no message", "trace", "mpi4py"]
COMMUNICATING = ["barrier", "allreduce", "background", "persistent call", "object",
                 "some ranks", "message", "other communicator", "NumPy", "PyTorch", "back end",
                 "Gloo", "Horovod"]


@pytest.mark.launch
@pytest.mark.parametrize("way", SILENT + COMMUNICATING)
def test_only_ranks_that_send_nothing_are_told_and_once(way, tmp_path):
    installed("torch")
    ended = run(3, PROGRAMS / "silent.py", way, cwd=tmp_path)
    assert ended.status == 0 and ended.output.count("sent nothing") == (way in SILENT), ended.output
    if way in SILENT:
        line, = ended.output.splitlines()
        assert WARNING in line and "DataParallel of mpiring.torch" in line


@pytest.mark.launch
@pytest.mark.parametrize("ranks, program, told", [
    (2, "mpiring.init()", True),
    (1, "mpiring.init()", False),
    (2, "mpiring.init(); raise ValueError", False),
    (2, "mpiring.init(config=mpiring.Config(abort_on_exception=False)); raise ValueError", False),
    (2, "import logging; logging.getLogger('mpiring').setLevel('ERROR'); mpiring.init()", False),
    (2, "import os; mpiring.init().close(); os.fork() or exit()", True),
])
def test_processes_that_end(ranks, program, told):
    ended = launch(ranks, "-c", f"import mpiring; {program}")
    assert (ended.status != 0) == ("raise" in program), ended.output
    assert ended.output.count("sent nothing") == told, ended.output
