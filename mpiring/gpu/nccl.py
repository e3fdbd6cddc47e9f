"""Calls NCCL of NVIDIA, or RCCL of AMD, whose functions are the same, by ctypes.

Each function queues work on a stream and returns. Communicators are made by an identity that rank 0
sends to the others over MPI. The library is not part of mpiring. PyTorch or CuPy may have loaded
it; otherwise, it is that of a wheel or of the system.

The alternatives were dropped. CuPy has a module for NCCL, which may be another version than that of
PyTorch. NVIDIA's package nccl4py needs packages of CUDA for one version, and is not built for AMD.
PyTorch's process group has separate threads and timeouts, and needs an address and a port.
Nonblocking initialization hung at random with NCCL 2.26, so a thread waits instead.

The source is nccl.h of NCCL 2.28; the functions are those of 2.13 and newer.
"""

import ctypes
import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingDependencyError, TransportError
from ..memory.arrays import COMPLEX, dtype_name
from ..remedies import pip_install
from .device import Device
from .interface import DeviceVector, address_of

IDENTITY_BYTES = 128
# Longest time for which an abort waits for a call of another thread.
_CALL_S = 1.0
_SUCCESS, _IN_PROGRESS = 0, 7
# Values of ncclRedOp_t. NCCL's maxima and minima of floating numbers drop NaN.
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# Values of ncclDataType_t. NCCL rounds 16-bit sums at each step.
_BYTE = 1
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_FLOATING = {"float32": 7, "float64": 8}


class _Identity(ctypes.Structure):
    # Not as c_char, whose values ctypes cuts at the first zero.
    _fields_ = [("bytes", ctypes.c_ubyte * IDENTITY_BYTES)]


_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# Arguments of the functions. All return a status, except the two that return a text.
_FUNCTIONS: Mapping[str, Sequence[Any]] = {
    "GetVersion": (_pointer,),
    "GetUniqueId": (_pointer,),
    "CommInitRank": (_pointer, _int, _Identity, _int),
    "CommDestroy": (_pointer,),
    "CommAbort": (_pointer,),
    "CommGetAsyncError": (_pointer, _pointer),
    "GetErrorString": (_int,),
    "GetLastError": (_pointer,),
    "AllReduce": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    "ReduceScatter": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    "Reduce": (_pointer, _pointer, _size, _int, _int, _int, _pointer, _pointer),
    "AllGather": (_pointer, _pointer, _size, _int, _pointer, _pointer),
    "Broadcast": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    "Send": (_pointer, _size, _int, _int, _pointer, _pointer),
    "Recv": (_pointer, _size, _int, _int, _pointer, _pointer),
    "GroupStart": (),
    "GroupEnd": (),
}


class NcclLibrary:
    """The functions of the library at a path; raises OSError if it or a function is missing.

    Attributes:
        path: Path of the library, or its name.
        version: Version, such as "2.28.9".
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Functions may wait, and must not hold Python's lock meanwhile, as with PyDLL.
        library = ctypes.CDLL(path)
        self._functions = {}
        for name, arguments in _FUNCTIONS.items():
            try:
                function = getattr(library, f"nccl{name}")
            except AttributeError as error:
                raise OSError(f"{path}: {error}; NCCL 2.13 or newer has it") from error
            function.argtypes = arguments
            if name.endswith(("String", "LastError")):
                function.restype = ctypes.c_char_p
            self._functions[name] = function
        number = ctypes.c_int()
        self.call("GetVersion", ctypes.byref(number))
        major, minor_and_patch = divmod(number.value, 10_000)
        self.version = ".".join(map(str, (major, *divmod(minor_and_patch, 100))))

    def __repr__(self) -> str:
        return f"NCCL {self.version} ({self.path})"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise TransportError if it fails."""
        status = self._functions[name](*arguments)
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise TransportError(f"nccl{name}: {self.error(status)}")

    def error(self, status: int) -> str:
        """Return the description of a status, and of the last failure."""
        texts = self._functions["GetErrorString"](status), self._functions["GetLastError"](None)
        return ": ".join(text.decode(errors="replace").strip() for text in texts if text)

    def new_identity(self) -> bytes:
        """Return the identity of a new communicator, for all of its ranks."""
        identity = _Identity()
        self.call("GetUniqueId", ctypes.byref(identity))
        return bytes(identity.bytes)


