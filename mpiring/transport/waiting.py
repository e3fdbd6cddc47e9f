"""All numbers that determine how callers and the engine wait: spin, give the core away, sleep.

Most ranks arrive within microseconds, so a waiting rank first checks continuously. Then another
rank may need the core, so it gives the core away between checks. Finally, it sleeps.
"""

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

# With more than two ranks per core, ranks sleep sooner and longer, see `patience`.

# Number of immediate checks of flags, or steps of a schedule, in Python, and number of checks
# in compiled code. Then, number of checks between which the core is given away. In shared memory,
# most calls are complete after these checks. The engine runs all other calls.
SPINS, COMPILED_SPINS, YIELDS = 20, 200, 300
# If ranks share cores, other ranks cannot arrive before this one gives its core away. (With 4 ranks
# on 2 cores and a value of 20, short calls took up to a fifth longer.)
SHARED_CORE_SPINS = 4
# Number of checks by compiled code at a barrier between pieces, which take about 3 µs. Then the
# engine continues. Values from 20 to 5000 are equally fast.
PIECE_POLLS = 50
# Time for which a caller who waits for the engine's operations gives its core away between checks,
# before it sleeps. Then, minimum length of its pauses.
YIELD_S, WAIT_PAUSE_S = 5e-3, 50e-6
# That time if ranks share cores. They must alternate, but other programs may also need the cores.
# (While another worker of pytest ran, the tests on 3 ranks and 2 cores took 152 s with about 20 ms.
# With 1 ms, they took 91 s.)
SHARED_CORE_YIELD_S = 1e-3
# Length of its pauses as a share of the time waited so far, if more than two ranks share a core.
# (While 63 ranks waited for one on 2 cores, pauses of equal length, 13 ms, took 0.7 of a core.)
PAUSE_SHARE = 0.05
# Maximum delay of a timeout while another thread steps operations.
LATE_S = 0.01

# Number of tests by the engine's thread before it sleeps. Between hosts, one test moved at most 100
# KiB (MPICH over TCP), but the network can transfer 250 KB in a pause of 2 ms. With one test, an
# allreduce during a computation took twice as long.
TESTS = 4
# The first pause of the thread, and the factors by which pauses change; see `max_pause_s`.
FIRST_PAUSE_S, PAUSE_GROWTH, PAUSE_SHRINKAGE = 20e-6, 1.5, 2.0
# Interval at which an idle engine answers other ranks' questions.
IDLE_CHECK_S = 0.1
# Interval at which a busy engine does so, and checks for stalls and dead ranks. (Open MPI reported
# a death at about the third check: with 0.1 s, after 0.25 to 0.45 s.)
BUSY_CHECK_S = 0.02
# Time for which the thread leaves operations to a caller who will soon wait, see
# OperationQueue.pause. It is longer than the computation between two buckets in most models. If the
# caller does not wait, or does not wait through the engine, other ranks are delayed by at most this
# time.
QUEUE_PAUSE_S = 0.3
# Time after a failure in the background during which the main thread may raise it, so that the
# traceback shows the user's line. After this time, the background thread ends the job.
GRACE_S = 2.0

# Ranks may still prepare data before they open a group. Compilation takes seconds, and a minute or
# two on busy processors.
OPENING_S, OPENING_PAUSE_S = 600.0, 0.01
# One rank may still train, evaluate or save while the others close.
CLOSING_S = 86400.0
# Time for which a stalled rank waits for other ranks' answers before it reports.
ANSWER_S = 1.0

give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Patience(NamedTuple):
    """How a rank waits for other ranks of its node, given how many of them share a core.

    Attributes:
        spins, compiled_spins: Number of immediate checks, by Python and by compiled code.
        yields: Number of further checks, between which both give the core away.
        yield_s: Time for which a caller who waits for the engine gives its core away between
            checks, before it sleeps.
        pause_share: Length of a pause between two checks when it sleeps, as a share of the time
            waited so far.
    """

    spins: int = SPINS
    compiled_spins: int = COMPILED_SPINS
    yields: int = YIELDS
    yield_s: float = YIELD_S
    pause_share: float = 0.0

    def pause_after(self, waited_s: float) -> float:
        """Return the seconds to sleep if the wait has taken `waited_s` seconds."""
        return max(WAIT_PAUSE_S, min(self.pause_share * waited_s, IDLE_CHECK_S))


def patience(ranks: int, processors: int) -> Patience:
    """Return how ranks of a node that may run on the same processors wait for each other.

    Up to two ranks per core alternate by giving the core away. If there are more, each check of a
    waiting rank delays the rank for which it waits. The longer they wait, the less often they
    check.
    """
    if ranks <= processors:
        return Patience()
    share = min(1.0, 2 * processors / ranks)
    return Patience(SHARED_CORE_SPINS, SHARED_CORE_SPINS, math.ceil(YIELDS * share ** 2),
                    SHARED_CORE_YIELD_S * share ** 2, PAUSE_SHARE if share < 1 else 0.0)
