"""Messages through mpi4py, on a private duplicate of the user's communicator."""

import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ..errors import BufferMismatchError, ConfigError, ProcessFailedError, TransportError
from ..memory.arrays import as_bytes, pieces_of
from . import waiting
from .base import LANES, Array, Request, Schedule, T
from .staged import DeviceMessage

# Open MPI refuses messages of 2 GiB and more.
PIECE_BYTES = 1 << 30

# An error names at most this many source lines that made dropped communicators.
_LINES = 3
_CONTROL_TAG = 0
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD,
        "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}


# MPI errors after the death of a rank: MPI has noticed it, or another rank has revoked the
# communicator. (If MPI lacks these errors, mpi4py defines them as ERR_UNKNOWN.)
_PROCESS_FAILURES = {
    MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}


def failure(action: str, error: MPI.Exception) -> TransportError:
    """Return an mpiring error for an MPI error; `action` describes what failed, with its rank."""
    if error.Get_error_class() in _PROCESS_FAILURES:
        return ProcessFailedError(f"{action}: a rank has died ({error.Get_error_string()})")
    return TransportError(f"{action} failed: {error.Get_error_string()}")


def create_communicator(comm: MPI.Comm, make: Callable[[], T]) -> T:
    """Return the communicator that `make` makes from `comm`; collective like `make`.

    Raises:
        ProcessFailedError: A rank has died.
        TransportError: MPI cannot make it; the error names the number of open communicators.
    """
    try:
        return make()
    except MPI.Exception as exc:
        raise failure(
            f"rank {comm.rank}: making a communicator ({_open_communicators()}; MPI has room for "
            f"some thousand, MPICH for 2,048: close() those that are not needed any more)",
            exc) from exc


def start_maximum(comm: MPI.Comm, numbers: Array) -> MPI.Request:
    """Start to replace numbers, in place, by the maximum over all ranks; return MPI's request."""
    return comm.Iallreduce(MPI.IN_PLACE, numbers, MPI.MAX)


def allgather(comm: MPI.Comm, numbers: Sequence[int]) -> Array:
    """Return the whole numbers of all ranks, shape (ranks, numbers); collective and blocking.

    This rank sleeps between tests. MPI would test continuously, which delays ranks on the same
    core.
    """
    rows = np.empty((comm.size, len(numbers)), np.int64)
    request, pause_s = comm.Iallgather(np.array(numbers, np.int64), rows), 0.0
    while not request.Test():
        time.sleep(pause_s)
        pause_s = min(pause_s + waiting.FIRST_PAUSE_S, waiting.OPENING_PAUSE_S)
    return rows


# The transports of this process, which share MPI's limit on communicators.
_open: "set[MpiTransport]" = set()


def _open_communicators() -> str:
    """Return the number of open transports, and the lines that made the dropped ones."""
    dropped = [transport.line for transport in list(_open) if transport.dropped]
    text = f"{len(_open)} communicators of mpiring's are open in this process"
    if not dropped:
        return text
    lines = ", ".join(f"{file}:{line} ({count})"
                      for (file, line), count in Counter(dropped).most_common(_LINES))
    return f"{text}, {len(dropped)} of them dropped without close(), made at {lines}"


