"""Brings batches of data to the device while the one before is computed with."""

import copy
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from .arguments import whole_number
from .errors import ConfigError, MissingDependencyError
from .gpu.base import DeviceVector, Event
from .gpu.device import Device
from .gpu.staging import Staging
from .memory.arrays import dtype_name

# As CUDA aligns its own allocations; all dtypes and vector loads are content with it.
_ALIGNMENT = 256

Arrive = Callable[[], Sequence[Any]]


class Carrier(Protocol):
    """Brings arrays of one kind to one GPU, on a stream of its own."""

    def send(self, xs: Sequence[Any]) -> Arrive:
        """Queue copies of arrays; called by the thread that loads.

        Returns:
            What the thread that asks for batches calls: it returns the copies, and has that
            thread's current stream wait for them.
        """


class Kind(Protocol):
    """A kind of arrays that batches may hold."""

    def takes(self, x: object) -> bool:
        """Return whether it is one, in host memory."""

    def current(self) -> int:
        """Return the GPU that this thread has in use; raises MissingDependencyError."""

    def carrier(self, index: int) -> Carrier:
        """Return what brings such arrays to a GPU; raises MissingDependencyError."""


def prefetch(loader: Iterable[Any], device: object, *, depth: int = 2) -> "Prefetched":
    """Iterate over a loader's batches on a GPU, each copied there while earlier ones are used.

        for images, labels in mpiring.data.prefetch(loader, "cuda"):
            ...

    A thread draws batches from the loader, copies their arrays into pinned memory, and has the
    GPU fetch them on a stream of its own. So the loader runs ahead by `depth` batches: where it
    stands is not where training stands (`DistributedSampler.state_dict` takes `seen`).

    NumPy arrays become CuPy's, and PyTorch's CPU tensors become CUDA tensors, once
    `mpiring.torch` is imported; in C's order, row after row. Whatever else is in a batch stays
    what it is.

    Batches are used on one stream: that which is current when they are asked for. Arrays may be
    kept as long as one likes; those of a batch share memory: to keep one keeps all.

    Args:
        loader: Any iterable. Its batches are arrays, or nests of dicts, lists and tuples.
        device: "cuda" for the GPU that is current now, "cuda:1" for a certain one (also as a
            torch.device); "cpu" leaves batches as they are, and starts no thread.
        depth: How many batches are fetched ahead.

    Returns:
        An iterable, with a length if the loader has one. Each iteration is one of the loader's;
        what the loader raises comes out after the batches before.

    Raises:
        ConfigError: There is no such device.
        MissingDependencyError: There is no CuPy (for PyTorch's tensors: no CUDA), or no GPU;
            also from the iteration.

    Collective: no.
    """
    whole_number("depth", depth, 1)
    return Prefetched(loader, _index_of(device), depth)


class Prefetched:
    """The batches of a loader, on a device; see `prefetch`.

    Args:
        loader: Any iterable.
        index: Of the GPU; None for the CPU.
        depth: How many batches are fetched ahead.
    """

    def __init__(self, loader: Iterable[Any], index: int | None, depth: int) -> None:
        self._loader, self._index, self._depth = loader, index, depth
        self._carriers: dict[int, Carrier] = {}

    def __len__(self) -> int:
        return len(cast(Any, self._loader))

    def __iter__(self) -> Generator[Any, None, None]:
        if self._index is None:
            return (batch for batch in self._loader)
        return self._ahead()

    def _ahead(self) -> Generator[Any, None, None]:
        """Yield batches; the thread ends with the generator, however that ends."""
        ready: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        room, stop = threading.Semaphore(self._depth), threading.Event()
        thread = threading.Thread(target=self._load, args=(ready, room, stop), daemon=True,
                                  name="mpiring prefetch")
        thread.start()
        try:
            while (arrive := ready.get()) is not None:
                room.release()
                # Nothing here may hold on to a batch: its memory is free once its user says so.
                yield arrive()
                del arrive
        finally:
            stop.set()
            room.release()
            thread.join()

    def _load(self, ready: "queue.SimpleQueue[Callable[[], Any] | None]",
              room: threading.Semaphore, stop: threading.Event) -> None:
        """Send batches until there are no more, or nobody wants them."""
        try:
            batches = iter(self._loader)
            while room.acquire() and not stop.is_set():
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                ready.put(self._sent(batch))
                del batch
        except BaseException as error:
            ready.put(functools.partial(_raise, error))
        ready.put(None)

    def _sent(self, batch: Any) -> Callable[[], Any]:
        """Send the arrays of a batch; return what returns the batch with their copies."""
        found: dict[int, list[Any]] = {}

        def look(leaf: Any) -> int:
            kind = next((place for place, one in enumerate(KINDS) if one.takes(leaf)), None)
            if kind is None:
                _refuse_unknown_tensor(leaf)
                return -1
            found.setdefault(kind, []).append(leaf)
            return kind

        kinds: list[int] = []
        changed(batch, lambda leaf: kinds.append(look(leaf)))
        arrivals = {kind: self._carrier(kind).send(xs) for kind, xs in found.items()}

        def arrive() -> Any:
            moved = {kind: iter(arrival()) for kind, arrival in arrivals.items()}
            order = iter(kinds)

            def take(leaf: Any) -> Any:
                kind = next(order)
                return leaf if kind < 0 else next(moved[kind])

            return changed(batch, take)

        return arrive

    def _carrier(self, kind: int) -> Carrier:
        if kind not in self._carriers:
            self._carriers[kind] = KINDS[kind].carrier(cast(int, self._index))
        return self._carriers[kind]


