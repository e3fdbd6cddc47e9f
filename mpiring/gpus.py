"""Assigns a node's GPUs to its ranks, in turn."""

import logging
from collections.abc import Callable
from typing import Any

from .communicator import Communicator
from .operations.consistency import same_on_all
from .world import or_world

_log = logging.getLogger("mpiring")


def cupy_for(comm: Communicator | None = None) -> Any:
    """Return CuPy, with this rank's GPU current on this thread.

        xp = mpiring.gpus.cupy_for(comm)
        params = {"w": xp.zeros((3, 4))}

    `comm.empty(..., device="cuda")` uses the same GPU.

    Args:
        comm: Communicator whose ranks divide the GPUs of each node among them; by default, all
            ranks.

    Raises:
        MissingDependencyError: CuPy or a GPU is missing on some rank.

    Collective: yes. Blocking: yes.
    """
    from .gpu import cuda
    comm = or_world(comm)
    with same_on_all(comm, "cupy_for"):
        package = cuda.cupy()
    index = assign_gpu(comm, int(package.cuda.runtime.getDeviceCount()),
                       lambda index: str(package.cuda.Device(index).pci_bus_id))
    package.cuda.Device(index).use()
    return package


def assign_gpu(comm: Communicator, count: int, name_of: Callable[[int], str]) -> int:
    """Assign a node's GPUs to its ranks in turn, and return the index of this rank's GPU.

    Warn on rank 0 if ranks share a GPU. `count` is the number of GPUs that are visible to this
    rank. Slurm may set CUDA_VISIBLE_DEVICES so that each rank sees different GPUs, and fewer than
    the node has. `name_of` returns names that are unique within the node.

    Collective: yes. Blocking: yes.
    """
    index = comm.local_rank % count
    by_rank = comm.allgather_object((comm.node_rank, name_of(index)))
    most = max(map(by_rank.count, by_rank))
    if most > 1 and comm.rank == 0:
        node, gpu = next(gpu for gpu in by_rank if by_rank.count(gpu) == most)
        _log.warning("%d ranks share GPU %s of node %d: each uses separate memory on it, and "
                     "they compute in turns", most, gpu, node)
    return index
