"""Detects busy processors, on which measured times are too long."""

import math
import os
import textwrap
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..provisional import count, launch
from .terminal import line_width

_SPIN_S = 0.1
# On an idle machine, a rank gets more than 97 % of a core.
_ENOUGH = 0.9


class ProcessorUse(NamedTuple):
    """The processor time that a rank gets, and the processors that it may use.

    Attributes:
        share: Processor time divided by elapsed time, while the rank computed.
        online: Number of processors of the host.
        quota: Limit of the rank's cgroups, in processors.
    """

    share: float
    host: str
    load: float
    online: int
    allowed: frozenset[int]
    quota: float


def processor_use() -> ProcessorUse:
    """Compute for 0.1 s, and return the processor time that this rank got; call it on all ranks.

    The share needs no privileges, and counts only what takes time from this rank. The load average
    also counts programs on processors that these ranks may not use, and is a minute late.
    """
    began_s, used_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began_s < _SPIN_S:
        pass
    share = (time.thread_time() - used_s) / (time.perf_counter() - began_s)
    return ProcessorUse(share, os.uname().nodename, os.getloadavg()[0], os.cpu_count() or 1,
                        frozenset(launch.usable_processors()), launch.quota())


def busy_warning(uses: Sequence[ProcessorUse], result: str) -> str:
    """Return a warning if a rank got less than a core while all ranks computed; otherwise "".

    The `result` is a sentence about the results that are wrong therefore.
    """
    rank = min(range(len(uses)), key=lambda number: uses[number].share)
    worst = uses[rank]
    if worst.share >= _ENOUGH:
        return ""
    neighbors = [use for use in uses if use.host == worst.host]
    allowed = len(frozenset[int]().union(*(use.allowed for use in neighbors)))
    limit = min(allowed, worst.quota)
    cgroup = f", of which a cgroup grants {limit:g}" if limit < allowed else ""
    remedy = (f"Start at most {count(max(1, math.floor(limit)), 'rank')} there, or ask for more "
              f"processors." if len(neighbors) > limit else
              "Other programs use the same processors: measure again when these are idle.")
    return textwrap.fill(
        f"WARNING: the machine is busy: rank {rank} got {worst.share:.0%} of a core while all "
        f"ranks computed. On {worst.host}, {count(len(neighbors), 'rank')} may use {allowed} of "
        f"{count(worst.online, 'processor')}{cgroup}, and the load average is {worst.load:.1f}. "
        f"{result} {remedy}", line_width())
