"""Base of asynchronous training: its communicator, its costs, and its end."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from .. import Communicator, Statistics
from ..provisional import Call

_T = TypeVar("_T", bound="AsynchronousTraining")


class AsynchronousTraining(ABC):
    """Training in which ranks exchange single messages while they compute.
    `closed` is True after `close`.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, comm: Communicator) -> None:
        self.closed = False
        self._calls, self._waited_s, self._in_flight_s = 0, 0.0, 0.0
        # A separate communicator is closed when the program ends, which detects skipped calls.
        self._comm = comm.split(0)
        self._messages = self._comm.messages()

    @abstractmethod
    def close(self) -> None:
        """End training on all ranks. Collective."""

    def _costs(self, bytes_sent: int) -> Statistics:
        return Statistics(self._calls, bytes_sent, self._in_flight_s, self._waited_s)

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception, the other ranks do not call `close`. The exception ends the job.
        if error is None:
            self.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began_s

    def _wait_for_all(self, call: Call) -> None:
        """Wait, perhaps for hours, until all ranks make this call; stalls name missing ranks.

        Raises BufferMismatchError if a rank has left without the call.
        """
        self._comm.run(call, lambda collectives: collectives.barrier(), patient=True)
