"""Sends single messages from rank to rank, any number at once, beside the collectives."""

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..config import Config
from ..errors import ConfigError
from ..launch import forks
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..record.recorder import Flight
from ..transport.base import Request, Schedule, Task
from .engine import Engine
from .handle import Handle

if TYPE_CHECKING:
    from ..transport.mpi import MpiTransport

_log = logging.getLogger("mpiring")
# What MPI may yet write into, or read, although nobody waits for it any more.
_abandoned: list[Handle[int]] = []


class _Received(Request, Protocol):
    @property
    def source(self) -> int: ...


class _Blind:
    """A watch that looks for nothing: who sends when is the user's affair, until he waits."""

    def look(self) -> None:
        pass


class Messages:
    """Messages among the ranks of a communicator, by the user's tags.

    Args:
        transport: Of its own; nothing else is sent there.
        engine: Advances them; they do not queue behind each other.
        config: Settings.

    Attributes:
        comm: The MPI communicator.
    """

    def __init__(self, transport: "MpiTransport", engine: Engine, config: Config) -> None:
        self.comm = transport.comm
        self._transport = transport
        self._lane = engine.join(_Blind(), math.inf)
        self._engine = engine
        # Those of two ranks have nothing to do with each other.
        self._name = f"messages of rank {engine.recorder.rank}"
        self._number = 0

    def isend(self, x: Array, dest: int, tag: int = 0) -> Handle[int]:
        """Begin to send the bytes of a contiguous vector; leave it alone until complete.

        Args:
            x: Any length and dtype.
            dest: The rank that receives.
            tag: From -1; messages of the same tag arrive in the order they were sent.

        Raises:
            ConfigError: MPI has no such tag.

        Collective: no. Blocking: no.
        """
        request = self._transport.tagged(self._checked(tag)).isend(x, dest)
        return self._submit(
            Call("send", f"{x.nbytes} bytes to {dest}, tag {tag}", nbytes=x.nbytes),
            _completed(request, dest))

    def irecv(self, x: Array, source: int | None, tag: int = 0,
              then: Callable[[Schedule[int]], Schedule[int]] = lambda schedule: schedule,
              ) -> Handle[int]:
        """Begin to receive the bytes of a contiguous vector; the result is who sent them.

        Args:
            x: Overwritten; exactly as many bytes must arrive.
            source: The rank that sends; None for any.
            tag: As in `isend`.
            then: Given the schedule that receives, returns the one that is run.

        Raises:
            ConfigError: MPI has no such tag, or the vector travels in several messages and
                its source is not known.

        Collective: no. Blocking: no.
        """
        channel = self._transport.tagged(self._checked(tag))
        whence = "any rank" if source is None else source
        call = Call("recv", f"{x.nbytes} bytes from {whence}, tag {tag}", nbytes=x.nbytes)
        if source is not None:
            return self._submit(call, then(_completed(channel.irecv(x, source), source)))
        if x.nbytes > self._transport.piece_bytes:
            raise ConfigError(
                f"{x.nbytes} bytes from any rank: more than {self._transport.piece_bytes} travel "
                f"in several messages, which several ranks could mix; say which rank sends")
        return self._submit(call, then(_received(channel.irecv_any(x))))

    def _checked(self, tag: int) -> int:
        forks.refuse_calls(self._engine.recorder.rank)
        # MPI has no tags below 0; -1 is for callers' own affairs.
        if not -1 <= tag < self._transport.tag_limit:
            raise ConfigError(
                f"tag={tag}: this MPI takes 0 to {self._transport.tag_limit - 1}")
        return tag + 1

    def _submit(self, call: Call, schedule: Schedule[int]) -> Handle[int]:
        flight = Flight(call, self._number, self._name)
        self._engine.recorder.add(flight)
        handle = Handle(self._lane, flight, Task(schedule))
        self._number += 1
        return self._engine.submit(handle)

    def leave(self) -> None:
        """Cease to advance messages; nothing may be called afterwards but `free`."""
        left = self._engine.abandon(self._lane)
        if left:
            _log.warning("%d messages were never completed, the first is %s", len(left), left[0])
            _abandoned.extend(left)
        self._engine.leave(self._lane)

    def free(self) -> None:
        """Give the communicator back to MPI; collective."""
        self._transport.free()


def _completed(request: Request, other: int) -> Schedule[int]:
    yield (request,)
    return other


def _received(request: _Received) -> Schedule[int]:
    yield (request,)
    return request.source
