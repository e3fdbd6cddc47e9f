"""Shares out a node's GPUs among its ranks, which take them in turn."""

import logging
from collections.abc import Callable
from typing import Any

from .communicator import Communicator, refuse_other_than_communicators

_log = logging.getLogger("mpiring")


def cupy_for(comm: Communicator) -> Any:
    """Return CuPy, with the GPU that is this rank's in use on this thread.

        xp = mpiring.gpus.cupy_for(comm)
        params = {"w": xp.zeros((3, 4))}

    It is that of `comm.empty(..., device="cuda")`.

    Raises:
        MissingDependencyError: There is no CuPy, or no GPU.

    Collective: yes. Blocking: yes.
    """
    from .gpu import cuda
    package = cuda.cupy()
    index = take_turns(comm, int(package.cuda.runtime.getDeviceCount()),
                       lambda index: str(package.cuda.Device(index).pci_bus_id))
    package.cuda.Device(index).use()
    return package


def take_turns(comm: Communicator, count: int, name_of: Callable[[int], str]) -> int:
    """Return which of the GPUs that this rank sees is its own; say once where ranks share them.

    Args:
        comm: The ranks.
        count: How many GPUs this rank sees: CUDA_VISIBLE_DEVICES, as Slurm sets it, may show it
            fewer than the node has, and others than its neighbours.
        name_of: Returns a name of the GPU of an index, unique within the node.

    Collective: yes. Blocking: yes.
    """
    refuse_other_than_communicators(comm)
    index = comm.local_rank % count
    mine = comm.node_rank, name_of(index)
    everybodys = comm.allgather_object(mine)
    most = max(map(everybodys.count, everybodys))
    if most > 1 and comm.rank == 0:
        node, gpu = next(place for place in everybodys if everybodys.count(place) == most)
        _log.warning("%d ranks share GPU %s of node %d: each has its own part of its memory, and "
                     "they take turns in computing", most, gpu, node)
    return index
