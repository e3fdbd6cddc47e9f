"""Writes traces like the ranks of a job."""

import json

_KEY = {"group": "", "sequence": 0}
_ABOUT = {"wait": _KEY, "operation": {**_KEY, "algorithm": "ring", "bytes": 8, "queued_us": 0}}


def metadata(pid, name, **about):
    """Return an event that describes a rank."""
    return {"name": name, "ph": "M", "pid": pid, "args": about}


def piece(category, began, ended, *, tid=1, name="x", **about):
    """Return an event with a start and a duration in microseconds."""
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": tid, "ts": began,
            "dur": ended - began, "args": {**_ABOUT.get(category, {}), **about}}


def written(folder, *events, job="20260101-000000-aaaa", rank=0, size=1, node=0, offset=0.0,
            drift=None):
    """Write the trace of a rank whose clock drifts by `drift` microseconds per second."""
    clock = {"offset_us": offset, "error_us": 2.0}
    lines = [metadata(rank, "mpiring", job=job, rank=rank, size=size, node=node),
             metadata(rank, "clock at start", at_us=0.0, **clock), *events]
    if drift is not None:
        clock = {"offset_us": offset + drift, "error_us": 5.0}
        lines.append(metadata(rank, "clock at end", at_us=1e6, **clock))
    path = folder / f"trace-{job}-rank{rank:05d}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n" * (drift is not None))
    return path
