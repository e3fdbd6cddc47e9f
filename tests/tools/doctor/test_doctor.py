"""Runs the doctor on launches that work, and on such that went wrong in each known way."""

import fcntl
import json
import os
import re
import subprocess
import sys

import pytest
from launching import (
    HANG_S, ROOT, SOON_S, environment, finish, launch, missing, mpiexec, python)

from mpiring.remedies import get_mpi
from mpiring.tools.doctor.facts import vendor_of, version_of

pytestmark = pytest.mark.launch

DOCTOR = ("-m", "mpiring", "doctor")
# The machine may be busy; what hangs is ended long before.
PATIENCE = ("--deadline", "60")


def alone(**variables):
    return python(*DOCTOR, *PATIENCE, **variables)


def parsed(output):
    """Return the one report in a job's output, and its findings by name."""
    assert output.count('"findings"') == 1, output
    report = json.loads(output[output.index("{"):output.rindex("}") + 1])
    return report, {finding["name"]: finding for finding in report["findings"]}


def vendor():
    return vendor_of(said_by_mpiexec())


def said_by_mpiexec():
    return subprocess.run([mpiexec(), "--version"], capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def beside_no_other_job(tmp_path_factory):
    """Wait for doctors of the other worker: in a namespace of its own, each seems one of a job."""
    folder = tmp_path_factory.getbasetemp()
    common = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    with open(common / "doctors", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_all_ranks_make_one_report():
    ended = launch(2, *DOCTOR, *PATIENCE, "--json")
    assert ended.status == 0, ended.output
    report, by_name = parsed(ended.output)
    assert (report["ranks"], len(report["nodes"])) == (2, 1)
    assert by_name["MPI library"]["value"].startswith(vendor())
    assert by_name["mpirun"]["verdict"] == "ok" and "own installation" in by_name["mpirun"]["value"]
    assert by_name["launcher"]["value"] == f"{vendor()}'s mpirun"
    assert by_name["ranks"]["value"] == "2 ranks on 1 node, 2 on each"
    assert by_name["thread level"]["value"] == "multiple"
    assert by_name["mpiring"]["value"].startswith("an allreduce of 1 MiB is right")
    assert " us, " in by_name["within a node"]["value"] and "between nodes" not in by_name
    enough = len(os.sched_getaffinity(0)) >= 2
    assert ("oversubscribed" in by_name["processors"]["value"]) != enough
    dead = by_name["survival"]
    assert dead["verdict"] == "note" and "checkpoints" in dead["remedy"]
    is_new = by_name["MPI library"]["value"].startswith("Open MPI 5")
    assert ("--with-ft ulfm" in dead["remedy"]) == is_new
    assert all(finding["remedy"] or finding["verdict"] == "ok" for finding in report["findings"])


def test_ranks_that_torchrun_has_started_are_told_once():
    """By its variables; tests/launch/test_start.py has a real one."""
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}
    first, second = (alone(**torchrun, RANK=str(rank)) for rank in (0, 1))
    assert first.returncode == 1 and (second.returncode, second.stdout) == (0, "")
    assert first.stdout.count("problem  launcher: torchrun, which") == 1
    assert re.search(r"mpi(run|exec\.hydra) -n 2 python -m mpiring doctor", first.stdout)


def test_a_rank_that_never_comes_is_no_reason_to_hang():
    program = ("import os, sys, time\n"
               "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
               "if rank == '1': time.sleep(30)\n"
               "words = ['-m', 'mpiring', 'doctor', '--deadline', '10']\n"
               "os.execv(sys.executable, [sys.executable, *words])")
    ended = launch(2, "-c", program)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert ended.output.count("no end within 10 s") == 1, ended.output
    assert "1 rank on " in ended.output and "of 2 that were asked for" in ended.output
    assert "-> if ranks are still starting, --deadline 120" in ended.output, ended.output


@pytest.mark.any_mpi
def test_without_an_mpi_library():
    ended = launch(2, *DOCTOR, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ended.status == 1
    assert ended.output.count("problem  MPI library: mpi4py cannot load one") == 1, ended.output
    assert "/nowhere/libmpi.so: cannot open shared object file" in ended.output
    assert "-> unset MPI4PY_LIBMPI" in ended.output
    assert get_mpi() in ended.output


@pytest.mark.any_mpi
def test_without_mpi4py(tmp_path):
    """And with a setting that is none."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None")
    ended = alone(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", MPIRING_STALL_TIME_S="9")
    assert ended.returncode == 1 and ended.stderr == ""
    assert "problem  mpi4py: not installed" in ended.stdout
    assert "-> pip install mpi4py" in ended.stdout
    assert "variable MPIRING_STALL_TIME_S='9'; did you mean MPIRING_STALL" in " ".join(
        ended.stdout.split())


PRIVATE = "mount -t tmpfs -o size={} none /dev/shm"


def possible(*unshare):
    """Skip, or fail in CI, where a process cannot have namespaces of its own."""
    tried = subprocess.run(["unshare", *unshare], capture_output=True, text=True)
    if tried.returncode:
        missing(f"no namespaces: {tried.stderr}")


def test_ranks_with_a_shared_memory_each():
    """As containers may have: mpiring's sums are right; MPICH is told, Open MPI finds out."""
    if vendor() == "Intel MPI":
        pytest.skip(reason="Intel MPI 2021.18 does not start so")
    mount = PRIVATE.format("64m")
    possible("-m", "sh", "-c", mount)
    ended = finish(subprocess.Popen(
        [mpiexec(), "-n", "2", "unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, *DOCTOR, *PATIENCE, "--json"], cwd=ROOT, text=True,
        env=environment(MPIR_CVAR_NOLOCAL="1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True))
    assert ended.status == 0, ended.output
    _, by_name = parsed(ended.output)
    assert by_name["mpiring"]["value"].startswith("an allreduce of 1 MiB is right")
    assert by_name["one /dev/shm"]["verdict"] == "warning"
    assert "2 ranks on one machine have 2 different ones" in by_name["one /dev/shm"]["value"]


def test_ranks_with_a_namespace_of_users_each():
    """As Apptainer's containers, where it is not root's: mpiring copies, MPICH has to be told."""
    if version_of(said_by_mpiexec()).startswith("4."):
        pytest.skip(reason="MPICH 4.0 dies of it, Open MPI 4.1 hangs: docs/reference/mpis.md")
    possible("-U", "-r", "true")
    ended = launch(2, "-c", "import os, sys; os.execvp('unshare', ['unshare', '-U', '-r', "
                   "sys.executable, '-m', 'mpiring', 'doctor', '--deadline', '60', '--json'])")
    report, by_name = parsed(ended.output)
    finding = by_name["each other's memory"]
    assert "in several namespaces of users" in finding["value"]
    if vendor() == "MPICH":
        assert (ended.status, finding["verdict"]) == (1, "problem")
        assert finding["remedy"].endswith("export MPIR_CVAR_CH4_CMA_ENABLE=0")
    else:
        assert (ended.status, finding["verdict"]) == (0, "warning")
        values = [each["value"] for each in report["findings"] if each["name"] == "mpiring"]
        assert values[0].startswith("an allreduce of 1 MiB is right")
        assert "cannot share memory with its node (Permission denied)" in values[1]


@pytest.mark.any_mpi
def test_a_tiny_shared_memory(tmp_path):
    """MPICH dies of it in MPI_Init, and the doctor does not."""
    mount = PRIVATE.format("1m")
    possible("-m", "sh", "-c", mount)
    job = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -n 2 "$@"', mpiexec(),
         sys.executable, *DOCTOR, "--deadline", "20"], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    ended = finish(job)
    assert ended.status != 0
    assert "problem  /dev/shm: 1 MiB, " in ended.output, ended.output
    assert "too small: MPICH takes 11 MiB for 2 ranks" in ended.output
    assert "-> mount -o remount,size=2G /dev/shm" in ended.output
    assert "problem  MPI_Init: " in ended.output
    assert ended.output.count("-> give /dev/shm more memory, as explained below") == 1


@pytest.mark.any_mpi
def test_a_real_slurm(slurm):
    if vendor() != "MPICH":
        pytest.skip(reason="this is about MPICH's ranks")
    command = ("-N", 2, "-n", 2, sys.executable, *DOCTOR, *PATIENCE)
    torn = slurm.run("srun", "--mpi=none", *command, timeout_s=HANG_S)
    assert torn.returncode == 1
    # Long lines are wrapped.
    report = " ".join(torn.stdout.split())
    assert report.count("each process is alone in its MPI world") == 1, torn.stdout
    assert len(re.findall(r"doctor: 1 rank on n\d, of 2 that were", report)) == 1
    assert "srun offers no PMI" in report
    assert re.search(r"in a batch script: \S*mpirun -n 2 python -m mpiring doctor", report)
    # UCX's addresses, longer by what MPICH leaves of its memory in them, can be too long for PMI.
    ended = slurm.run("srun", "--mpi=pmi2", *command, "--json", timeout_s=HANG_S,
                      MPIR_CVAR_CH4_NETMOD="ofi")
    report, by_name = parsed(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    assert len(report["nodes"]) == 2 and set(report["nodes"]) < {"n1", "n2", "n3", "n4"}
    assert by_name["launcher"]["value"].startswith("srun, with PMI by --mpi=pmi2: it starts small")
    assert by_name["ranks"]["value"].startswith("2 ranks on 2 nodes")
    assert "pmi2" in by_name["srun --mpi"]["value"]
    assert by_name["srun --kill-on-bad-exit"]["remedy"] == "srun --kill-on-bad-exit=1"
    assert "Gbit/s" in by_name["between nodes"]["value"]