def _caller_line() -> tuple[str, int]:
    """Return the file and line that called this package."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class _Pending:
    """An MPI request; `expected` is the length that a receive must have."""

    def __init__(self, request: MPI.Request, rank: int, action: str, other: int,
                 nbytes: int, expected: int | None = None) -> None:
        self._request = request
        self._text_arguments = rank, action, nbytes, other
        self._expected = expected
        self._status = None if expected is None else MPI.Status()
        self._done = False

    def __repr__(self) -> str:
        return _text(*self._text_arguments)

    @property
    def source(self) -> int:
        """The rank that has sent the message, once the request is complete."""
        return -1 if self._status is None else self._status.Get_source()

    def test(self) -> bool:
        """Return whether it is complete; raise the error of MPI, or of a different length."""
        if self._done:
            return True
        try:
            self._done = self._request.Test(self._status)
        except MPI.Exception as exc:
            if exc.Get_error_class() == MPI.ERR_TRUNCATE:
                raise BufferMismatchError(f"{self}: it sent more than that") from exc
            raise failure(str(self), exc) from exc
        if self._done and self._status is not None:
            length = self._status.Get_count(MPI.BYTE)
            if length != self._expected:
                raise BufferMismatchError(f"{self}: it sent {length}")
        return self._done


def _text(rank: int, action: str, nbytes: int, other: int) -> str:
    return f"rank {rank}: {action.format(nbytes=nbytes, other=other)}"


_SEND = "sending {nbytes} bytes to rank {other}"
_RECEIVE = "receiving {nbytes} bytes from rank {other}"
_RECEIVE_ANY = "receiving {nbytes} bytes from any rank"
_ALLREDUCE = "MPI_Iallreduce of {nbytes} bytes"


class _All:
    """Several requests as one."""

    def __init__(self, requests: "list[_Pending]") -> None:
        self.requests = requests

    def __repr__(self) -> str:
        return repr(self.requests)

    def test(self) -> bool:
        self.requests = [request for request in self.requests if not request.test()]
        return not self.requests


def messages_of(request: Request) -> "list[_Pending]":
    """Return the MPI requests that make up a request; none if it waits for something else."""
    if isinstance(request, DeviceMessage):
        return [] if request.request is None else messages_of(request.request)
    if isinstance(request, _All):
        return request.requests
    return [request] if isinstance(request, _Pending) else []


class MpiTransport:
    """A private duplicate of `comm`, from which each operation gets a separate channel.

    The duplication is collective.

    Attributes:
        bytes_sent: Number of bytes sent by this rank (for MPI's own collectives, the minimum).
        piece_bytes: Length of the longest message; longer arrays are sent in several.
        line: File and line of the user's program that made the transport.
        dropped: True if the transport was garbage-collected without being freed.
    """

    def __init__(self, comm: MPI.Intracomm, piece_bytes: int = PIECE_BYTES) -> None:
        self.comm = create_communicator(comm, comm.Dup)
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.bytes_sent = 0
        self.piece_bytes = piece_bytes
        # Control messages use tag 0. Tags repeat long after the operations that used them are
        # complete.
        self.tag_limit = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self._tags = min(self.tag_limit, 1 << 20)
        self.line, self.dropped = _caller_line(), False
        _open.add(self)

    def channel(self, sequence: int, lane: int = 0) -> "MpiChannel":
        """Return a lane of operation number `sequence`; see base.Channel.lane."""
        if not 0 <= lane < LANES:
            raise ConfigError(f"rank {self.rank}: lane {lane}: expected 0 to {LANES - 1}")
        return MpiChannel(self, sequence, 1 + (sequence * LANES + lane) % self._tags)

    def tagged(self, tag: int) -> "MpiChannel":
        """Return a channel with one tag, on a transport without other channels."""
        return MpiChannel(self, 0, tag)

    def iallreduce(self, x: Array, op: str) -> Request:
        """Start MPI_Iallreduce of a vector, in place; ranks must call in the same order."""
        if x.dtype == np.bool_:
            x = x.view(np.uint8)    # MPI has no MAX and MIN of booleans
        return self.start_request(
            lambda: self.comm.Iallreduce(MPI.IN_PLACE, x, _OPS[op]), _ALLREDUCE, x.nbytes)

    def start_request(self, start: Callable[[], MPI.Request], action: str, nbytes: int,
                      other: int = -1, expected: int | None = None) -> _Pending:
        """Make an MPI call that returns a request; convert its errors."""
        try:
            request = start()
        except MPI.Exception as exc:
            raise failure(_text(self.rank, action, nbytes, other), exc) from exc
        return _Pending(request, self.rank, action, other, nbytes, expected)

    def free(self) -> None:
        """Return the private communicator to MPI; collective."""
        self.comm.Free()
        _open.discard(self)

    def drop(self) -> None:
        """Warn that it can no longer be freed. The garbage collector calls this, so use no lock."""
        self.dropped = True
        warnings.warn_explicit(
            f"rank {self.rank}: a communicator of {self.size} ranks, made in this line, was "
            f"dropped without close(): a communicator of MPI's, and some memory, are kept until "
            f"the program ends; call close() on all its ranks, or use `with`",
            ResourceWarning, *self.line)


class MpiChannel:
    """One lane of an operation: a tag. All lanes share `sent`, a list of one number of bytes."""

    def __init__(self, transport: MpiTransport, sequence: int, tag: int) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.ranks: Sequence[int] = range(self.size)
        self._transport = transport
        self._comm = transport.comm
        self._sequence = sequence
        self._tag = tag
        self.sent = [0]

    def lane(self, index: int) -> "MpiChannel":
        """Return lane `index` of the same operation."""
        other = self._transport.channel(self._sequence, index)
        other.sent = self.sent
        return other

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous vector."""
        self._transport.bytes_sent += array.nbytes
        self.sent[0] += array.nbytes
        return self._in_pieces(array, lambda piece: self._transport.start_request(
            lambda: self._comm.Isend([piece, MPI.BYTE], dest, self._tag),
            _SEND, piece.nbytes, dest))

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving the bytes of a contiguous vector."""
        return self._in_pieces(array, lambda piece: self._transport.start_request(
            lambda: self._comm.Irecv([piece, MPI.BYTE], source, self._tag),
            _RECEIVE, piece.nbytes, source, expected=piece.nbytes))

    def irecv_any(self, array: Array) -> _Pending:
        """Start receiving a contiguous vector from any rank; see `source` of the request."""
        return self._transport.start_request(
            lambda: self._comm.Irecv([as_bytes(array), MPI.BYTE], MPI.ANY_SOURCE, self._tag),
            _RECEIVE_ANY, array.nbytes, expected=array.nbytes)

    def _in_pieces(self, array: Array, start: Callable[[Array], _Pending]) -> Request:
        if array.nbytes <= self._transport.piece_bytes:
            return start(as_bytes(array))
        return _All([start(piece)
                     for piece in pieces_of(as_bytes(array), self._transport.piece_bytes)])


class Mailbox:
    """Short control messages between any two ranks, separate from the operations."""

    def __init__(self, transport: MpiTransport) -> None:
        self._comm = transport.comm
        self._rank = transport.rank
        self._in_flight: deque[tuple[MPI.Request, bytes]] = deque()
        # Number of messages sent to each rank, and received from all ranks.
        self._sent, self._received = np.zeros(transport.size, np.int64), 0

    def post(self, dest: int, message: bytes) -> None:
        """Send a message without waiting; raise ProcessFailedError (a death) or TransportError."""
        try:
            request = self._comm.Isend([message, MPI.BYTE], dest, _CONTROL_TAG)
            self._in_flight.append((request, message))
            self._sent[dest] += 1
            while self._in_flight and self._in_flight[0][0].Test():
                self._in_flight.popleft()
        except MPI.Exception as exc:
            raise failure(f"rank {self._rank}: sending a note to rank {dest}", exc) from exc

    def poll(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its source; raise as `post` does.

        Only this call tells a rank that waits in shared memory that another rank has died.
        """
        arrived = []
        status = MPI.Status()
        try:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, status):
                content = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([content, MPI.BYTE])
                arrived.append((status.Get_source(), bytes(content)))
                self._received += 1
        except MPI.Exception as exc:
            raise failure(f"rank {self._rank}: looking for other ranks", exc) from exc
        return arrived

    def close(self) -> None:
        """Receive messages in flight, such as late answers, so that MPI can free resources.

        No message may be sent afterwards. Collective and blocking; raises as `post` does.
        """
        due = np.empty(1, np.int64)
        try:
            # MPI_Alltoall sometimes did not end on one of two hosts (MPICH 5.0.2 over TCP, three
            # jobs at a time).
            self._comm.Reduce_scatter_block(self._sent, due)
        except MPI.Exception as exc:
            raise failure(f"rank {self._rank}: counting notes", exc) from exc
        while self._received < due[0]:
            self.poll()


