"""Limits PyTorch's threads to each rank's share of the node's cores."""

from collections.abc import Callable, Set

import numpy as np
import torch

from ..communicator import Communicator
from ..launch.environment import threads_are_set
from ..launch.host import all_processors, count_cores, usable_processors
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.collectives import Build
from ..world import or_world

# Numbers of threads that `share_cores` has set; a later call may replace them.
_shares: set[int] = set()


def share_cores(comm: Communicator | None = None) -> int:
    """Limit PyTorch to this rank's share of its cores; return the number of threads.

    By default, each rank starts one thread for every core of the node. If OMP_NUM_THREADS or
    MKL_NUM_THREADS is set, or if `torch.set_num_threads` was called before, nothing changes.

    PyTorch does not report whether `set_num_threads` was called. This function therefore changes
    the number of threads if it equals a default of PyTorch (one per core or hardware thread) or a
    previous result. To choose such a number yourself, call `torch.set_num_threads` afterwards.

    Args:
        comm: Communicator whose ranks compute at the same time; by default, all ranks.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    share = own_share(comm.run, comm.node_rank)
    defaults = _defaults(usable_processors())
    if not threads_are_set() and torch.get_num_threads() in _shares | defaults:
        threads = max(1, int(share))
        _shares.add(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def own_share(run: Callable[[Call, Build[list[Array]]], list[Array]], node_rank: int) -> float:
    """Return this rank's share of the cores that it may run on. Collective, blocking.

    Ranks of a node may share cores. Each rank is assumed to use all its cores equally. `run`
    belongs to a communicator or group whose ranks compute at the same time.
    """
    numbers_sent = np.array([node_rank, *sorted(usable_processors())], np.int64)
    gathered = run(Call("cores"), lambda collectives: collectives.allgather_bytes(
        numbers_sent.view(np.uint8)))
    cores, used = set(numbers_sent[1:]), 0.0
    for node, *other_cores in (numbers.view(np.int64) for numbers in gathered):
        if node == node_rank:
            used += len(cores.intersection(other_cores)) / len(other_cores)
    return len(cores) / used


def fill_cores(share: float) -> bool:
    """Return whether PyTorch has a thread for each core in this rank's share; see `own_share`."""
    return torch.get_num_threads() >= share


def fill_only_node(comm: Communicator) -> bool:
    """Return whether all ranks are on one node and have a thread for each core of this node.

    All ranks get the same result. Collective, blocking.
    """
    fills = fill_cores(own_share(comm.run, comm.node_rank))
    return len(comm.memory_groups) == 1 and all(comm.allgather_object(fills))


def _defaults(cores: Set[int]) -> set[int]:
    """Return the numbers of threads that PyTorch may start with, depending on its build.

    PyTorch starts one thread per core or hardware thread that this rank may run on. If MPI binds
    the rank after PyTorch has started, PyTorch has counted all cores of the node.
    """
    return {count for usable in (cores, all_processors())
            for count in (len(usable), count_cores(usable))}
