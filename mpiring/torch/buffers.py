"""Keeps the buffers of a module, as BatchNorm's statistics, equal on all ranks."""

from torch import nn

from ..communicator import Communicator
from .states import broadcast_parameters


class Buffers:
    """The buffers of a module, of which one rank's are copied to all when a step is complete.

    Between steps they are therefore equal: a rank can evaluate the module, or save its state,
    without the others.

    Args:
        module: The module.
        comm: The ranks.
        copied: Whether they are copied; else each rank has its own.

    Attributes:
        root: Whose are copied.
    """

    def __init__(self, module: nn.Module, comm: Communicator, *, copied: bool) -> None:
        self.root = 0
        self._module = module
        self._comm = comm
        self._copied = copied

    def copy(self) -> None:
        """Copy them, if they are to be copied.

        Collective: yes. Blocking: yes.
        """
        if self._copied:
            # Graphs that are kept for another backward pass count changes of the tensors, but
            # BatchNorm, which changes them itself, does not count those either.
            broadcast_parameters((x.data for x in self._module.buffers()), self._comm,
                                 root=self.root)