class Arrays:
    """NumPy's arrays, which become CuPy's."""

    def takes(self, x: object) -> bool:
        """Return whether it is an array of numbers."""
        if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
            return False
        try:
            dtype_name(x.dtype)
        except ConfigError:
            return False
        return True

    def current(self) -> int:
        """Return the GPU that this thread has in use."""
        from .gpu import cuda
        return int(cuda.cupy().cuda.runtime.getDevice())

    def carrier(self, index: int) -> Carrier:
        """Return what brings arrays to a GPU."""
        from .gpu import cuda
        return ArrayCarrier(cuda.device(index))


class ArrayCarrier:
    """Brings NumPy's arrays to a GPU; see Carrier.

    All arrays of a batch travel in one piece. The memory of a batch whose arrays have died is
    written to again behind what its user had queued by the next time that a batch was asked for.

    Args:
        device: The GPU.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.gpu.stream()
        self._staging = Staging(device.gpu)
        # Between the threads that load and those that ask.
        self._lock = threading.Lock()
        # Memory that nobody has any more; and since when its last user's stream is through.
        self._dead: deque[DeviceVector] = deque()
        self._idle: list[tuple[DeviceVector, Event]] = []

    def send(self, xs: Sequence[Any]) -> Arrive:
        """Queue copies of arrays."""
        starts, nbytes = laid_out([x.nbytes for x in xs])
        slot = self._staging.take(nbytes)
        for start, x in zip(starts, xs):
            slot[start:start + x.nbytes].view(x.dtype).reshape(x.shape)[...] = x
        with self._lock:
            memory = self._take(nbytes)
            if nbytes:
                self._stream.upload(slot[:nbytes], memory[:nbytes])
            copied = self._stream.record()
        self._staging.give(slot, copied)
        looks = [(start, x.nbytes, x.dtype, x.shape) for start, x in zip(starts, xs)]
        return lambda: self._arrived(memory, copied, looks)

    def _take(self, nbytes: int) -> DeviceVector:
        """Return memory that the stream may write to."""
        fitting = [place for place, (memory, _) in enumerate(self._idle) if memory.size >= nbytes]
        if fitting:
            memory, until = self._idle.pop(
                min(fitting, key=lambda place: self._idle[place][0].size))
            self._stream.wait(until)
            return memory
        # Batches have grown; what was for smaller ones is given back.
        self._idle.clear()
        return self._device.allocate(1 << max(nbytes - 1, 4095).bit_length())

    def _arrived(self, memory: DeviceVector, copied: Event,
                 looks: Sequence[tuple[int, int, np.dtype[Any], tuple[int, ...]]]) -> list[Any]:
        gpu = self._device.gpu
        with self._lock:
            if self._dead:
                # All that was queued with them is before this mark, on the stream that is
                # current for whoever asks: another thread may have seen them die.
                until = gpu.mark()
                while self._dead:
                    self._idle.append((self._dead.popleft(), until))
        gpu.follow(copied)
        loan = _Loan(memory, self._dead)
        return [gpu.array(replace(memory[start:start + nbytes].view(dtype), owner=loan), shape)
                for start, nbytes, dtype, shape in looks]


class _Loan:
    """Is kept alive by the arrays of a batch, and notes that all of them have died."""

    def __init__(self, memory: DeviceVector, dead: deque[DeviceVector]) -> None:
        self._memory, self._dead = memory, dead

    def __del__(self) -> None:
        self._dead.append(self._memory)


# The kinds of arrays that are known; `mpiring.torch` adds its own.
KINDS: list[Kind] = [Arrays()]


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where arrays of so many bytes begin, one behind the other, and all their bytes."""
    starts, end = [], 0
    for nbytes in sizes:
        starts.append(end)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def changed(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a nest of dicts, lists and tuples, with each leaf changed, in order."""
    if isinstance(nest, MutableMapping):
        copied = copy.copy(nest)
        for key, value in nest.items():
            copied[key] = changed(value, change)
        return copied
    if isinstance(nest, list | tuple):
        parts = [changed(value, change) for value in nest]
        if isinstance(nest, tuple):
            return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
        return parts
    return change(nest)


def _index_of(device: object) -> int | None:
    """Return the index of the GPU that is meant; None for the CPU."""
    wish = str(device)
    kind, _, index = wish.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or index and not index.isdecimal():
        raise ConfigError(f"device={wish!r}: expected cpu, cuda, or cuda: and a number")
    if index:
        return int(index)
    problem: MissingDependencyError | None = None
    # All frameworks ask CUDA; so the first one that is there can tell.
    for one in reversed(KINDS):
        try:
            return one.current()
        except MissingDependencyError as error:
            problem = problem or error
    raise cast(MissingDependencyError, problem)


def _refuse_unknown_tensor(x: object) -> None:
    if type(x).__module__ == "torch" and type(x).__name__ == "Tensor" and len(KINDS) == 1:
        raise ConfigError("a batch holds PyTorch's tensors: import mpiring.torch before it is "
                          "fetched")


def _raise(error: BaseException) -> None:
    raise error
