"""Reads and checks the traces of a job's ranks, even if the job was killed while it wrote them.

Commands rely on the fields in the tables below. A trace with other fields is damaged, edited, or of
another version: an error names the file, the line and the field.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .. import ConfigError, __version__
from ..provisional import arguments, files, trace_file
from .entries import FLAG, OBJECT, Field, listed, number, problem_of, text, whole
from .units import ranks_on_nodes

Event = dict[str, Any]

# Length of the end of a file, which contains the last lines.
_TAIL_BYTES = 4096
_NO_CLOCK = {"at_us": 0.0, "offset_us": 0.0, "error_us": 0.0}
# Times are rounded to nanoseconds, and a step takes longer than that.
_SHORTEST_US = 1e-3


def _is_tensor(x: Any) -> bool:
    return (isinstance(x, list) and len(x) == 3 and text().fits(x[0])
            and isinstance(x[1], list) and all(map(whole(0).fits, x[1]))
            and whole(0).fits(math.prod(x[1])) and isinstance(x[2], str))


# Fields of each event, by "ph". Only spans of time have a category and times.
_EVENTS: Mapping[str, Mapping[str, Field]] = {
    "M": {"name": text(), "args": OBJECT,
          "cat": Field(lambda _: False, "none with ph='M'", optional=True)},
    "X": {"name": text(), "args": OBJECT, "cat": text(), "tid": whole(), "ts": number(),
          "dur": number(0)}}
_CLOCK = {"at_us": number(), "offset_us": number(), "error_us": number(0)}
# Arguments of descriptions of the rank, by name, and of spans, by category.
_DESCRIPTIONS: Mapping[str, Mapping[str, Field]] = {
    "mpiring": {"job": Field(lambda x: text().fits(x) and x.isprintable() and "/" not in x,
                             "a printable name without /"),
                "rank": whole(0, arguments.MAX_INT32), "size": whole(1, arguments.MAX_INT32),
                "node": whole(0, arguments.MAX_INT32)},
    "clock at start": _CLOCK, "clock at end": _CLOCK,
    "model": {"tensors": listed(Field(_is_tensor, "name, shape and dtype")), "overlap": FLAG,
              "reducers": listed(text(), optional=True),
              "nodes": whole(1, arguments.MAX_INT32, optional=True)}}
_OPERATION = {"group": text(), "sequence": whole()}
_SPANS: Mapping[str, Mapping[str, Field]] = {
    "step": {"step": whole(), "tokens": number(0, optional=True)},
    "ready": {"at_us": listed(number(0), optional=True)},
    "wait": _OPERATION,
    "operation": {**_OPERATION, "algorithm": text(), "bytes": whole(0), "queued_us": number()}}


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Its clock was compared with rank 0's at `start` and `end`; the latter is None if the trace was
    not closed.
    """

    path: Path
    job: str
    rank: int
    size: int
    node: int
    start: dict[str, float]
    end: dict[str, float] | None

    def events(self) -> Iterator[Event]:
        """Yield its events in the order in which they ended, with times of rank 0's clock.

        Raises:
            ConfigError: A line is not as mpiring of this version writes it.
        """
        for line, event in _events(self.path):
            if problem := _problem_of(event):
                raise ConfigError(
                    f"{self.path}, line {line}: {problem}. The file is damaged, or of another "
                    f"version than mpiring {__version__}; record the job again, or delete the file")
            if event["ph"] == "X":
                event["ts"] = round(event["ts"] - self._drift_us(event["ts"]), 3)
            yield event

    def spans(self) -> Iterator[Event]:
        """Yield its events that have a category and times; see `events`."""
        return (event for event in self.events() if event["ph"] == "X")

    def _drift_us(self, at_us: float) -> float:
        """Return how far this clock has moved ahead of rank 0's clock since the start."""
        if self.end is None or self.end["at_us"] - self.start["at_us"] < _SHORTEST_US:
            return 0.0
        share = (at_us - self.start["at_us"]) / (self.end["at_us"] - self.start["at_us"])
        return share * (self.end["offset_us"] - self.start["offset_us"])

    @property
    def error_us(self) -> float:
        """Largest error of its times relative to rank 0's clock."""
        return max(clock["error_us"] for clock in (self.start, self.end or self.start))


