"""Starts the MPI jobs of a benchmark that was started without a launcher."""

import dataclasses
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import MissingDependencyError
from ...launch.start import find_mpiexec
from ..files import Environment
from ..output import OutputError
from .results import Measurement

LEVELS = ("multiple", "serialized")
# A job prints this line after each case.
BEAT = "case done"


@dataclass(frozen=True)
class Job:
    """An MPI job.

    Attributes:
        level: MPI's thread level.
        rounds: Number of measurements of each case; None where a benchmark has no rounds.
        peers: Whether Gloo and Horovod take part, which do not depend on MPI's thread level.
    """

    level: str
    rounds: int | None
    peers: bool


def plan(levels: Sequence[str], rounds: int | None) -> list[Job]:
    """Return jobs that alternate between the levels, there and back; a single job for one level.

    So other programs on the machine disturb all levels alike.
    """
    if len(levels) == 1 or rounds is None:
        return [Job(levels[0], rounds, peers=True)]
    half = math.ceil(rounds / 2)
    return [Job(level, half, peers=level == levels[0]) for level in (*levels, *reversed(levels))]


def run_all(planned: Sequence[Job], ranks: int, words: Sequence[str], beat: Callable[[], None],
            ) -> tuple[int, Environment, list[Measurement]]:
    """Run jobs one after another, and return exit status, environment and measurements.

    Args:
        planned: From `plan`.
        ranks: Of each job.
        words: The command line that they share, without `python`.
        beat: Called after each case.

    Raises:
        MissingDependencyError: There is no mpiexec.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise MissingDependencyError("there is no mpiexec: pip install 'mpiring[mpich]', or load "
                                     "your cluster's MPI module")
    about: Environment = {}
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.json")
        for job in planned:
            alone = [] if job.peers else ["--without-peers"]
            rounds = [] if job.rounds is None else ["--rounds", str(job.rounds)]
            status = _run_job(
                ["env", f"MPI4PY_RC_THREAD_LEVEL={job.level}", mpiexec, "-n", str(ranks),
                 sys.executable, *words, *alone, *rounds, "--part", str(part)],
                beat)
            if status:
                return status, about, found
            first, measurements = read_part(part)
            # The environment of the first job, with the command and levels of all.
            about = about or first
            found += measurements
    levels = dict.fromkeys(job.level for job in planned)
    about |= {"thread_level": " and ".join(levels),
              "command": shlex.join(["python", *words])}
    return 0, about, found


def _run_job(command: Sequence[str], beat: Callable[[], None]) -> int:
    """Run one job to its end; pass on what it prints, except its beats."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        try:
            for line in job.stdout or ():
                if line.strip() == BEAT:
                    beat()
                else:
                    print(line, end="", flush=True)
        except OutputError:
            # Nobody would see its results.
            job.terminate()
            raise
    return job.returncode


def write_part(path: str, about: Environment, found: Sequence[Measurement]) -> None:
    """Write all readings of a job."""
    content = [about, [dataclasses.astuple(measurement) for measurement in found]]
    Path(path).write_text(json.dumps(content))


def read_part(path: Path) -> tuple[Environment, list[Measurement]]:
    """Return environment and readings from `write_part`."""
    about, found = json.loads(path.read_text())
    return about, [Measurement(labels, readings) for labels, readings in found]
