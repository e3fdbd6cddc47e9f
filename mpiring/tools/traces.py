"""Reads the traces of a job's ranks, even if the job was killed while it wrote them."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import regular
from ..text import ranks_on_nodes

Event = dict[str, Any]

# Length of the end of a file, which contains the last lines.
_TAIL_BYTES = 4096
_NO_CLOCK = {"at_us": 0.0, "offset_us": 0.0, "error_us": 0.0}


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        path: File of the trace.
        job: Name of the job.
        rank, size, node: Number of the rank, number of ranks, and number of the rank's node.
        start, end: Its clock compared with rank 0's; `end` is None if the trace was not closed.
    """

    path: Path
    job: str
    rank: int
    size: int
    node: int
    start: dict[str, float]
    end: dict[str, float] | None

    def events(self) -> Iterator[Event]:
        """Yield its events in the order in which they ended, with times of rank 0's clock."""
        for event in _lines(self.path):
            if "ts" in event:
                event["ts"] = round(event["ts"] - self._drift_us(event["ts"]), 3)
            yield event

    def _drift_us(self, at_us: float) -> float:
        """Return how far this clock has moved ahead of rank 0's clock since the start."""
        if self.end is None or self.end["at_us"] <= self.start["at_us"]:
            return 0.0
        share = (at_us - self.start["at_us"]) / (self.end["at_us"] - self.start["at_us"])
        return share * (self.end["offset_us"] - self.start["offset_us"])

    @property
    def error_us(self) -> float:
        """Largest error of its times relative to rank 0's clock."""
        return max(clock["error_us"] for clock in (self.start, self.end or self.start))


@dataclass(frozen=True)
class JobTrace:
    """The traces of the ranks of one job.

    Attributes:
        name: Name of the job.
        ranks: Traces in the order of the ranks.
        warnings: Messages about missing data.
    """

    name: str
    ranks: Sequence[RankTrace]
    warnings: Sequence[str]

    @property
    def caption(self) -> str:
        """Description of the job's size and the precision of its clocks."""
        nodes = len({rank.node for rank in self.ranks})
        error = max(rank.error_us for rank in self.ranks)
        return (f"job {self.name}: {ranks_on_nodes(self.ranks[0].size, nodes)}, "
                f"clocks within {error:.0f} µs")

    def warn(self) -> None:
        """Print the warnings on standard error."""
        for warning in self.warnings:
            print(f"mpiring: {warning}", file=sys.stderr)


def open_job(folder: str, prefix: str | None) -> JobTrace:
    """Return the traces of a job.

    Args:
        folder: Folder of the traces.
        prefix: Beginning of the job's name; None for the only job.

    Raises:
        ConfigError: There are no traces, or traces of several jobs.
    """
    jobs: dict[str, list[RankTrace]] = {}
    warnings = []
    for path in sorted(Path(folder).glob("trace-*-rank*.json")):
        try:
            trace = _opened(path)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        if trace is None:
            warnings.append(f"{path} does not say whose trace it is, and is left out")
        else:
            jobs.setdefault(trace.job, []).append(trace)
    if not jobs:
        raise ConfigError(f"{folder}: there are no traces; set MPIRING_TRACE={folder} for the job "
                          f"that is to write them")
    matching = [job for job in jobs if prefix is None or job.startswith(prefix)]
    if len(matching) != 1:
        listed = "; ".join(f"{job} ({len(ranks)} of {ranks[0].size} ranks)"
                           for job, ranks in jobs.items())
        raise ConfigError(f"{folder} has traces of {listed}; choose one with --job NAME")
    ranks = sorted(jobs[matching[0]], key=lambda trace: trace.rank)
    return JobTrace(matching[0], ranks, [*warnings, *_missing(ranks)])


def _missing(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Yield messages about missing data of a job."""
    absent = sorted(set(range(ranks[0].size)) - {trace.rank for trace in ranks})
    if absent:
        yield (f"{len(absent)} of {ranks[0].size} ranks have left no trace, the first is rank "
               f"{absent[0]}: waiting for them counts as exposed communication")
    unclosed = [trace for trace in ranks if trace.end is None]
    if unclosed:
        yield (f"{len(unclosed)} traces have no end, the first is {unclosed[0].path}: their last "
               f"moments may be missing, and their clocks were compared at the start only")


def _opened(path: Path) -> RankTrace | None:
    """Read the first and the last lines of a trace; return None if they do not name a rank."""
    about: dict[str, Any] = {}
    for event in _lines(path):
        if event.get("ph") != "M":
            break
        about.setdefault(event["name"], event.get("args"))
    if not _is_rank(about.get("mpiring")):
        return None
    with open(path, "rb", opener=regular) as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
        last = file.read().decode(errors="replace").splitlines()
    ends = [event["args"] for event in map(_parsed, last)
            if event is not None and event.get("name") == "clock at end"]
    return RankTrace(path, **about["mpiring"], start=about.get("clock at start", _NO_CLOCK),
                     end=ends[-1] if ends else None)


def _is_rank(about: Any) -> bool:
    """Return whether this names a job and a rank; a file's name will contain the job's name."""
    return (isinstance(about, dict) and about.keys() == {"job", "rank", "size", "node"}
            and isinstance(about["job"], str) and "/" not in about["job"]
            and all(isinstance(about[name], int) for name in ("rank", "size", "node")))


def _lines(path: Path) -> Iterator[Event]:
    """Yield the events of a file, one per line; skip truncated lines."""
    with open(path, errors="replace", opener=regular) as file:
        for line in file:
            event = _parsed(line)
            if event is not None:
                yield event


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line.strip(" ,\n"))
    except (ValueError, RecursionError):
        # A bracket around all events, or the last line of a killed job.
        return None
    return event if isinstance(event, dict) and isinstance(event.get("name"), str) else None
