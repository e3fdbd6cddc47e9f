"""Gives each rank its share of the node's cores."""

import os

import torch

from ..communicator import Communicator, refuse_other_than_communicators
from ..config import threads_are_set


def share_cores(comm: Communicator) -> int:
    """Let PyTorch use this rank's share of the cores it may run on, and return how many.

    By default each rank would use all cores of the node, against the others. Where
    OMP_NUM_THREADS or MKL_NUM_THREADS is set, nothing is changed; and what the program
    says later with `torch.set_num_threads` holds.

    Args:
        comm: The ranks that compute at the same time.

    Collective: yes. Blocking: yes.
    """
    refuse_other_than_communicators(comm)
    cores = frozenset(_own_cores())
    others = [theirs for node, theirs in comm.allgather_object((comm.node_rank, cores))
              if node == comm.node_rank and theirs & cores]
    if not threads_are_set():
        torch.set_num_threads(max(1, len(cores) // len(others)))
    return torch.get_num_threads()


def _own_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
