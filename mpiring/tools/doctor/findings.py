"""Defines findings, and joins those that are the same on many ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...text import ranks_text
from .facts import Job, Rank

VERDICTS = OK, NOTE, WARNING, PROBLEM = ("ok", "note", "warning", "problem")

_MOST_HOSTS = 4


@dataclass(frozen=True)
class Finding:
    """A property that was examined.

    Attributes:
        name: The property, in a word or two.
        verdict: "ok"; "note": works, but could be better; "warning": slow, or at risk;
            "problem": does not work.
        value: What was found.
        remedy: What to do about it; "" where nothing needs to be done.
        ranks: Those that it is about; () for the job as a whole.
    """

    name: str
    verdict: str
    value: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """The findings on a subject."""

    title: str
    findings: Sequence[Finding]


def each_rank(job: Job, judge: Callable[[Rank], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what a judge finds about each rank."""
    for rank in job.ranks:
        for finding in judge(rank):
            yield replace(finding, ranks=(rank.rank,))


def each_node(job: Job, judge: Callable[[Sequence[Rank]], Iterable[Finding]],
              ) -> Iterator[Finding]:
    """Yield what a judge finds about the ranks of each node."""
    for ranks in job.nodes().values():
        for finding in judge(ranks):
            yield replace(finding, ranks=tuple(rank.rank for rank in ranks))


def merged(findings: Iterable[Finding], size: int) -> list[Finding]:
    """Join findings that differ in nothing but their ranks; a finding on all ranks is on the job.

    Args:
        size: How many ranks there are.
    """
    joined: dict[Finding, list[int]] = {}
    for finding in findings:
        joined.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return [replace(finding, ranks=() if len(set(ranks)) == size else tuple(sorted(set(ranks))))
            for finding, ranks in joined.items()]


def where(ranks: Sequence[int], job: Job) -> str:
    """Return "ranks 4-7 on n2"; "" for the job as a whole."""
    if not ranks:
        return ""
    names, chosen = job.node_names(), set(ranks)
    parts = [f"{ranks_text(mine)} on {names[node]}" for node, there in job.nodes().items()
             if (mine := [rank.rank for rank in there if rank.rank in chosen])]
    rest = len(parts) - _MOST_HOSTS
    return ", ".join(parts[:_MOST_HOSTS]) + (f" and {rest} more nodes" if rest > 0 else "")


def worst(findings: Iterable[Finding]) -> str:
    """Return the gravest verdict; "ok" without findings."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)
