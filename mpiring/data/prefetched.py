"""Draws batches of data and copies them to a GPU in a thread, while earlier batches are used."""

import atexit
import contextlib
import copy
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from ..arguments import whole_number
from ..communicator import Communicator
from ..errors import ConfigError, MissingDependencyError
from ..gpu.arrays import gpu_named
from ..gpu.carriers import ArrayCarrier, Carrier, TensorCarrier
from ..memory.arrays import dtype_name
from ..memory.pytrees import mapped
from ..memory.tensors import is_tensor
from ..world import refuse_other_than_communicators

T = TypeVar("T")
# Function that returns a batch on its device.
Arrive = Callable[[], Any]

_log = logging.getLogger("mpiring")

# Longest wait for a busy loader whose batches are no longer needed.
_PATIENCE_S = 5.0
# A signal just before a wait does not interrupt the wait in CPython. A new wait handles it.
_WAKEUP_S = 1.0


def prefetch(loader: Iterable[Any], device: object, *, depth: int = 2,
             comm: Communicator | None = None) -> "Prefetched":
    """Iterate over a loader's batches; each batch is prepared while earlier batches are used.

        for images, labels in mpiring.data.prefetch(loader, "cuda"):
            ...

    A thread draws batches from the loader. For a GPU, it copies their arrays to pinned memory, and
    queues the copy to the GPU on a separate stream. For the CPU, it leaves them unchanged. The
    loader is therefore up to `depth` + 1 batches ahead of training. In checkpoints, save the
    `state_dict()` of the result, not the loader's.

    While the loader runs Python code, it holds the interpreter's lock, and each operation of
    training may wait for up to 5 ms. Functions of NumPy and PyTorch release the lock. DataLoader
    workers avoid the waits; sys.setswitchinterval(0.0002) shortens them.

    On a GPU, NumPy arrays become CuPy arrays, and PyTorch CPU tensors become GPU tensors, in C
    order. All other objects in a batch remain unchanged.

    Use batches on the stream that is current when they are drawn. Arrays live as long as you keep
    references to them. Arrays of one batch share memory, so one array keeps the memory of all.

    Args:
        loader: Any iterable over batches, which are arrays or pytrees of dicts, lists and tuples.
            For the CPU, it must not overwrite batches that it has yielded.
        device: Name of the device: "cuda" for the current GPU, "cuda:1" for a specific GPU, "xpu"
            for tensors on an Intel GPU, "cpu" for none. It may also be a torch.device.
        depth: Number of batches to draw ahead.
        comm: Communicator whose trace (`MPIRING_TRACE`) records how long the program waits for
            batches; None for no record.

    Returns:
        An iterable with state, and with a length if the loader has one. Each iteration starts an
        iteration over the loader. Exceptions of the loader are raised after the batches before
        them. If you leave an iteration early, it waits up to 5 s for the batch that is being
        loaded.

    Raises:
        ConfigError: There is no such device, or `comm` is not a communicator.
        MissingDependencyError: There is no GPU, or CuPy is missing (PyTorch tensors do not need
            CuPy). The iteration may also raise this error.

    Collective: no.
    """
    whole_number("depth", depth, 1)
    if comm is not None:
        refuse_other_than_communicators(comm)
    return Prefetched(loader, _gpu_of(device), depth, comm)


