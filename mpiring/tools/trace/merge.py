"""Joins the traces of all ranks into one file for Perfetto."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ...files import regular
from ...record.trace_file import PROGRAM
from ..files import opened
from .files import Event, RankTrace, open_job
from .report import warn


def run(options: Namespace) -> int:
    """Write one trace, with a process for each rank; return the exit status.

    Args:
        options: As `command.declare` has declared them.

    Raises:
        ConfigError: There are no traces, or of several jobs; or the file cannot be written.
    """
    job = open_job(options.folder, options.job)
    warn(job)
    path = options.output or str(Path(options.folder) / f"merged-{job.name}.json")
    count = 0
    # A name that nobody has chosen may be another's link.
    with opened(path, None if options.output else regular) as file:
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
    """Yield a rank's events, and a "compute" event between each two waits of its program."""
    free = None
    for event in rank.events():
        if event.get("cat") in ("wait", "data") and event["tid"] == PROGRAM:
            if free is not None and event["ts"] > free:
                yield {"name": "compute", "cat": "compute", "ph": "X", "pid": rank.rank,
                       "tid": PROGRAM, "ts": free, "dur": round(event["ts"] - free, 3)}
            free = max(free or 0.0, event["ts"] + event["dur"])
        yield event
