"""How long callers and the engine look for others, give their core away, and sleep: all numbers.

Most ranks come within microseconds: whoever waits looks without pause at first. Then another rank
may need the core, so it gives that away between looks; at last it sleeps.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..launch.host import all_processors, usable_processors

# Ranks that share cores, more than two to each, sleep sooner and longer, see `patience`.

# A caller in Python looks at a meeting, or steps a schedule, so often without pause, and compiled
# code at a meeting; then giving its core away. In a shared memory, most calls are over by then.
# What is not becomes the engine's.
SPINS, COMPILED_SPINS, YIELDS = 20, 200, 300
# Where ranks share cores, the others cannot come before this one gives its core away. (4 ranks on
# 2 cores: with 20, short calls took up to a fifth longer.)
SPINS_TOGETHER = 4
# Compiled code looks so often at a barrier between pieces, for about 3 us: after that the engine
# knows better. 20 to 5000 are the same.
PIECE_LOOKS = 50
# A caller who waits for the engine's operations gives its core away so often before it sleeps: two
# ranks that share a core must alternate.
WAIT_YIELDS, WAIT_PAUSE_S = 2000, 50e-6
# By how much a wait with a timeout may be late because another thread steps operations.
LATE_S = 0.01

# The engine's thread tests several times before it sleeps: between hosts, one test moved at most
# 100 KiB (MPICH over TCP), but the wire 250 KB in a pause of 2 ms. With one test, an allreduce
# behind a computation took twice its time.
TESTS = 4
# The pauses of the thread, and by how much they change; see the setting `max_pause_s`.
FIRST_PAUSE_S, PAUSE_GROWTH, PAUSE_SHRINKAGE = 20e-6, 1.5, 2.0
# How often an idle engine answers other ranks' questions.
IDLE_LOOK_S = 0.1
# How often a busy one does, and looks for stalls and dead ranks. (Open MPI reported a death at
# about the third look: with 0.1 s, after 0.25 to 0.45 s.)
BUSY_LOOK_S = 0.02
# How long the thread leaves operations to a caller who soon waits, see Lane.rest: longer than what
# most models compute between two buckets. Other ranks are late by no more if the caller does not
# wait, or waits where the engine cannot know of it.
REST_S = 0.3
# How long a failure in the background waits for the main thread to notice it, so that the
# traceback shows the user's line; after that the thread ends the job.
GRACE_S = 2.0

# Ranks may still prepare data before they open a group; to compile takes seconds, and a minute or
# two where processors are busy.
OPENING_S, OPENING_PAUSE_S = 600.0, 0.01
# One rank may still train, evaluate or save while the others close.
CLOSING_S = 86400.0
# How long a stalled rank waits for the others' answers before it reports.
ANSWER_S = 1.0

give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


@dataclass(frozen=True)
class Patience:
    """How a rank waits for those of its node, given how many of them share a core.

    Attributes:
        spins, compiled_spins: How often Python and compiled code look without pause.
        yields: How often both look then, giving their core away.
        wait_yields: How often a caller who waits for the engine does, before it sleeps ...
        pause_s: ... for so long between two looks.
    """

    spins: int = SPINS
    compiled_spins: int = COMPILED_SPINS
    yields: int = YIELDS
    wait_yields: int = WAIT_YIELDS
    pause_s: float = WAIT_PAUSE_S


@functools.cache
def patience(ranks: int) -> Patience:
    """Return how the ranks of a node wait for each other.

    Up to two ranks to a core alternate by giving it away. Of more, each look of those that wait
    keeps the rank from coming for which they wait: they look the less often the more they are,
    so that all of them together take a share of a core that stays the same.

    Args:
        ranks: How many they are.
    """
    every, usable = len(all_processors()), len(usable_processors())
    # A rank that is bound to one core (of two threads) does not share it.
    crowding = ranks / (every if usable <= 2 else usable)
    if crowding <= 1:
        return Patience()
    share = min(1.0, 2 / crowding)
    return Patience(SPINS_TOGETHER, SPINS_TOGETHER, math.ceil(YIELDS * share ** 2),
                    math.ceil(WAIT_YIELDS * share ** 2), WAIT_PAUSE_S / share ** 2)