class Prefetched:
    """The batches of a loader, on a GPU of this kind and index, or on the CPU; see `prefetch`."""

    def __init__(self, loader: Iterable[Any], gpu: tuple[str, int] | None, depth: int,
                 comm: Communicator | None = None) -> None:
        self._loader, self._gpu, self._depth = loader, gpu, depth
        self._waited = None if comm is None else comm.recorder.waited_for_data
        self._carriers: dict[type[Carrier], Carrier] = {}
        # State of the loader after the last batch that was yielded; None if it is not ahead.
        self._state: Any = None
        # Thread of an iteration that was left early.
        self._abandoned: BackgroundIterator[tuple[Arrive, Any]] | None = None

    def __len__(self) -> int:
        return len(cast(Any, self._loader))

    def __iter__(self) -> Generator[Any, None, None]:
        """Yield batches; the thread ends with the generator, even after an exception."""
        if self._abandoned is not None:
            # Two threads must not draw from the loader at once.
            self._abandoned.join()
        if self._has_state() and self._state is None:
            self._state = self._loader_state()
        # map keeps no reference to a batch, so its memory is freed when the user drops it.
        ahead = BackgroundIterator(map(self._send_batch, self._loader), self._depth, self._waited)
        try:
            yield from map(self._receive_batch, ahead)
            self._state = None
        finally:
            self._abandoned = None if ahead.close() else ahead

    def state_dict(self) -> Any:
        """Return the loader's state after the last batch that was yielded.

        Batches that were drawn ahead do not count; they will be drawn again. Save the state after
        training on the last batch that was yielded.

        Returns:
            A copy of the result of the loader's `state_dict()`.

        Raises:
            ConfigError: The loader has no such method.

        Collective: no. Blocking: no.
        """
        self._refuse_stateless()
        return copy.deepcopy(self._state) if self._state is not None else self._loader_state()

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration resume at a saved position.

        Args:
            state: State for the loader's `load_state_dict()`.

        Raises:
            ConfigError: The loader has no such method.

        Collective: no, unless the loader's method is.
        """
        self._refuse_stateless()
        cast(Any, self._loader).load_state_dict(state)
        self._state = None

    def _has_state(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _refuse_stateless(self) -> None:
        if not self._has_state():
            raise ConfigError(
                f"the loader, a {type(self._loader).__name__}, has no state_dict() and "
                f"load_state_dict(): prefetch one that has, as torchdata's StatefulDataLoader or "
                f"TokenBatches, or save the sampler's: sampler.state_dict(seen=...)")

    def _loader_state(self) -> Any:
        # The loader may return the same object every time, and change it later.
        return copy.deepcopy(cast(Any, self._loader).state_dict())

    def _send_batch(self, batch: Any) -> tuple[Arrive, Any]:
        arrive = (lambda: batch) if self._gpu is None else self._send_arrays(batch)
        return arrive, self._loader_state() if self._has_state() else None

    def _receive_batch(self, sent: tuple[Arrive, Any]) -> Any:
        arrive, state = sent
        batch = arrive()
        self._state = state
        return batch

    def _send_arrays(self, batch: Any) -> Arrive:
        """Send the arrays of a batch; return a function that returns a batch of their copies."""
        kinds: list[type[Carrier] | None] = []
        sent: dict[type[Carrier], list[Any]] = {}

        def sort(leaf: Any) -> None:
            kinds.append(_kind_of(leaf))
            if kinds[-1] is not None:
                sent.setdefault(kinds[-1], []).append(leaf)

        mapped(batch, sort)
        arrivals = {kind: self._carrier_of(kind).send(xs) for kind, xs in sent.items()}

        def arrive() -> Any:
            moved = {kind: iter(arrival()) for kind, arrival in arrivals.items()}
            order = iter(kinds)

            def take(leaf: Any) -> Any:
                kind = next(order)
                return leaf if kind is None else next(moved[kind])

            return mapped(batch, take)

        return arrive

    def _carrier_of(self, carrier: type[Carrier]) -> Carrier:
        """Return the carrier to the GPU; raise ConfigError if that cannot hold NumPy arrays."""
        if carrier not in self._carriers:
            kind, index = cast(tuple[str, int], self._gpu)
            if carrier is TensorCarrier:
                self._carriers[carrier] = TensorCarrier(kind, index)
            elif kind == "cuda":
                from ..gpu import cuda
                self._carriers[carrier] = ArrayCarrier(cuda.device(index))
            else:
                raise ConfigError(
                    f"NumPy arrays cannot be copied to {kind}:{index}: they become CuPy arrays, "
                    f"which need an NVIDIA GPU; let the loader yield PyTorch tensors")
        return self._carriers[carrier]


def _kind_of(leaf: object) -> type[Carrier] | None:
    """Return the class that copies a leaf of a batch to a GPU; None to leave it unchanged."""
    if is_tensor(leaf):
        dense = leaf.device.type == "cpu" and leaf.layout is sys.modules["torch"].strided
        return TensorCarrier if dense else None
    if not isinstance(leaf, np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        return None
    try:
        dtype_name(leaf.dtype)
    except ConfigError:
        return None
    return ArrayCarrier


def _gpu_of(device: object) -> tuple[str, int] | None:
    """Return kind and index of a GPU; None for the CPU."""
    if str(device).partition(":")[0] == "cpu":
        return None
    kind, index = gpu_named(device)
    return kind, _current_gpu(kind) if index is None else index


def _current_gpu(kind: str) -> int:
    """Return this thread's current GPU, which is the same in PyTorch and CuPy."""
    problem = None
    if "torch" in sys.modules:
        from ..gpu import accelerator
        try:
            accelerator.available(kind)
            return int(sys.modules["torch"].accelerator.current_device_index())
        except MissingDependencyError as error:
            problem = error
    from ..gpu import cuda
    try:
        return int(cuda.cupy().cuda.runtime.getDevice())
    except MissingDependencyError as error:
        raise problem or error


