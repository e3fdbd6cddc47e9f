"""Tests the ranks that run one program after the other: each finds them new, and leaves them so."""

import json
import time

import numpy as np
import pytest
from jobs import run
from launching import SOON_S, installed

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

# Changes whatever a program can change in its process.
CHANGES = """
import atexit, faulthandler, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, mpiring
faulthandler.dump_traceback_later(1, exit=True)
os.environ["OF_A_PROGRAM"] = "1"
os.chdir("/")
sys.path.insert(0, "/nowhere")
warnings.simplefilter("error")
logging.getLogger("mpiring").addHandler(logging.NullHandler())
logging.getLogger().setLevel("DEBUG")
signal.signal(signal.SIGUSR1, lambda *_: None)
numpy.seterr(all="raise")
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
sys.excepthook = threading.excepthook = print
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
comm = mpiring.init()
atexit.register(print, "the end of", comm.size)
"""
SHOWS = """
import json, logging, os, random, signal, sys, threading, warnings
import numpy, torch
print(json.dumps({
    "variables": sorted(os.environ), "folder": os.getcwd(), "path": sys.path,
    "warnings": repr(warnings.filters), "level": logging.getLogger().level,
    "handlers": len(logging.getLogger("mpiring").handlers), "words": sys.argv,
    "signal": repr(signal.getsignal(signal.SIGUSR1)), "errors": numpy.geterr(),
    "dtype": str(torch.get_default_dtype()), "graphs": torch.is_grad_enabled(),
    "hooks": repr([sys.excepthook, threading.excepthook])}))
print(json.dumps([random.random(), numpy.random.random(), torch.rand(1).item()]))
"""


def shown(tmp_path):
    ended = run(1, "-c", SHOWS, "a word", cwd=tmp_path)
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in ended.output.splitlines()]


def test_what_a_program_changes_is_undone(tmp_path):
    installed("torch")
    before, random = shown(tmp_path)
    assert before["folder"] == str(tmp_path) and before["words"] == ["-c", "a word"]
    ended = run(1, "-c", CHANGES)
    assert ended.status == 0 and ended.output == "the end of 1\n", ended.output
    # Longer than until the program would have ended itself.
    time.sleep(2)
    after, other = shown(tmp_path)
    assert not {name: (x, after[name]) for name, x in before.items() if after[name] != x}
    assert all(a != b for a, b in zip(random, other))


def test_modules_beside_a_program_are_its_own(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "beside.py").write_text(f"NUMBER = {number}")
        (folder / "program.py").write_text("import beside; print(beside.NUMBER)")
        assert run(1, folder / "program.py").output == f"{number}\n"


@pytest.mark.parametrize(("program", "status", "told"), [
    ("import sys; sys.exit(3)", 3, ""), ("import sys; sys.exit('a reason')", 1, "a reason"),
    ("raise ValueError('a bug')", 1, "ValueError: a bug"),
    ("import atexit; atexit.register(lambda: 1 / 0)", 1, "ZeroDivisionError")])
def test_a_program_that_fails_is_told_and_the_next_one_runs(program, status, told):
    ended = run(1, "-c", program)
    assert ended.status == status and told in ended.output, ended
    assert run(1, "-c", "print('well')").output == "well\n"


LEAVES = """
import builtins, multiprocessing, os, threading, time
import mpiring
from mpiring.launch import exits
threading.Thread(target=lambda: time.sleep(60), name="a thread", daemon=True).start()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
builtins.kept = mpiring.init(), [os.open("/dev/null", 0) for _ in range(100)]
exits.unregister(kept[0]._group._close_at_exit)
"""


def test_what_a_program_leaves_behind_is_named():
    with pytest.raises(pytest.fail.Exception, match="left something behind: rank 0") as failed:
        run(1, "-c", LEAVES)
    for told in ("runs the thread 'a thread'", "has the process ", "has 1 open communicators",
                 "open files: [('/dev/null', 10"):
        assert told in str(failed.value)
    assert run(1, "-c", "print('well')").output == "well\n"


def test_a_rank_that_hangs_is_ended_and_so_are_those_that_wait_for_one_that_died():
    begin = "import time; from mpi4py import MPI; rank = MPI.COMM_WORLD.rank; print('before', rank)"
    with pytest.raises(pytest.fail.Exception, match="hung for 8 s on 2 ranks, of which 1 have"):
        run(2, "-c", f"{begin}; time.sleep(600 * rank)", timeout_s=8)
    ended = run(2, "-c", f"{begin}; import os; os._exit(5) if rank else MPI.COMM_WORLD.Barrier()")
    assert ended.status and ended.seconds < SOON_S and "before 0" in ended.output, ended


def total(comm, more, wrong=None):
    assert comm.rank != wrong, f"{more} is too much"
    return comm.rank, comm.allreduce(np.full(2, comm.rank + more)).tolist()


def test_a_function_returns_the_results_of_all_ranks(ranks):
    assert ranks(3, total, 5) == [(rank, [18, 18]) for rank in range(3)]


def test_a_function_that_raises_names_the_rank(ranks):
    with pytest.raises(pytest.fail.Exception, match=(
            "AssertionError: 5 is too much\nmpiring: rank 1 of 2 on .* failed")):
        ranks(2, total, 5, 1)
