"""Finds a common order of the operations that ranks submit by name, and runs them."""

from collections.abc import Sequence

from ..communicator import Communicator
from ..errors import MpiringError


class HorovodInternalError(MpiringError, RuntimeError):
    """An operation failed: ranks submitted different things under one name, or one has died."""


class Matcher:
    """The operations of a process set."""

    def __init__(self, comm: Communicator, ranks: Sequence[int], fusion_bytes: int) -> None:
        self._comm = comm

    def close(self) -> None:
        """Wait."""
        self._comm.close()