def nccl_library() -> NcclLibrary:
    """Return the library; raise MissingDependencyError if there is none."""
    problems = []
    for path in _candidates():
        try:
            return NcclLibrary(path)
        except (OSError, TransportError) as error:
            problems.append(str(error))
    raise MissingDependencyError(
        f"no NCCL: {'; '.join(problems)}; {pip_install('nvidia-nccl-cu13')}, or load your "
        f"cluster's module of it")


def _candidates() -> Iterator[str]:
    """Yield the paths of libraries, the best first."""
    # A second copy of the library would not know the communicators of the first one.
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libnccl.so" in line or "/librccl.so" in line:
                yield line[line.index("/"):]
    # Without NVIDIA's packages, find_spec raises an error.
    with suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in spec and spec.submodule_search_locations or ():
            yield f"{folder}/lib/libnccl.so.2"
    yield "libnccl.so.2"
    yield "librccl.so.1"


def reduces(op: str, dtype: "np.dtype[Any]") -> bool:
    """Return whether NCCL combines vectors with the results of mpiring; for ops see Reduction.

    A mean is a sum, which mpiring divides.
    """
    return _reduction(op, dtype) is not None


def _reduction(op: str, dtype: "np.dtype[Any]") -> tuple[int, int, int] | None:
    """Return NCCL's numbers of an op and a dtype, and of its numbers per element, or None."""
    op, name, parts = "sum" if op == "mean" else op, dtype_name(dtype), 1
    if name in COMPLEX and op == "sum":
        name, parts = f"float{4 * dtype.itemsize}", 2
    number = (_INTEGERS | _FLOATING if op in ("sum", "prod") else _INTEGERS).get(name)
    return None if number is None or op not in _OPS else (_OPS[op], number, parts)


