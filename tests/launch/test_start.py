"""Tests launches that went wrong, in processes of their own."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launching import ROOT, environment, finish, installed, mpiexec, python
from launching import launch as job

from mpiring import LaunchError
from mpiring.launch import start as launch
from mpiring.remedies import get_mpi

pytestmark = pytest.mark.launch


INIT = "import mpiring; comm = mpiring.init(); print(comm.size, comm.allreduce.__name__)"


@pytest.mark.parametrize(("told", "words"), [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, ["Open MPI's mpirun", "`mpirun -n 4 python train.py --lr 1`"]),
    ({"MV2_COMM_WORLD_SIZE": "4"}, ["MVAPICH", "`mpirun_rsh -np 4 "]),
    ({"PALS_RANKID": "3"}, ["PALS_RANKID=3 (Cray's mpiexec) says that 4", "`mpiexec -n 4 "]),
    ({"FLUX_JOB_SIZE": "4"}, ["flux run", "`flux run -n 4 "]),
    ({"SLURM_STEP_NUM_TASKS": "4"}, [
        "(srun) says", "srun --mpi=pmi2 (MPICH)", "in a batch script, the mpirun"]),
    ({"SLURM_NTASKS": "4"}, ["SLURM_NTASKS=4 (Slurm)", "`srun -n 4 python train.py --lr 1`"]),
    ({"WORLD_SIZE": "4"}, ["another launcher than MPI's starts", "`mpirun -n 4 "]),
    ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "1"}, [
        "torchrun starts processes", "`mpirun -n 4 python train.py --lr 1`"]),
    ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "1", "SLURM_NTASKS": "4"}, ["`srun -n 4 "]),
])
def test_ranks_that_became_worlds_of_their_own_are_refused(monkeypatch, told, words):
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))
    monkeypatch.setattr(launch, "load_mpi", lambda: alone)
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-u", "train.py", "--lr", "1"])
    with pytest.raises(LaunchError) as refused:
        launch.mpi_world(allow_singleton=False)
    for text in (*words, "says that 4 ranks", "alone in its MPI world", "MPIRING_ALLOW_SINGLETON"):
        assert text in str(refused.value)
    assert launch.mpi_world(allow_singleton=True) is alone.COMM_WORLD
    alone.COMM_WORLD.Get_size = lambda: 4
    assert launch.mpi_world(allow_singleton=False) is alone.COMM_WORLD


def test_the_command_is_the_users_own(monkeypatch):
    for words, command in [(["-u", "-m", "train", "a b"], "python -m train 'a b'"),
                           (["-c", "import mpiring"], "python train.py"), ([], "python train.py")]:
        monkeypatch.setattr(sys, "orig_argv", ["python3", *words])
        assert f"{command}`" in str(launch.refusal(2, "so it is"))


DOORS = """
import torch.distributed as dist, mpiring, mpiring.torch
for door in (mpiring.init, lambda: dist.init_process_group("mpiring", init_method="mpi://"),
             lambda: dist.init_process_group("mpiring")):
    try: door()
    except mpiring.LaunchError as error: print(f"refused: {error}")
