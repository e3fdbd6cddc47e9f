"""The command `python -m mpiring doctor`: examines all ranks, and reports once."""

import argparse
import sys
import time
from typing import Any

from ...launch.environment import launched_rank, launched_size, launcher_of
from ..arguments import above_zero
from . import containers, gather, gpu, launch, library, memory, network, processors
from .child import examined
from .examine import examine
from .facts import ENDING, LOADING, STARTING, Failure, Job, Library
from .findings import PROBLEM, Section, merged, worst
from .report import as_json, as_text

# The subjects, in the order of the report.
SUBJECTS = (
    ("Python and MPI", library.findings), ("Launch", launch.findings),
    ("Containers", containers.findings), ("Processors", processors.findings),
    ("Memory and processes", memory.findings), ("Network", network.findings),
    ("GPUs", gpu.findings), ("After a rank's death", launch.survival),
    ("Packages", library.packages))

# How much longer than the reporting rank a failed rank stays: mpirun ends all ranks when a rank
# ends that was in MPI, before the report; srun does not.
_LINGER_S = 8.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Says what is wrong with an MPI launch or a machine, and how to mend it; alone, or on all "
        "ranks: mpirun -n 4 python -m mpiring doctor. The exit status is 1 where there is a "
        "problem.")
    parser.set_defaults(action=run)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--deadline", type=above_zero, default=30.0, metavar="SECONDS",
                        help="end the examination by then, and report what was seen; default: 30")
    parser.add_argument("--examine", type=int, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Examine this rank; print the report in one of the processes.

    Returns:
        1 if the report has a problem, else 0.
    """
    if options.examine is not None:
        examine(options.examine, options.deadline)
        return 0
    began = time.monotonic()
    found, failure = examined(options.deadline)
    rank = launched_rank() or 0 if launcher_of() else 0
    if found.get("size", 0) > 1:
        rank = found["ranks"][0].rank
    if rank > 0:
        if "library" in found and found["library"].error:
            failure = Failure(stage=LOADING, how="mpi4py cannot load one")
        if failure is not None:
            _stand_by(rank, failure, found, began + options.deadline + _LINGER_S)
        return 0
    job = _job(found, failure)
    sections = judged(job)
    print(as_json(sections, job) if options.json else as_text(sections, job), flush=True)
    return int(worst(finding for section in sections for finding in section.findings) == PROBLEM)


def _job(found: dict[str, Any], failure: Failure | None) -> Job:
    """Join what the child has found and what can be found without MPI."""
    library = found.pop("library", Library(error=failure.how if failure else ""))
    if "ranks" not in found:
        found = {**found, "ranks": [gather.rank(0, library)], "size": 0}
    wanted, wanted_by = launched_size()
    here = found["ranks"][0]
    return Job(**found, failure=failure, wanted=wanted, wanted_by=wanted_by,
               mpirun=gather.mpirun(here.library), slurm=gather.slurm(here.variables))


def judged(job: Job) -> list[Section]:
    """Return all findings, by subject; a pure function of the facts."""
    return [Section(title, merged(findings(job), len(job.ranks))) for title, findings in SUBJECTS]


def _stand_by(rank: int, failure: Failure, found: dict[str, Any], until: float) -> None:
    """Print on standard error that this rank has failed, where the report may not show it.

    Where rank 0 failed for the same reason, as on one node, the report is enough.
    """
    here = found["ranks"][0] if "ranks" in found else gather.rank(
        rank, found.get("library", Library()))
    # Failures of the start are printed once per node, later ones by each rank.
    alike = launch.is_mismatched(here)
    first = launched_rank(local=True) == 0 or failure.stage not in (LOADING, STARTING)
    if not failure.late and not alike and first:
        print(f"mpiring doctor: rank {rank} on {here.host}: {failure.stage}: {failure.how}; "
              f"{' '.join(failure.printed[-2:])}", file=sys.stderr, flush=True)
    # Where all are late, the first looks for the others.
    if (failure.late or launcher_of(here.variables) != "srun") and failure.stage not in (
            LOADING, ENDING):
        time.sleep(max(0.0, until - time.monotonic()))