class MpiNode:
    """The ranks of a communicator that share a node, synchronized by blocking MPI calls.

    Used at the start, before the ranks share memory. The constructor is collective. The `ranks` are
    ascending.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._local = create_communicator(
            comm, lambda: comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
        self.rank, self.size = self._local.rank, self._local.size
        groups = self._local.Get_group(), comm.Get_group()
        self.ranks: Sequence[int] = groups[0].Translate_ranks(range(self.size), groups[1])
        for group in groups:
            group.Free()

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return the numbers that each rank of the node has passed, per rank; never yield."""
        return [tuple(row) for row in allgather(self._local, numbers).tolist()]
        yield ()

    def free(self) -> None:
        """Return the communicator to MPI; collective."""
        self._local.Free()


def abort(code: int) -> None:
    """End all processes of the MPI job with an exit status."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def before_finalize(action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` when MPI is about to be finalized; return a function that calls it now instead.

    MPI_Finalize begins by deleting the attributes of COMM_SELF (MPI 4.1, section 11.2.4).
    """
    def delete(comm: MPI.Comm, keyval: int, value: object) -> None:
        action()

    keyval = MPI.Comm.Create_keyval(delete_fn=delete)
    MPI.COMM_SELF.Set_attr(keyval, action)

    def now() -> None:
        MPI.COMM_SELF.Delete_attr(keyval)
        MPI.Comm.Free_keyval(keyval)

    return now