"""


@pytest.mark.any_mpi
def test_torchrun_is_refused_at_every_door(tmp_path):
    """Also in a job of MPI's, whose start may die of what torchrun has closed."""
    installed("torch")
    program = tmp_path / "train.py"
    program.write_text(DOORS)
    ended = finish(subprocess.Popen(
        [mpiexec(), "-n", "1", sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0", str(program), "--lr", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        env=environment(), cwd=ROOT, start_new_session=True))
    assert ended.output.count("refused: WORLD_SIZE=2 (torchrun)") == 6, ended.output
    assert ended.output.count("that MPI's world has 1: torchrun starts") == 6, ended.output
    assert ended.output.count(f"`mpirun -n 2 python {program} --lr 1`") == 6


def test_torchruns_variables_harm_no_world_of_mpi():
    """As where srun has started a torchrun per rank; and those that `export_environment` sets."""
    torchruns = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}
    ended = job(2, "-c", "import os, mpiring; mpiring.init(); os.environ['WORLD_SIZE'] = '3'\n"
                "del os.environ['TORCHELASTIC_RUN_ID']; print('size', mpiring.init().size)",
                **torchruns)
    assert ended.status == 0 and ended.output.count("size 2") == 2, ended.output


@pytest.mark.any_mpi
@pytest.mark.parametrize(("start", "ranks"), [
    ("os.execve(sys.executable, command, kept)", 1),
    ("sys.exit(subprocess.run(command, env=kept).returncode)", 2)])
def test_a_wrapper_that_drops_the_environment_is_noticed(start, ranks):
    ended = job(ranks, "-c", f"import os, subprocess, sys\n"
                f"command = [sys.executable, '-c', {INIT!r}]\n"
                f"kept = {{name: os.environ[name] for name in ('PATH', 'PYTHONPATH', 'HOME') "
                f"if name in os.environ}}\n{start}")
    if ranks == 1:
        assert ended.status == 0 and "1 allreduce" in ended.output, ended.output
    else:
        assert ended.status and "1 allreduce" not in ended.output, ended.output
        assert "alone in its MPI world and has none of the launcher's variables" in ended.output


CHILDREN = """
import multiprocessing, subprocess, sys, mpiring
def attempt(_=None):
    try: return mpiring.init().size
    except mpiring.LaunchError as error: return str(error)
if __name__ == "__main__":
    comm, code = mpiring.init(), "import mpiring; print('size', mpiring.init().size)"
    command = [sys.executable, "-c", code]
    for words in command, ["sh", "-c", '"$@"; exit 3', "sh", *command]:
        child = subprocess.run(words, stderr=subprocess.PIPE, text=True)
        assert child.returncode and "LaunchError" in child.stderr, child
        print(child.stderr)
    for method in "spawn", "forkserver":
        with multiprocessing.get_context(method).Pool(1) as pool: print(*pool.map(attempt, [0]))
    subprocess.run([sys.argv[1], "-n", "2", *command], check=True)
"""


def test_a_child_of_a_rank_is_refused_and_another_job_is_not(tmp_path):
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    ended = job(1, program, mpiexec())
    assert ended.status == 0 and ended.output.count("size 2") == 2, ended.output
    assert ended.output.count("was started by a rank (process ") == 4, ended.output
    assert ended.output.count('below `if __name__ == "__main__":`') == 4
    # Without a launcher, each of them is a world of its own.
    code = "import mpiring, subprocess, sys; mpiring.init(); subprocess.run([sys.executable, '-c'"
    alone = python("-c", f"{code}, {INIT!r}])")
    assert alone.stdout == "1 allreduce\n", alone.stderr


def test_one_rank_can_be_meant():
    ended = python("-c", INIT, SLURM_NTASKS="4", MPIRING_ALLOW_SINGLETON="1")
    assert ended.stdout == "1 allreduce\n", ended.stderr


def test_finalized_mpi_is_an_error_of_ours():
    ended = python(
        "-c", "import numpy, mpiring; from mpi4py import MPI\n"
        "comm = mpiring.init(); MPI.Finalize()\n"
        "try: comm.allreduce(numpy.ones(3))\n"
        "except mpiring.ClosedError as error: print(error)\n"
        "try: mpiring.init()\n"
        "except mpiring.ClosedError as error: print(error)")
    assert ended.stdout.count("MPI is finalized") == 2, ended.stderr
    assert ended.returncode == 0


def test_a_missing_mpi_library_is_an_error_with_the_remedy():
    code = "import sys, mpiring; sys.modules['mpi4py.MPI'] = None; mpiring.init()"
    ended = python("-c", code)
    assert "MissingDependencyError" in ended.stderr
    assert f"; {get_mpi()}" in ended.stderr


def test_a_start_imports_nothing_that_only_some_programs_need():
    """Many ranks on few cores import one after the other."""
    names = ["difflib", "email", "importlib.metadata", "shutil", "socket", "subprocess", "zipfile"]
    code = ("import sys, numpy; from mpi4py import MPI; before = set(sys.modules); import mpiring; "
            f"mpiring.init(); print(*(sys.modules.keys() - before).intersection({names}))")
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout.split()) == (0, [])
