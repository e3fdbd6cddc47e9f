"""The command `mpiring trace` and its subcommand `merge`; needs no MPI library."""

import argparse
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ...provisional import files, trace_file
from ..arguments import not_negative
from ..output import opened
from . import report
from ..traces import Event, RankTrace, open_job

_DESCRIPTION = """\
Shows how the ranks of a job spent their time. The job must write traces to a folder:

    MPIRING_TRACE=FOLDER mpirun -n 8 python train.py

`merge` joins the traces of all ranks, on one clock, into a file for https://ui.perfetto.dev.
`report` prints how the time of a step is spent. A step ends when DataParallel has received all
gradients. It consists of
  compute   the program does not wait: forward, backward, optimizer
  data      the program waits for a batch of mpiring.data.prefetch(..., comm=comm)
  exposed   the program waits for communication
  idle      the program waits for another rank, which has not called the operation yet
`hidden` is the part of compute with operations in flight. Below the table, the report names ranks
that wait for data and ranks for which others wait, if the time is at least 5 % of a step. Lines
above the table name the Reducers of all models."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `trace merge` and `trace report`."""
    parser.description = _DESCRIPTION
    commands = parser.add_subparsers(required=True)
    merging = commands.add_parser("merge", help="join the traces of all ranks for Perfetto")
    reporting = commands.add_parser("report", help="print how the time of a step is spent")
    for command in (merging, reporting):
        command.add_argument("folder", metavar="FOLDER", help="folder with the traces")
        command.add_argument("--job", metavar="NAME",
                             help="name of the job or the beginning of the name (needed if the "
                                  "folder has traces of several jobs)")
    merging.add_argument("-o", "--output", metavar="FILE.json",
                         help="file to write, or - for standard output (default: "
                              "merged-JOB.json in the folder)")
    merging.set_defaults(action=merge)
    reporting.add_argument("--plot", metavar="FILE.png",
                           help="picture file of the report and one step (needs matplotlib)")
    reporting.add_argument("--step", type=not_negative, metavar="N",
                           help="number of the step to draw (default: a step of median length)")
    reporting.set_defaults(action=report.run)


def merge(options: argparse.Namespace) -> int:
    """Write one trace that shows each rank as a process; return the exit status.

    Raises:
        ConfigError: There are no traces or traces of several jobs, or the file cannot be written.
    """
    job = open_job(options.folder, options.job)
    job.warn()
    path = options.output or str(Path(options.folder) / f"merged-{job.name}.json")
    # A trace that is damaged must not replace an earlier file by a part of a new one.
    for rank in job.ranks:
        deque(rank.events(), maxlen=0)
    count = 0
    # Another user may have created a link with the default name.
    with opened(path, None if options.output else files.regular) as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps({"job": job.name, "about": job.caption, "warnings": job.warnings}))
        file.write(',"traceEvents":[')
        for rank in job.ranks:
            for event in _with_compute(rank):
                file.write(",\n" * bool(count) + json.dumps(event, separators=(",", ":")))
                count += 1
        file.write("]}\n")
    print(f"{path}: {count} events of {len(job.ranks)} ranks; open it at https://ui.perfetto.dev "
          f"or in chrome://tracing")
    return 0


def _with_compute(rank: RankTrace) -> Iterator[Event]:
    """Yield the events of a rank, and a "compute" event between successive waits of its program."""
    free = None
    for event in rank.events():
        if event.get("cat") in ("wait", "data") and event["tid"] == trace_file.PROGRAM:
            if free is not None and event["ts"] > free:
                yield {"name": "compute", "cat": "compute", "ph": "X", "pid": rank.rank,
                       "tid": trace_file.PROGRAM, "ts": free, "dur": round(event["ts"] - free, 3)}
            free = max(free or 0.0, event["ts"] + event["dur"])
        yield event
