"""Gives each rank its share of the node's cores."""

import os
from collections.abc import Set

import torch

from ..communicator import Communicator, refuse_other_than_communicators
from ..launch.environment import threads_are_set

# What `share_cores` has set, which is no wish of the user's.
_shares: set[int] = set()


def share_cores(comm: Communicator) -> int:
    """Let PyTorch use this rank's share of the cores it may run on, and return how many.

    By default each rank would use all cores of the node, against the others. What the user has
    said holds: where OMP_NUM_THREADS or MKL_NUM_THREADS is set, or `torch.set_num_threads` was
    called before, nothing is changed, and what is said later holds in any case. PyTorch does not
    tell whether `set_num_threads` was called: a number that it would begin with by itself, one
    thread for each core or for each of a core's hardware threads, is taken for its default, and
    so is one that was set here. Say such a number afterwards if it is meant.

    Args:
        comm: The ranks that compute at the same time.

    Collective: yes. Blocking: yes.
    """
    refuse_other_than_communicators(comm)
    cores = frozenset(_own_cores())
    others = [theirs for node, theirs in comm.allgather_object((comm.node_rank, cores))
              if node == comm.node_rank and theirs & cores]
    if not threads_are_set() and torch.get_num_threads() in _shares | _defaults(cores):
        share = max(1, len(cores) // len(others))
        _shares.add(share)
        torch.set_num_threads(share)
    return torch.get_num_threads()


def _own_cores() -> Set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return _all_cores()


def _all_cores() -> Set[int]:
    return set(range(os.cpu_count() or 1))


def _defaults(cores: Set[int]) -> set[int]:
    """Return the numbers of threads that PyTorch begins with, by its build and by when it asks.

    As many as there are cores, or hardware threads of cores, among those that this rank may run
    on; or among all, if an MPI library has bound the rank only when it was initialized.
    """
    return {count for some in (cores, _all_cores())
            for count in (len(some), len({_siblings(core) for core in some}))}


def _siblings(core: int) -> str:
    """Return what is equal for hardware threads of one core."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") as file:
            return file.read()
    except OSError:
        return str(core)
