"""Measures whether the ranks have their cores to themselves."""

import time

import numpy as np

from ...communicator import Communicator

_SPIN_S = 0.1
# Idle machines give a rank more than 97 % of a core.
ENOUGH = 0.9


def least_share(comm: Communicator) -> tuple[float, int]:
    """Let all ranks compute at once; return the least share of a core that a rank got, and which.

    Processor time over elapsed time, which needs no privileges. A load average would also count
    these ranks, and would be a minute late.

    Collective: yes. Blocking: yes, for 0.1 s.
    """
    comm.barrier()
    began_s, used_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began_s < _SPIN_S:
        pass
    share = (time.thread_time() - used_s) / (time.perf_counter() - began_s)
    shares = comm.allgather_object(share)
    rank = int(np.argmin(shares))
    return min(1.0, shares[rank]), rank
