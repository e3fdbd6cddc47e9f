"""The command `mpiring doctor`: examines all ranks, and reports once."""

import argparse
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from ...launch import child_job
from ...launch.environment import launched_rank, launched_size, launcher_of
from ..arguments import above_zero
from . import gather, hardware, software
from .examine import examine
from .facts import ENDING, LOADING, STARTING, Failure, JobFacts, Library, Rank, grouped
from .report import PROBLEM, Finding, Rows, as_json, as_text, merged, worst

# A table judges together the ranks that have this in common.
_GROUPS: Mapping[str, Callable[[Rank], Hashable]] = {
    "job": lambda rank: "", "machine": lambda rank: rank.container.machine,
    "node": lambda rank: rank.node, "rank": lambda rank: rank.rank}

# The subjects, in the order of the report, and the tables that judge them: each is called with the
# facts of the job, and the ranks of each group.
SUBJECTS: Mapping[str, Sequence[tuple[str, Callable[..., Rows]]]] = {
    "Python and MPI": (("rank", software.installed), ("job", software.mpirun),
                       ("rank", software.threads)),
    "Launch": (("job", software.launch), ("job", software.slurm), ("rank", software.settings)),
    "Containers": (("rank", software.container), ("job", software.images),
                   ("machine", software.shared)),
    "Processors": (("node", hardware.processors), ("rank", hardware.slurm_share)),
    "Memory and processes": (("node", hardware.shared_memory), ("rank", hardware.limits)),
    "Network": (("rank", hardware.devices), ("job", hardware.measured)),
    "GPUs": (("rank", hardware.gpus),),
    "After a rank's death": (("job", software.survival),),
    "Packages": (("rank", software.packages),)}

# A failed rank stays so much longer than the reporting rank. mpirun ends all ranks when a rank ends
# that was in MPI, before the report.
_LINGER_S = 8.0
_MAX_LINES = 12


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Finds what is wrong with an MPI launch or a machine, and how to fix it. Start it alone, "
        "or on all ranks: mpirun -n 4 python -m mpiring doctor. The exit status is 1 if there is a "
        "problem.")
    parser.set_defaults(action=run)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--deadline", type=above_zero, default=30.0, metavar="SECONDS",
                        help="seconds after which the examination ends and reports (default: 30)")
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
    facts, failure = _examined(options.deadline)
    rank = launched_rank() or 0 if launcher_of() else 0
    library = facts.pop("library", Library(error=failure.how if failure else ""))
    if "ranks" not in facts:
        facts |= {"ranks": [gather.rank(rank, library)], "size": 0}
    reporter = facts["ranks"][0]
    if facts["size"] > 1:
        rank = reporter.rank
    if rank > 0:
        if library.error and failure is None:
            failure = Failure(stage=LOADING, how="mpi4py cannot load one")
        if failure is not None:
            _stand_by(rank, failure, reporter, began + options.deadline + _LINGER_S)
        return 0
    wanted, wanted_by = launched_size()
    job = JobFacts(**facts, failure=failure, wanted=wanted, wanted_by=wanted_by,
                   mpirun=gather.mpirun(reporter.library), slurm=gather.slurm(reporter.variables))
    findings = judged(job)
    print((as_json if options.json else as_text)(findings, job), flush=True)
    return int(worst(findings) == PROBLEM)


def _examined(deadline_s: float) -> tuple[dict[str, Any], Failure | None]:
    """Examine MPI in a child that stands for this process among the launcher's ranks.

    Launchers know their ranks by variables and open files, which children inherit. If the child
    hangs or dies, this process reports it.

    Returns:
        Fields of JobFacts, as far as it came, and how it failed, if it did.
    """
    with tempfile.TemporaryFile() as answers:
        os.set_inheritable(answers.fileno(), True)
        ended = child_job.run(
            [sys.executable, "-m", "mpiring", "doctor", "--examine", str(answers.fileno()),
             "--deadline", str(deadline_s)], deadline_s, in_place=True)
        stage, facts = _read(answers)
    facts["printed"] = child_job.last_lines(ended.lines, _MAX_LINES)
    if stage == "":
        return facts, None    # however it ended after MPI did
    status = ended.status
    if status is None:
        how = f"no end within {deadline_s:g} s"
    elif status < 0:
        how = f"{signal.strsignal(-status)} (signal {-status})"
    else:
        how = f"exit status {status}"
    return facts, Failure(stage=stage, how=how, late=status is None, printed=facts["printed"])


def _read(answers: IO[bytes]) -> tuple[str, dict[str, Any]]:
    """Return the last stage, and all facts, from what the child wrote."""
    answers.seek(0)
    stage = LOADING
    facts: dict[str, Any] = {}
    while True:
        try:
            stage, more = pickle.load(answers)
        except (EOFError, pickle.UnpicklingError):
            return stage, facts
        facts.update(more)


def judged(job: JobFacts) -> list[Finding]:
    """Return all findings, by subject; a pure function of the facts."""
    return merged(
        (replace(finding, subject=subject, ranks=tuple(rank.rank for rank in ranks))
         for subject, tables in SUBJECTS.items() for group, table in tables
         for ranks in grouped(job.ranks, _GROUPS[group]).values()
         for finding in table(job, *ranks) if finding is not None), len(job.ranks))


def _stand_by(rank: int, failure: Failure, reporter: Rank, until: float) -> None:
    """Print on standard error that this rank has failed, if the report may not show it.

    If rank 0 failed for the same reason, as on one node, the report is enough.
    """
    # Failures of the start are printed once per node, later ones by each rank.
    is_first = launched_rank(local=True) == 0 or failure.stage not in (LOADING, STARTING)
    if not failure.late and not software.is_mismatched(reporter) and is_first:
        print(f"mpiring doctor: rank {rank} on {reporter.host}: {failure.stage}: {failure.how}; "
              f"{' '.join(failure.printed[-2:])}", file=sys.stderr, flush=True)
    # If all are late, the first rank looks for the others.
    if (failure.late or launcher_of(reporter.variables) != "srun") and failure.stage not in (
            LOADING, ENDING):
        time.sleep(max(0.0, until - time.monotonic()))
