"""Writes the report, for people and for programs."""

import dataclasses
import json
from collections.abc import Sequence

from ... import __version__
from ...text import count
from .facts import Job
from .findings import OK, VERDICTS, Section, where, worst

_WIDTH = max(map(len, VERDICTS))


def as_text(sections: Sequence[Section], job: Job) -> str:
    """Return the report as text; every finding that is not ok is followed by its remedy."""
    names = list(job.node_names().values())
    hosts = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    missing = f", of {job.wanted} that were asked for" if len(job.ranks) < job.wanted else ""
    lines = [f"mpiring {__version__} doctor: {count(len(job.ranks), 'rank')} on {hosts}{missing}"]
    for section in sections:
        if not section.findings:
            continue
        lines += ["", section.title]
        for finding in section.findings:
            first, *rest = finding.value.splitlines() or [""]
            spot = where(finding.ranks, job)
            lines.append(f"  {finding.verdict:{_WIDTH}}  {finding.name}: {first}"
                         + (f"  [{spot}]" if spot else ""))
            indent = " " * (_WIDTH + 4)
            lines += [f"{indent}  {line}" for line in rest]
            if finding.remedy:
                lines.append(f"{indent}-> {finding.remedy}")
    return "\n".join([*lines, "", _summary(sections)])


def _summary(sections: Sequence[Section]) -> str:
    found = [finding.verdict for section in sections for finding in section.findings]
    counts = [count(found.count(verdict), verdict) for verdict in reversed(VERDICTS)
              if verdict != OK and verdict in found]
    return ", ".join(counts) if counts else "all is well"


def as_json(sections: Sequence[Section], job: Job) -> str:
    """Return the report as one JSON object."""
    findings = [{"subject": section.title, **dataclasses.asdict(finding),
                 "where": where(finding.ranks, job)}
                for section in sections for finding in section.findings]
    return json.dumps({
        "mpiring": __version__, "ranks": len(job.ranks), "nodes": list(job.node_names().values()),
        "verdict": worst(finding for section in sections for finding in section.findings),
        "findings": findings}, indent=1)