class Nccl:
    """This rank's part of a communicator of NCCL, for vectors of one GPU.

    Its methods queue work on the GPU behind all earlier work, and return. All ranks call the same
    methods in the same order, with the same lengths. Nothing compares that; see `operations`.
    The creation is collective and blocking.

    Args:
        identity: Result of `new_identity` on one rank.

    Raises:
        TransportError: NCCL has failed; also raised by all methods.
    """

    def __init__(self, library: NcclLibrary, device: Device, rank: int, size: int,
                 identity: bytes) -> None:
        self.library, self.rank, self.size = library, rank, size
        self._device = device
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        # Held while a thread queues work, for which NCCL may have to connect ranks, and while a
        # thread asks for errors. They are reentrant because of signal handlers.
        self._calling, self._checking = threading.RLock(), threading.RLock()
        with device.gpu.current():
            library.call("CommInitRank", ctypes.byref(self._handle), size,
                         _Identity.from_buffer_copy(identity), rank)

    def __repr__(self) -> str:
        return repr(self.library)

    @property
    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransportError(f"rank {self.rank}: the communicator of {self} is closed, because "
                                 f"an operation has failed or a rank has died")
        return self._handle

    def check(self) -> None:
        """Raise TransportError if NCCL has noticed an error since the last call."""
        status = ctypes.c_int()
        with self._checking:
            self.library.call("CommGetAsyncError", self._open, ctypes.byref(status))
        if status.value not in (_SUCCESS, _IN_PROGRESS):
            raise TransportError(
                f"rank {self.rank}: {self} has failed: {self.library.error(status.value)}; "
                f"NCCL_DEBUG=WARN prints more")

    def close(self) -> None:
        """Free the communicator, when all queued work of all ranks is done. Collective."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.library.call("CommDestroy", handle)

    def abort(self) -> None:
        """End all queued calls, whose results are then undefined. Not collective.

        It returns at once, because NCCL may never end them.
        """
        with self._checking:
            handle, self._handle = self._handle, None
        if handle is not None:
            threading.Thread(target=self._abort, args=(handle,), daemon=True).start()

    def _abort(self, handle: ctypes.c_void_p) -> None:
        # A call of another thread soon returns, unless it waits for another rank.
        self._calling.acquire(timeout=_CALL_S)
        with suppress(TransportError):
            self.library.call("CommAbort", handle)

    def allreduce(self, x: DeviceVector, op: str) -> None:
        """Combine vectors in place, for what NCCL `reduces`."""
        op_number, dtype, parts = self._numbers(op, x)
        self._queue([("AllReduce", (x, x), (parts * x.size, dtype, op_number))])

    def reduce_scatter(self, slices: Sequence[DeviceVector], op: str) -> None:
        """Combine the slices of a vector, in place, each on its rank, for what NCCL `reduces`."""
        op_number, dtype, parts = self._numbers(op, slices[0])
        own = slices[self.rank]
        self._queue(
            [("ReduceScatter", (slices[0], own), (parts * own.size, dtype, op_number))]
            if _are_equal(slices) else
            [("Reduce", (x, x), (parts * x.size, dtype, op_number, rank))
             for rank, x in enumerate(slices)])

    def allgather(self, slices: Sequence[DeviceVector]) -> None:
        """Copy the slices of a vector, each from its rank, to all ranks."""
        own = slices[self.rank]
        if _are_equal(slices):
            self._queue([("AllGather", (own, slices[0]), (own.nbytes, _BYTE))])
        else:
            self.allgather_vectors(slices)

    def allgather_vectors(self, vectors: Sequence[DeviceVector]) -> None:
        """Copy vectors, which may be anywhere, each from its rank, to all ranks."""
        self._queue([("Broadcast", (x, x), (x.nbytes, _BYTE, rank))
                     for rank, x in enumerate(vectors)])

    def broadcast(self, x: DeviceVector, root: int) -> None:
        """Copy the vector of rank `root` to all ranks."""
        self._queue([("Broadcast", (x, x), (x.nbytes, _BYTE, root))])

    def exchange(self, sends: Mapping[int, DeviceVector],
                 receives: Mapping[int, DeviceVector]) -> None:
        """Send vectors to other ranks, and receive vectors from others."""
        self._queue([
            *(("Send", (x,), (x.nbytes, _BYTE, rank)) for rank, x in sends.items()),
            *(("Recv", (x,), (x.nbytes, _BYTE, rank)) for rank, x in receives.items())])

    def _numbers(self, op: str, x: DeviceVector) -> tuple[int, int, int]:
        numbers = _reduction(op, x.dtype)
        if numbers is None:
            raise TypeError(f"NCCL has no {op} of {x.dtype}")
        return numbers

    def _queue(self, calls: Sequence[tuple[str, Sequence[DeviceVector], Sequence[int]]]) -> None:
        """Queue calls that run at the same time, of vectors that are not empty."""
        calls = [call for call in calls if call[1][0].size]

        def queue(stream: int) -> None:
            with self._calling:
                # Before the group begins, because a group that has begun must end.
                handle = self._open
                self.library.call("GroupStart")
                try:
                    for name, xs, arguments in calls:
                        self.library.call(
                            name, *map(address_of, xs), *arguments, handle, stream)
                finally:
                    self.library.call("GroupEnd")

        if calls:
            # The function keeps the vectors.
            self._device.call(queue)


def _are_equal(slices: Sequence[DeviceVector]) -> bool:
    """Return whether the slices of a vector have the same length."""
    return all(x.size == slices[0].size for x in slices)
