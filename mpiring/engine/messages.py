"""Sends single messages between ranks, any number at a time, separate from collectives."""

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..arguments import whole_number
from ..config import Config
from ..errors import ConfigError, StallError
from ..launch import forks
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..record.flight import Flight
from ..transport.base import Channel, Schedule, T, Task
from .engine import Engine
from .handle import Handle
from .stalls import MessageWatch

if TYPE_CHECKING:
    from ..transport.mpi import Mailbox, MpiChannel, MpiTransport

_log = logging.getLogger("mpiring")
# The watch uses MPI tag 0. Tag -1 is for callers in this package.
_FIRST_TAG = -1
_OFFSET = 1 - _FIRST_TAG
# These handles keep memory alive that MPI may access after the communicator is closed.
_abandoned: list[Handle[Any]] = []


class Message(Handle[T]):
    """One or several messages in flight; for a single one, `wait` returns the peer's rank."""

    def __init__(self, messages: "Messages", flight: Flight, task: Task[T],
                 other: int | None) -> None:
        super().__init__(messages.queue, flight, task)
        self._messages, self._peer = messages, other

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result when it is complete on this rank; for one message, the peer's rank.

        After `stall_warning_s`, mpiring logs what the peer is doing. A StallError includes the
        report on the peer. For other errors and the timeout, see `wait` of a Handle.
        """
        if self.complete:
            return super().wait()
        watch = self._messages.watch
        if timeout_s is None:
            timeout_s = watch.config.stall_timeout_s or None
        with watch.waiting(self, self._peer, timeout_s or 0.0) as report:
            try:
                return super().wait(timeout_s)
            except StallError as error:
                raise StallError("\n".join([str(error), *report()])) from None


class Messages(forks.OfRank):
    """Messages between the ranks of a communicator, matched by tag.

    Args:
        transport: Transport for these messages only.
        mailbox: Mailbox of the watch, on the same communicator.
        engine: Engine that advances the messages independently of each other.
    """

    def __init__(self, transport: "MpiTransport", mailbox: "Mailbox", engine: Engine,
                 config: Config) -> None:
        self.comm = transport.comm
        self.watch = MessageWatch(transport.rank, transport.size, mailbox, config, engine.report)
        self.queue = engine.join(self.watch, math.inf)
        self._transport, self._mailbox = transport, mailbox
        self._engine = engine
        # Each rank numbers its messages independently.
        self._name = f"messages of rank {engine.recorder.rank}"
        self._number = 0

    def isend(self, x: Array, dest: int, tag: int = 0) -> Message[int]:
        """Start to send a contiguous array, which must not change until the message is complete.

        Args:
            x: Array of any shape and dtype, in host memory.
            dest: Rank that receives.
            tag: Whole number; messages with the same tag arrive in the order of sending.

        Raises:
            ConfigError: There is no such rank or tag.

        Collective: no. Blocking: no.
        """
        dest = self._rank("dest", dest)
        request = self._channel(tag).isend(x, dest)
        call = Call("send", f"{x.nbytes} bytes to {dest}, tag {tag}", nbytes=x.nbytes)
        return self._begin(call, _complete(request, dest), dest)

    def irecv(self, x: Array, source: int | None, tag: int = 0,
              then: Callable[[Schedule[int]], Schedule[int]] = lambda schedule: schedule,
              ) -> Message[int]:
        """Start to receive into a contiguous array; `wait` returns the sender's rank.

        Args:
            x: Array to overwrite; exactly this many bytes must arrive.
            source: Rank that sends; None for any.
            tag: Tag of the message, see `isend`.
            then: Function that is given the receiving schedule and returns the schedule to run.

        Raises:
            ConfigError: There is no such rank or tag, or the array needs several messages and
                `source` is None.

        Collective: no. Blocking: no.
        """
        channel = self._channel(tag)
        sender = "any rank" if source is None else source
        call = Call("recv", f"{x.nbytes} bytes from {sender}, tag {tag}", nbytes=x.nbytes)
        if source is not None:
            source = self._rank("source", source)
            schedule = _complete(channel.irecv(x, source), source)
        elif x.nbytes <= self._transport.piece_bytes:
            schedule = _complete(channel.irecv_any(x), None)
        else:
            raise ConfigError(
                f"{x.nbytes} bytes from any rank: more than {self._transport.piece_bytes} are "
                f"sent as several messages, which may come from different ranks; pass the source")
        return self._begin(call, then(schedule), source)

    def submit(self, call: Call, build: Callable[[Channel], Schedule[T]],
               other: int | None = None) -> Message[T]:
        """Begin a schedule of this rank that sends to other ranks and receives from them.

        Args:
            call: Description, for reports; other ranks need not make the same call.
            build: Function that returns the schedule, given the channel that all such schedules
                share. The channel uses the lowest tags; do not use these tags in `isend` and
                `irecv` at the same time.
            other: Rank to query if the schedule stalls; None for all ranks.
        """
        forks.refuse_calls(self._engine.recorder.rank)
        return self._begin(call, build(self._transport.channel(0)), other)

    def _rank(self, name: str, rank: int) -> int:
        size = self._transport.size
        return whole_number(f"rank {self._transport.rank}: {name}", rank, 0, size - 1)

    def _channel(self, tag: int) -> "MpiChannel":
        forks.refuse_calls(self._engine.recorder.rank)
        last = self._transport.tag_limit - _OFFSET
        if not _FIRST_TAG <= tag <= last:
            raise ConfigError(f"tag={tag}: this MPI supports 0 to {last}")
        return self._transport.tagged(tag + _OFFSET)

    def _begin(self, call: Call, schedule: Schedule[T], other: int | None) -> Message[T]:
        flight = Flight(call, self._number, self._name)
        self._engine.recorder.add(flight)
        message = Message(self, flight, Task(schedule), other)
        self._number += 1
        self._engine.submit(message)
        return message

    def leave(self) -> None:
        """Stop advancing messages; afterwards only `free` may be called."""
        if left := self._engine.leave(self.queue, quietly=True):
            _log.warning("%d messages were not completed; the first is %s", len(left), left[0])
            _abandoned.extend(left)

    def free(self) -> None:
        """Return the communicator to MPI; collective."""
        self._mailbox.close()
        self._transport.free()


def _complete(request: Any, other: int | None) -> Schedule[int]:
    yield (request,)
    return request.source if other is None else other