@dataclass(frozen=True)
class JobTrace:
    """The traces of one job in the order of its ranks, and warnings about missing data."""

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
    """Return the traces of the job whose name has this prefix; None is for the only job.

    Raises:
        ConfigError: There are no traces, or traces of several jobs.
    """
    jobs: dict[str, list[RankTrace]] = {}
    warnings = []
    for path in _files(Path(folder)):
        trace, problem = _opened(path)
        if trace is None:
            warnings.append(f"{path} does not say whose trace it is, and is left out{problem}")
        else:
            jobs.setdefault(trace.job, []).append(trace)
    if not jobs:
        raise ConfigError(warnings[0] if warnings else f"{folder}: there are no traces; set "
                          f"MPIRING_TRACE={folder} for the job that is to write them")
    matching = [job for job in jobs if prefix is None or job.startswith(prefix)]
    if len(matching) != 1:
        listed = "; ".join(f"{job} ({len(ranks)} of {ranks[0].size} ranks)"
                           for job, ranks in jobs.items())
        raise ConfigError(f"{folder} has traces of {listed}; choose one with --job NAME")
    ranks = sorted(jobs[matching[0]], key=lambda trace: trace.rank)
    for one, other in zip(ranks, ranks[1:]):
        if one.rank == other.rank or one.size != other.size:
            raise ConfigError(
                f"{one.path} is of rank {one.rank} of {one.size}, and {other.path} of rank "
                f"{other.rank} of {other.size}: one job cannot have written both; delete one")
    return JobTrace(matching[0], ranks, [*warnings, *_missing(ranks)])


def _files(folder: Path) -> list[Path]:
    """Return the names of traces in a folder; raise ConfigError if it cannot be read."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))
                if fnmatch(name, "trace-*-rank*.json")]
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be read: {exc.strerror or exc}") from exc


def _missing(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Yield messages about missing data of a job."""
    present = {trace.rank for trace in ranks}
    if len(present) < ranks[0].size:
        first = next(rank for rank in range(ranks[0].size) if rank not in present)
        yield (f"{ranks[0].size - len(present)} of {ranks[0].size} ranks have left no trace, the "
               f"first is rank {first}: waiting for them counts as exposed communication")
    unclosed = [trace for trace in ranks if trace.end is None]
    if unclosed:
        yield (f"{len(unclosed)} traces have no end, the first is {unclosed[0].path}: their last "
               f"moments may be missing, and their clocks were compared at the start only")


def _opened(path: Path) -> tuple[RankTrace | None, str]:
    """Read the first and the last lines of a trace.

    Return None if the first lines do not name a rank, with the reason or "". Raise ConfigError if
    the file cannot be read.
    """
    about: dict[str, Any] = {}
    for line, event in _events(path):
        problem = _problem_of(event)
        if problem and "mpiring" not in about:
            return None, f": line {line}: {problem}"
        if problem or event["ph"] != "M":
            break
        about.setdefault(event["name"], event["args"])
    rank = about.get("mpiring")
    if rank is None or rank["rank"] >= rank["size"]:
        return None, ""
    last = [event for event in map(_parsed, _tail(path))
            if isinstance(event, dict) and event.get("name") == "clock at end"]
    return RankTrace(path, rank["job"], rank["rank"], rank["size"], rank["node"],
                     start=about.get("clock at start", _NO_CLOCK),
                     end=last[-1]["args"] if last and not _problem_of(last[-1]) else None), ""


def _tail(path: Path) -> list[bytes]:
    """Return the last lines of a file."""
    with _reading(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).splitlines()


def _events(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line, without the brackets around all events.

    The value of a line that is not JSON is None, except at the end of the file, where a killed job
    may have left a part of a line.
    """
    with _reading(path) as file:
        for line_number, line in enumerate(file, 1):
            event = _parsed(line)
            is_torn = event is None and not line.endswith(b"\n")
            if not is_torn and line.strip() not in (b"", b"[", b"]"):
                yield line_number, event


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a trace; raise ConfigError if mpiring does not write files of this length."""
    try:
        with open(path, "rb", opener=files.regular) as file:
            if (nbytes := os.fstat(file.fileno()).st_size) > 2 * trace_file.MAX_BYTES:
                raise ConfigError(f"{path} has {nbytes} bytes, but mpiring ends a trace after "
                                  f"{trace_file.MAX_BYTES}: the file is damaged; delete it")
            yield file
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _parsed(line: bytes) -> Any:
    """Return the value of a line, or None."""
    try:
        return json.loads(line.strip(b" ,\r\n").decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def _problem_of(event: Any) -> str:
    """Return what is wrong with an event, or ""."""
    if event is None:
        return "it is not JSON"
    phase = event.get("ph") if isinstance(event, dict) else None
    if phase not in ("M", "X"):
        return "it is not an event as mpiring writes it, with ph='M' or ph='X'"
    problem = problem_of(event, _EVENTS[phase])
    if not problem:
        known = (_DESCRIPTIONS.get(event["name"]) if phase == "M" else _SPANS.get(event["cat"]))
        problem = problem_of(event["args"], known or {})
    return problem and f"{event.get('name')!r:.80}: {problem}"
