"""Defines findings, merges equal findings of several ranks, and formats the report."""

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ... import __version__
from ...provisional import count, first_few, ranks_text
from ..terminal import line_width, styled
from .facts import JobFacts

VERDICTS = OK, NOTE, WARNING, PROBLEM = ("ok", "note", "warning", "problem")

_MAX_HOSTS = 4
_WIDTH = max(map(len, VERDICTS))
_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of examining one property.

    Attributes:
        verdict: "ok", "note" (works, but could be better), "warning" (slow, or at risk), or
            "problem" (does not work).
        remedy: Advice to the user; "" if nothing needs to be done.
        ranks: Ranks with this finding; () for all ranks.
        subject: Heading of the report under which the finding is printed.
    """

    name: str
    verdict: str
    value: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    subject: str = ""


# Findings of a table; None for a property without a row that applies.
Rows = Iterator[Finding | None]
# Condition, verdict, value, and remedy unless the verdict is OK.
Row = tuple[object, str, str] | tuple[object, str, str, str]


def check(name: str, rows: Sequence[Row], ok: str = "") -> Finding | None:
    """Return the finding of the first row whose condition is true.

    If all conditions are false, its value is `ok`; without it, there is no finding.
    """
    return next((Finding(name, *row[1:]) for row in [*rows, (ok, OK, ok)] if row[0]), None)


def merge(findings: Iterable[Finding], size: int) -> list[Finding]:
    """Merge findings that differ only in their ranks, and group them by property.

    A finding of all ranks becomes a finding of the job. Findings have the order of their subjects.
    """
    joined: dict[Finding, set[int]] = {}
    for finding in findings:
        joined.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    order = list(dict.fromkeys((finding.subject, finding.name) for finding in joined))
    return [replace(finding, ranks=() if len(ranks) == size else tuple(sorted(ranks)))
            for finding, ranks in sorted(joined.items(), key=lambda item: order.index(
                (item[0].subject, item[0].name)))]


def location(ranks: Sequence[int], job: JobFacts) -> str:
    """Return a text such as "ranks 4-7 on n2"; "" without ranks."""
    names, chosen = job.node_names(), set(ranks)
    parts = [f"{ranks_text(numbers)} on {names[node]}" for node, neighbors in job.nodes().items()
             if (numbers := [rank.rank for rank in neighbors if rank.rank in chosen])]
    more = len(parts) - _MAX_HOSTS
    return ", ".join(parts[:_MAX_HOSTS]) + (f" and {more} more nodes" if more > 0 else "")


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)


def as_text(findings: Sequence[Finding], job: JobFacts) -> str:
    """Return the report as text, with a remedy for each finding that is not ok."""
    hosts = first_few(list(job.node_names().values()), _MAX_HOSTS).replace(", and", " and")
    missing = f", of {job.wanted} that were asked for" if len(job.ranks) < job.wanted else ""
    lines = [f"mpiring {__version__} doctor: {count(len(job.ranks), 'rank')} on {hosts}{missing}"]
    for subject, group in itertools.groupby(findings, lambda finding: finding.subject):
        lines += ["", styled(subject, "bold")]
        for finding in group:
            lines += _lines(finding, location(finding.ranks, job))
    verdicts = [finding.verdict for finding in findings]
    counts = [count(verdicts.count(verdict), verdict) for verdict in (PROBLEM, WARNING, NOTE)
              if verdict in verdicts]
    return "\n".join([*lines, "", ", ".join(counts) or "all is well"])


def _lines(finding: Finding, place: str) -> Iterator[str]:
    """Yield the lines of a finding with its ranks in `place`: the value, and the remedy below."""
    indent = " " * (_WIDTH + 4)
    first, *more = finding.value.splitlines() or [""]
    heading = _wrapped(f"{finding.name}: {first}" + (f"  [{place}]" if place else ""),
                       indent, f"{indent}  ")
    verdict = styled(f"{finding.verdict:{_WIDTH}}", _STYLES[finding.verdict])
    yield f"  {verdict}  {heading[0].strip()}"
    yield from heading[1:]
    for line in more:
        yield from _wrapped(line, f"{indent}  ", f"{indent}  ")
    for number, line in enumerate(finding.remedy.splitlines()):
        # A command that was broken could not be pasted.
        yield f"{indent}{'   ' if number else '-> '}{line}"


def _wrapped(text: str, first: str, other: str) -> list[str]:
    """Return text as lines that fit the terminal; paths and options stay whole."""
    return textwrap.wrap(text, line_width(), initial_indent=first, subsequent_indent=other,
                         break_long_words=False, break_on_hyphens=False)


def as_json(findings: Sequence[Finding], job: JobFacts) -> str:
    """Return the report as one JSON object."""
    return json.dumps({
        "mpiring": __version__, "ranks": len(job.ranks), "nodes": list(job.node_names().values()),
        "verdict": worst(findings), "findings": [
            {"subject": "", **dataclasses.asdict(finding), "where": location(finding.ranks, job)}
            for finding in findings]}, indent=1)
