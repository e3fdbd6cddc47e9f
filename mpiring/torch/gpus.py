"""Chooses each rank's GPU for PyTorch."""

import torch

from ..communicator import Communicator
from ..gpus import take_turns
from .prefetching import refuse_missing


def device_for(comm: Communicator) -> torch.device:
    """Return the GPU that is this rank's, and use it from now on where none is named.

    Ranks of a node take the GPUs that they see in turn; that ranks share one is said once.

    Raises:
        MissingDependencyError: PyTorch finds none.

    Collective: yes. Blocking: yes.
    """
    refuse_missing()
    index = take_turns(comm, torch.cuda.device_count(),
                       lambda index: str(torch.cuda.get_device_properties(index).uuid))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
