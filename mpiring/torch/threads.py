"""Limits PyTorch's threads to each rank's share of the node's cores."""

from collections.abc import Callable, Set

import numpy as np
import torch

from ..communicator import Communicator, or_world
from ..engine.group import Build
from ..launch.environment import threads_are_set
from ..launch.host import all_processors, count_cores, usable_processors
from ..memory.arrays import Array
from ..operations.agreement import Call

# Numbers of threads that `share_cores` has set, which a later call may replace.
_shares: set[int] = set()


def share_cores(comm: Communicator | None = None) -> int:
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
    comm = or_world(comm)
    share = own_share(comm.run, comm.node_rank)
    defaults = _defaults(usable_processors())
    if not threads_are_set() and torch.get_num_threads() in _shares | defaults:
        threads = max(1, int(share))
        _shares.add(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def own_share(run: Callable[[Call, Build[list[Array]]], list[Array]], node_rank: int) -> float:
    """Return how many cores there are for this rank, of those that it may run on.

    A rank of this node that may run on some of them, and on others, takes its part of them.

    Args:
        run: Of a communicator, or group, of the ranks that compute at the same time.
        node_rank: The number of this rank's node.

    Collective: yes. Blocking: yes.
    """
    numbers_sent = np.array([node_rank, *sorted(usable_processors())], np.int64)
    of_ranks = run(Call("cores"), lambda collectives: collectives.allgather_bytes(
        numbers_sent.view(np.uint8)))
    cores, taken = set(numbers_sent[1:]), 0.0
    for node, *other_cores in (numbers.view(np.int64) for numbers in of_ranks):
        if node == node_rank:
            taken += len(cores.intersection(other_cores)) / len(other_cores)
    return len(cores) / taken


def fill_cores(share: float) -> bool:
    """Return whether PyTorch's threads leave none of the cores idle that this rank may run on.

    Args:
        share: How many of these there are for it; the other ranks have as many threads for each.
    """
    return torch.get_num_threads() >= share


def fill_only_node(comm: Communicator) -> bool:
    """Return whether all ranks are on one node and leave none of its cores idle; alike on all.

    Collective: yes. Blocking: yes.
    """
    fills = fill_cores(own_share(comm.run, comm.node_rank))
    return len(comm.memory_groups) == 1 and all(comm.allgather_object(fills))


def _defaults(cores: Set[int]) -> set[int]:
    """Return the numbers of threads that PyTorch may start with, depending on its build.

    The number of cores, or of their hardware threads, that this rank may run on; or of all, where
    the MPI library binds the rank only when it is initialized.
    """
    return {count for usable in (cores, all_processors())
            for count in (len(usable), count_cores(usable))}
