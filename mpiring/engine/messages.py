"""Sends single messages from rank to rank, any number at once, beside the collectives."""

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..arguments import whole_number
from ..config import Config
from ..errors import ConfigError, StallError
from ..launch import forks
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..record.flight import Flight
from ..transport.base import Channel, Request, Schedule, T, Task
from .engine import Engine
from .handle import Handle
from .stalls import MessageWatch

if TYPE_CHECKING:
    from ..transport.mpi import Mailbox, MpiTransport

_log = logging.getLogger("mpiring")
# MPI tag 0 is the watch's; -1 is a tag of callers within this package.
_FIRST_TAG = -1
_OFFSET = 1 - _FIRST_TAG
# MPI may still read or write these messages' memory after the communicator is closed.
_abandoned: list[Handle[Any]] = []


class _Received(Request, Protocol):
    @property
    def source(self) -> int: ...


class Message(Handle[T]):
    """A message under way, whose `wait` returns the rank at its other end; or several."""

    def __init__(self, messages: "Messages", flight: Flight, task: Task[T],
                 other: int | None) -> None:
        super().__init__(messages.lane, flight, task)
        self._messages, self._other = messages, other

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result, of a message the rank at its other end, once it is complete here.

        After `stall_warning_s`, a report says what that rank is doing.

        Args:
            timeout_s: Give up after this many seconds; the message stays under way. By default
                the setting `stall_timeout_s`.

        Raises:
            StallError: It is not complete by then; holds the report.
            BufferMismatchError: Another number of bytes arrived.
            TransportError: MPI failed, or an earlier operation did.

        Collective: no. Blocking: yes.
        """
        if self.done:
            return super().wait()
        if timeout_s is None:
            timeout_s = self._messages.config.stall_timeout_s or None
        with self._messages.watch.waiting(self, self._other, timeout_s or 0.0) as report:
            try:
                return super().wait(timeout_s)
            except StallError as error:
                raise StallError("\n".join([str(error), *report()])) from None


class Messages:
    """Messages between the ranks of a communicator, told apart by tags.

    Args:
        transport: Its own; nothing else is sent there.
        post: Short notes on the same communicator.
        engine: Advances the messages; they do not queue behind each other.
        config: Settings.

    Attributes:
        comm: The MPI communicator.
        config: As above; may be replaced.
        lane: Of the engine.
        watch: Reports messages that do not arrive.
    """

    def __init__(self, transport: "MpiTransport", post: "Mailbox", engine: Engine,
                 config: Config) -> None:
        self.comm = transport.comm
        self.config = config
        self.watch = MessageWatch(transport.rank, transport.size, post, self, engine.recorder)
        self.lane = engine.join(self.watch.look, math.inf)
        self._transport, self._post = transport, post
        self._engine = engine
        # The numbers of two ranks' messages have nothing to do with each other.
        self._name = f"messages of rank {engine.recorder.rank}"
        self._number = 0

    def isend(self, x: Array, dest: int, tag: int = 0) -> Message[int]:
        """Begin to send the bytes of a contiguous array; leave it alone until complete.

        Args:
            x: Any shape and dtype, in host memory.
            dest: The rank that receives.
            tag: A whole number; messages with the same tag arrive in the order of sending.

        Raises:
            ConfigError: There is no such rank or tag.

        Collective: no. Blocking: no.
        """
        dest = self._rank("dest", dest)
        request = self._transport.tagged(self._checked(tag)).isend(x, dest)
        call = Call("send", f"{x.nbytes} bytes to {dest}, tag {tag}", nbytes=x.nbytes)
        return self._begin(call, _completed(request, dest), dest)

    def irecv(self, x: Array, source: int | None, tag: int = 0,
              then: Callable[[Schedule[int]], Schedule[int]] = lambda schedule: schedule,
              ) -> Message[int]:
        """Begin to receive the bytes of a contiguous array; `wait` returns who sent them.

        Args:
            x: Overwritten; exactly this many bytes must arrive.
            source: The rank that sends; None for any.
            tag: As in `isend`.
            then: Given the schedule that receives, returns the one that is run.

        Raises:
            ConfigError: There is no such rank or tag, or the array travels in several messages
                and `source` is None.

        Collective: no. Blocking: no.
        """
        channel = self._transport.tagged(self._checked(tag))
        sender = "any rank" if source is None else source
        call = Call("recv", f"{x.nbytes} bytes from {sender}, tag {tag}", nbytes=x.nbytes)
        if source is not None:
            source = self._rank("source", source)
            schedule = _completed(channel.irecv(x, source), source)
        elif x.nbytes <= self._transport.piece_bytes:
            schedule = _received(channel.irecv_any(x))
        else:
            raise ConfigError(
                f"{x.nbytes} bytes from any rank: more than {self._transport.piece_bytes} travel "
                f"in several messages, which several ranks could mix; say which rank sends")
        return self._begin(call, then(schedule), source)

    def submit(self, call: Call, build: Callable[[Channel], Schedule[T]],
               other: int | None = None) -> Message[T]:
        """Begin a schedule of this rank's own, which sends to other ranks and receives from them.

        Args:
            call: What it is, for reports; other ranks need not call the same.
            build: Returns the schedule, given the channel that all such schedules share; its lanes
                are the first tags of `isend` and `irecv`, which are not to be used beside it.
            other: The rank that is asked when it stalls; None for all.

        Collective: no. Blocking: no.
        """
        forks.refuse_calls(self._engine.recorder.rank)
        return self._begin(call, build(self._transport.channel(0)), other)

    def _rank(self, name: str, rank: int) -> int:
        size = self._transport.size
        return whole_number(f"rank {self._transport.rank}: {name}", rank, 0, size - 1)

    def _checked(self, tag: int) -> int:
        forks.refuse_calls(self._engine.recorder.rank)
        last = self._transport.tag_limit - _OFFSET
        if not _FIRST_TAG <= tag <= last:
            raise ConfigError(f"tag={tag}: this MPI takes 0 to {last}")
        return tag + _OFFSET

    def _begin(self, call: Call, schedule: Schedule[T], other: int | None) -> Message[T]:
        flight = Flight(call, self._number, self._name)
        self._engine.recorder.add(flight)
        message = Message(self, flight, Task(schedule), other)
        self._number += 1
        self._engine.submit(message)
        return message

    def leave(self) -> None:
        """Cease to advance messages; nothing may be called afterwards but `free`."""
        if left := self._engine.leave(self.lane, quietly=True):
            _log.warning("%d messages were never completed, the first is %s", len(left), left[0])
            _abandoned.extend(left)

    def free(self) -> None:
        """Give the communicator back to MPI; collective."""
        self._post.close()
        self._transport.free()


def _completed(request: Request, other: int) -> Schedule[int]:
    yield (request,)
    return other


def _received(request: _Received) -> Schedule[int]:
    yield (request,)
    return request.source
