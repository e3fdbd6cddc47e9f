"""Starts MPI jobs for tests, and never lets one hang."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Time limits. A job that should soon end by itself ends within SOON_S, even if other programs keep
# every core busy; nothing else ends it before stall_timeout_s, 600 s. A job that runs for HANG_S
# hangs.
SOON_S, HANG_S = 60, 240
PROGRAMS = ROOT / "tests" / "programs"
# Folder in which jobs share compiled code; code of changed functions is not used.
MACHINE_CODE = ROOT / ".pytest_cache" / "d" / "machine_code"
# Number of jobs that were started, by number of ranks.
STARTS: Counter[int] = Counter()


@dataclass
class Ended:
    """How a job ended."""

    status: int
    output: str
    seconds: float

    def assert_well(self, ranks):
        """Fail unless the program came to its end on each rank, and said so."""
        assert self.status == 0 and self.output.count("all is well") == ranks, self.output


def default_signals():
    """Restore default signals: background jobs of scripts ignore SIGINT, and nohup ignores SIGHUP.

    Processes that tests start inherit them. Python itself ignores SIGPIPE and SIGXFSZ.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {
            signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def until(condition):
    """Wait for a condition; fail if it is late."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


def status_of(main, *arguments):
    """Return the exit status of a command, which argparse may raise."""
    try:
        return main(*arguments)
    except SystemExit as end:
        return end.code


def missing(text):
    """Skip, or fail in CI, because something is missing, which the text names."""
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(reason=text, allow_module_level=True)


def tracked_files():
    """Return the names of the files of the checkout; skip, or fail in CI, without git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode:
        missing(f"not a git checkout: {listed.stderr}")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def mpiexec():
    """Return the mpiexec of this environment; skip, or fail in CI, if there is none."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpiexec") or missing("no mpiexec: pip install mpich")


def installed(module):
    """Skip, or fail in CI, if an optional module is not installed."""
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    # A folder with the name of the package, such as pip's `build`, is a module without a file.
    if spec is None or spec.origin is None:
        missing(f"no {package}: pip install {package}")


def needed(module):
    """Return an optional module; skip, or fail in CI, if it is not installed."""
    installed(module)
    with warnings.catch_warnings():
        # Warnings of a package at its import are not ours.
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def environment(**variables):
    """Return the variables of a job: one thread per rank, and the checkout's package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # By default, Open MPI 4 and 5 refuse root, and more ranks than cores.
    openmpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    # Measure nothing and store nothing in the user's home unless a test asks for it.
    quiet = {"MPIRING_TUNING": "0", "MPIRING_TUNING_FOLDER": str(MACHINE_CODE)}
    # Unbuffered, print writes text and newline separately: lines of two ranks would mix.
    whole_lines = {"PYTHONUNBUFFERED": ""}
    return {**os.environ, **openmpi, **quiet, **whole_lines, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path, **variables}


def start(ranks, *command, options=(), cwd=ROOT, stdout=subprocess.PIPE, **variables):
    """Start `python command…` on some ranks, in a process group of its own.

    Args:
        options: Options of mpiexec.
        cwd: Folder in which it runs.
        stdout: File for its output; a pipe by default.
        variables: Environment variables.
    """
    STARTS[ranks] += 1
    return subprocess.Popen(
        [mpiexec(), *options, "-n", str(ranks), sys.executable, *map(str, command)],
        stdout=stdout, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, errors="replace", cwd=cwd, env=environment(**variables),
        start_new_session=True)


def finish(job, timeout_s=HANG_S):
    """Wait for a job, and kill it after the time limit."""
    began = time.monotonic()
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        pytest.fail(f"the job hung for {timeout_s} s:\n{output[-5000:]}")
    return Ended(job.returncode, output, time.monotonic() - began)


def launch(ranks, *command, timeout_s=HANG_S, options=(), cwd=ROOT, **variables):
    """Run `python command…` on some ranks to its end."""
    return finish(start(ranks, *command, options=options, cwd=cwd, **variables), timeout_s)


def shell(text, timeout_s=HANG_S, cwd=ROOT):
    """Run shell commands until the end or the first failure."""
    variables = environment()
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    return finish(subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, errors="replace", cwd=cwd, env=variables,
        start_new_session=True), timeout_s)


def python(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **variables):
    """Run `python words…` without MPI's launcher to its end."""
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=stdout, text=True,
                          stderr=stderr, env=environment(**variables), timeout=HANG_S)
