"""Tells torch.distributed what it asks of a process group: name, purpose, store, devices.

A ProcessGroup of PyTorch's has these from its back ends, of which a Python class has none.
"""

from typing import Any

import torch
import torch.distributed as dist

from .devices import KINDS


class Named(dist.ProcessGroup):
    """A process group that is known by a name.

    Args:
        store: What torch.distributed made for it; kept for those who ask for it.
        rank, size: This rank, and how many there are.

    Attributes:
        supports_splitting: Asked for where init_process_group is given a `device_id`.
    """

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        """Return the name of the back end."""
        return "mpiring"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Remember the name by which torch.distributed finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return that name."""
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Remember what the group is for."""
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of device that the group serves; checkpoints ask for one that has the CPU."""
        return [torch.device(kind) for kind in KINDS]

    def _get_backend(self, device: Any) -> "Named":
        """Return the back end for a device: there is one for all."""
        return self

    def get_group_store(self) -> Any:
        """Return the store that torch.distributed made for this group."""
        return self._store
