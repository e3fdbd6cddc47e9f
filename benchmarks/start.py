"""Measures the time and memory to start MPI, and then mpiring, on many ranks of this machine."""

import json
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from mpiring import ConfigError
from mpiring.provisional import launch
from mpiring.tools.arguments import listed, positive
from mpiring.tools.table import Column, Row

from . import declare_json, main, report

_RANK = Path(__file__).with_name("start_rank.py")
_LIMIT_S = 300
_TITLE = ("on the slowest rank: seconds from its start to MPI's first barrier, of importing NumPy "
          "and mpiring, and of init; its memory, and that of init; threads and open files; a short "
          "allreduce; rank 0 computes, others wait")
_COLUMNS = [
    Column("ranks", 5), Column("mpi_s", 8, 3), Column("numpy_s", 8, 3), Column("import_s", 8, 3),
    Column("init_s", 8, 3), Column("pss_after_mib", 8, 3, "PSS MiB"),
    Column("pss_mib", 8, 3, "PSS +MiB"), Column("rss_mib", 8, 3, "RSS +MiB"),
    Column("threads", 7), Column("descriptors", 5, title="files"),
    Column("mpi_allreduce_ms", 8, 3, "MPI ms"), Column("allreduce_ms", 10, 3, "mpiring ms"),
    Column("computing", 8, 3, "wall/CPU"), Column("waiting_cores", 7, 3, "waiting")]


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ranks", type=listed(positive), default=[4, 16, 64, 128], metavar="A,B",
                        help="numbers of ranks (default: 4,16,64,128)")
    parser.add_argument("--rounds", type=positive, default=3,
                        help="jobs per number of ranks, for medians (default: 3)")
    declare_json(parser)
    parser.set_defaults(action=lambda options: report(
        "start", options, _COLUMNS, lambda: (_TITLE, {"rounds": options.rounds}, _rows(options))))


def _rows(options: Namespace) -> Iterator[Row]:
    """Run the jobs, and yield the medians for each number of ranks.

    Raises:
        MissingDependencyError: There is no mpiexec.
        ConfigError: A job fails.
    """
    for ranks in options.ranks:
        readings = [_job(ranks) for _ in range(options.rounds)]
        yield {"ranks": ranks, **{name: statistics.median(each[name] for each in readings)
                                  for name in readings[0]}}


def _job(ranks: int) -> dict[str, float]:
    """Run a job, and return the highest readings of its ranks."""
    mpiexec = launch.required_mpiexec()
    # The ranks get the program as text: run as a file, it would import modules from its folder.
    job = subprocess.run([mpiexec, "-n", str(ranks), sys.executable, "-c", _RANK.read_text()],
                         capture_output=True, text=True, timeout=_LIMIT_S)
    if job.returncode:
        raise ConfigError(f"{ranks} ranks: the job failed: {job.stderr[-2000:]}")
    readings: dict[str, float] = json.loads(job.stdout.splitlines()[-1])
    return readings


if __name__ == "__main__":
    sys.exit(main("start", declare))
