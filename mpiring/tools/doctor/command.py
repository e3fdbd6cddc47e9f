"""The command `mpiring doctor`: examines all ranks and prints one report."""

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

from ...provisional import child_job, launch
from ..arguments import above_zero
from . import gather, hardware, software
from .examine import examine
from .facts import ENDING, LOADING, STARTING, Failure, JobFacts, Library, Rank, grouped
from .report import PROBLEM, Finding, Rows, as_json, as_text, merge, worst

# Keys by which ranks are grouped. A table judges all ranks of a group together.
_GROUPS: Mapping[str, Callable[[Rank], Hashable]] = {
    "job": lambda rank: "", "machine": lambda rank: rank.container.machine,
    "node": lambda rank: rank.node, "rank": lambda rank: rank.rank}

# Subjects in the order of the report, each with its tables and their groups. A table is called with
# the facts of the job and the ranks of one group.
_SUBJECTS: Mapping[str, Sequence[tuple[str, Callable[..., Rows]]]] = {
    "Python and MPI": (("rank", software.installed), ("job", software.mpirun),
                       ("rank", software.threads)),
    "Launch": (("job", software.launching), ("job", software.slurm), ("rank", software.settings)),
    "Containers": (("rank", software.container), ("job", software.images),
                   ("machine", software.shared)),
    "Processors": (("node", hardware.processors), ("rank", hardware.slurm_share)),
    "Memory and processes": (("node", hardware.shared_memory), ("rank", hardware.limits)),
    "Network": (("rank", hardware.devices), ("job", hardware.links)),
    "GPUs": (("rank", hardware.gpus),),
    "After a rank's death": (("job", software.survival),),
    "Packages": (("rank", software.packages),)}

# Seconds by which a failed rank outlives the deadline. When one rank fails, mpirun ends all ranks,
# so the reporting rank must print its report first.
_LINGER_S = 8.0
# Maximum number of lines in the report that MPI printed.
_MAX_LINES = 12


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Finds problems with an MPI launch or a machine, and explains how to fix them. Start it "
        "without a launcher, or on all ranks: mpirun -n 4 python -m mpiring doctor. The exit "
        "status is 1 if there is a problem.")
    parser.set_defaults(action=run)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--deadline", type=above_zero, default=30.0, metavar="SECONDS",
                        help="time limit of the examination in seconds (default: 30)")
    parser.add_argument("--examine", type=int, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Examine this rank, and report on one of them; return 1 if there is a problem, otherwise 0."""
    if options.examine is not None:
        examine(options.examine, options.deadline)
        return 0
    began = time.monotonic()
    facts, failure = _examine_in_child(options.deadline)
    rank = launch.launched_rank() or 0 if launch.launcher_of() else 0
    library = facts.pop("library", Library(error=failure.reason if failure else ""))
    if "ranks" not in facts:
        facts |= {"ranks": [gather.rank(rank, library)], "size": 0}
    reporter = facts["ranks"][0]
    if facts["size"] > 1:
        rank = reporter.rank
    if rank > 0:
        if library.error and failure is None:
            failure = Failure(stage=LOADING, reason="mpi4py cannot load one")
        if failure is not None:
            _report_failure(rank, failure, reporter, began + options.deadline + _LINGER_S)
        return 0
    wanted, wanted_by = launch.launched_size()
    job = JobFacts(**facts, failure=failure, wanted=wanted, wanted_by=wanted_by,
                   mpirun=gather.mpirun(reporter.library), slurm=gather.slurm(reporter.variables))
    findings = judge(job)
    print((as_json if options.json else as_text)(findings, job), flush=True)
    return int(worst(findings) == PROBLEM)


def _examine_in_child(deadline_s: float) -> tuple[dict[str, Any], Failure | None]:
    """Examine MPI in a child that replaces this process as a rank of the launcher.

    Launchers identify ranks by environment variables and open files, which the child inherits. If
    the child hangs or dies, this process reports it.

    Return fields of JobFacts that the child determined, and its failure, if it failed.
    """
    with tempfile.TemporaryFile() as answers:
        os.set_inheritable(answers.fileno(), True)
        ended = child_job.run(
            [sys.executable, "-m", "mpiring", "doctor", "--examine", str(answers.fileno()),
             "--deadline", str(deadline_s)], deadline_s, in_place=True)
        stage, facts = _read_stages(answers)
    facts["printed"] = child_job.last_lines(ended.lines, _MAX_LINES)
    if stage == "":
        return facts, None    # MPI has ended, so the exit status does not matter.
    status = ended.status
    if status is None:
        reason = f"no end within {deadline_s:g} s"
    elif status < 0:
        reason = f"{signal.strsignal(-status)} (signal {-status})"
    else:
        reason = f"exit status {status}"
    return facts, Failure(stage=stage, reason=reason, timed_out=status is None,
                          printed=facts["printed"])


def _read_stages(answers: IO[bytes]) -> tuple[str, dict[str, Any]]:
    """Return the last stage and all facts that the child wrote."""
    answers.seek(0)
    stage = LOADING
    facts: dict[str, Any] = {}
    while True:
        try:
            stage, more = pickle.load(answers)
        except (EOFError, pickle.UnpicklingError):
            return stage, facts
        facts.update(more)


def judge(job: JobFacts) -> list[Finding]:
    """Return all findings, in the order of the subjects; a pure function of the facts."""
    return merge(
        (replace(finding, subject=subject, ranks=tuple(rank.rank for rank in ranks))
         for subject, tables in _SUBJECTS.items() for group, table in tables
         for ranks in grouped(job.ranks, _GROUPS[group]).values()
         for finding in table(job, *ranks) if finding is not None), len(job.ranks))


def _report_failure(rank: int, failure: Failure, facts: Rank, until: float) -> None:
    """Print on standard error that this rank has failed, unless rank 0 reports the same failure.

    This process must stay alive until the time `until` of time.monotonic.
    """
    # One rank per node prints failures of the start. Every rank prints later failures.
    is_printed = launch.launched_rank(local=True) == 0 or failure.stage not in (LOADING, STARTING)
    if not failure.timed_out and not software.is_mismatched(facts) and is_printed:
        print(f"mpiring doctor: rank {rank} on {facts.host}: {failure.stage}: {failure.reason}; "
              f"{' '.join(failure.printed[-2:])}", file=sys.stderr, flush=True)
    # If all ranks time out, rank 0 looks for the processes of the others.
    launcher = launch.launcher_of(facts.variables)
    if (failure.timed_out or launcher != "srun") and failure.stage not in (LOADING, ENDING):
        time.sleep(max(0.0, until - time.monotonic()))