@dataclass(frozen=True)
class _End:
    """Marks the end of the items, with the error that ended them, if any."""

    error: BaseException | None = None


class BackgroundIterator(Iterator[T], Generic[T]):
    """Items of an iterator, drawn by a thread; at most `depth` items are ready at a time.

    Exceptions of the iterator are raised after the items before them. Call `close` after use.

    `waited` is called with the start and the end of each wait, as times of time.monotonic().
    """

    def __init__(self, items: Iterator[T], depth: int,
                 waited: Callable[[float, float], None] | None = None) -> None:
        self._items, self._waited = items, waited
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        # Not a semaphore, which is Python code and acquires several locks.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stop = threading.Event()
        self._patience_s = _PATIENCE_S
        # A daemon, because the program may end while the iterator hangs.
        self._thread = threading.Thread(target=self._draw, daemon=True, name="mpiring prefetch")
        self._thread.start()
        # A thread that still runs during Python's shutdown may crash it.
        atexit.register(self.close)

    def __next__(self) -> T:
        began_s = time.monotonic()
        try:
            item = self._item()
        except BaseException:
            # After a signal, such as that of Ctrl-C, the iterator may never return.
            self._patience_s = 0.0
            raise
        if self._waited is not None:
            self._waited(began_s, time.monotonic())
        if isinstance(item, _End):
            self._ready.put(_End())
            raise item.error or StopIteration
        self._room.put(None)
        return item

    def _item(self) -> T | _End:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_WAKEUP_S)

    def close(self) -> bool:
        """End the thread, which may be drawing an item; wait up to 5 s for it.

        Return whether it has ended.
        """
        atexit.unregister(self.close)
        self._stop.set()
        self._room.put(None)
        patience_s, self._patience_s = self._patience_s, 0.0
        # Garbage collection may call this in any thread.
        if patience_s and self._thread is not threading.current_thread():
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("prefetch: the loader has not returned for %g s since the iteration "
                             "was left; its thread continues until that batch",
                             patience_s)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Return when the thread has ended, after `close`."""
        self._thread.join()

    def _draw(self) -> None:
        """Draw until there are no more items, or the iteration has been left."""
        end = _End()
        try:
            while True:
                self._room.get()
                if self._stop.is_set():
                    break
                # This keeps no reference to the item: its memory is freed when the user drops it.
                self._ready.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:
            end = _End(error)
        self._ready.put(end)
