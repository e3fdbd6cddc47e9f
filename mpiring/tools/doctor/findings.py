"""Says what a finding is, and joins what is the same on many ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...text import ranks_text
from .facts import Job

VERDICTS = OK, NOTE, WARNING, PROBLEM = ("ok", "note", "warning", "problem")

_MOST_HOSTS = 4


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at, in a word or two.
        verdict: "ok"; "note": nothing is wrong, but better is possible; "warning": slow, or at
            risk; "problem": does not work.
        value: What was found.
        remedy: The line that mends it; "" where nothing needs mending.
        ranks: Of which ranks this is true; () of the job as a whole.
    """

    name: str
    verdict: str
    value: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """The findings about one subject."""

    title: str
    findings: Sequence[Finding]


def merged(findings: Iterable[Finding], size: int) -> list[Finding]:
    """Join findings that differ in nothing but their ranks; of all ranks is of the job.

    Args:
        size: How many ranks there are.
    """
    joined: dict[Finding, list[int]] = {}
    for finding in findings:
        joined.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return [replace(finding, ranks=() if len(set(ranks)) == size else tuple(sorted(set(ranks))))
            for finding, ranks in joined.items()]


def place(ranks: Sequence[int], job: Job) -> str:
    """Return a text such as "ranks 4-7 on n2"; "" for the job as a whole."""
    if not ranks:
        return ""
    names, chosen = job.node_names(), set(ranks)
    parts = [f"{ranks_text(mine)} on {names[node]}" for node, there in job.nodes().items()
             if (mine := [rank.rank for rank in there if rank.rank in chosen])]
    rest = len(parts) - _MOST_HOSTS
    return ", ".join(parts[:_MOST_HOSTS]) + (f" and {rest} more nodes" if rest > 0 else "")


def worst(findings: Iterable[Finding]) -> str:
    """Return the gravest verdict; "ok" where there is none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)
