"""Tests launches that went wrong, in processes of their own."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from launching import HANG_S, ROOT, environment

from mpiring.launch import JobEnder

pytestmark = pytest.mark.launch


def python(code, **variables):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env=environment(**variables), timeout=HANG_S)


INIT = "import mpiring; comm = mpiring.init(); print(comm.size, comm.allreduce.__name__)"


@pytest.mark.parametrize(("variable", "launcher"), [
    ("SLURM_NTASKS", "Slurm"), ("SLURM_STEP_NUM_TASKS", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI"),
])
def test_ranks_that_became_worlds_of_their_own_are_refused(variable, launcher):
    ended = python(INIT, **{variable: "4"})
    assert ended.returncode == 1
    assert "LaunchError" in ended.stderr and f"{variable}=4" in ended.stderr
    assert launcher in ended.stderr
    for remedy in ("srun --mpi=pmi2", "mpirun", "MPIRING_ALLOW_SINGLETON=1"):
        assert remedy in ended.stderr


def test_one_rank_can_be_meant():
    ended = python(INIT, SLURM_NTASKS="4", MPIRING_ALLOW_SINGLETON="1")
    assert ended.stdout == "1 allreduce\n", ended.stderr
    assert python(INIT, SLURM_NTASKS="1").returncode == 0


def test_finalised_mpi_is_an_error_of_ours():
    ended = python(
        "import numpy, mpiring; from mpi4py import MPI; comm = mpiring.init(); MPI.Finalize()\n"
        "try: comm.allreduce(numpy.ones(3))\n"
        "except mpiring.ClosedError as error: print(error)\n"
        "try: mpiring.init()\n"
        "except mpiring.ClosedError as error: print(error)")
    assert ended.stdout.count("MPI is finalised") == 2, ended.stderr
    assert ended.returncode == 0


def test_a_missing_mpi_library_is_an_error_with_the_remedy():
    ended = python("import sys, mpiring; sys.modules['mpi4py.MPI'] = None; mpiring.init()")
    assert "MissingDependencyError" in ended.stderr
    assert "pip install 'mpiring[mpich]'" in ended.stderr


def test_a_failure_is_printed_in_one_write(monkeypatch):
    class Aborted(Exception):
        pass

    def abort(status):
        raise Aborted(status)

    writes, seen = [], []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=seen.append, flush=lambda: None))
    with pytest.raises(Aborted, match="1"):
        JobEnder(1, 3, abort)(ValueError("a bug"))
    (text,) = writes
    assert seen == writes, "whoever has replaced stderr may hold it back"
    assert "ValueError: a bug\nmpiring: rank 1 of 3 on " in text and text.endswith("job ends\n")
