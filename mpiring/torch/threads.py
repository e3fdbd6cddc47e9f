"""Limits PyTorch's threads to each rank's share of the node's cores."""

import os
from collections.abc import Set

import torch

from ..communicator import Communicator, refuse_other_than_communicators
from ..launch.environment import threads_are_set

# Numbers of threads that `share_cores` has set, which a later call may replace.
_shares: set[int] = set()


def share_cores(comm: Communicator) -> int:
    """Let PyTorch use this rank's share of the cores that it may run on; return the threads.

    By default the threads of each rank would use all cores of the node. Nothing changes where
    OMP_NUM_THREADS or MKL_NUM_THREADS is set, or `torch.set_num_threads` was called before; later
    calls of it hold in any case. PyTorch does not reveal whether `set_num_threads` was called: a
    number that it would start with, a thread per core or per hardware thread, is taken for its
    default, and so is a number that was set here. To use such a number, set it afterwards.

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


def fill_cores(ranks: int) -> bool:
    """Return whether PyTorch's threads of so many ranks leave none of their cores idle.

    Args:
        ranks: That run on the same cores as this one, with as many threads.
    """
    return ranks * torch.get_num_threads() >= len(_own_cores())


def _own_cores() -> Set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return _all_cores()


def _all_cores() -> Set[int]:
    return set(range(os.cpu_count() or 1))


def _defaults(cores: Set[int]) -> set[int]:
    """Return the numbers of threads that PyTorch may start with, depending on its build.

    The number of cores, or of their hardware threads, that this rank may run on; or of all, where
    the MPI library binds the rank only when it is initialized.
    """
    return {count for usable in (cores, _all_cores())
            for count in (len(usable), len({_siblings(core) for core in usable}))}


def _siblings(core: int) -> str:
    """Return a text that is equal for the hardware threads of a core."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") as file:
            return file.read()
    except OSError:
        return str(core)
