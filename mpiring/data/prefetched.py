"""Draws batches of data and copies them to a GPU in a thread, while earlier batches are used."""

import atexit
import collections
import contextlib
import copy
import functools
import inspect
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from ..arguments import refuse_other_state, whole_number
from ..communicator import Communicator
from ..errors import ClosedError, ConfigError, MissingDependencyError
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


def prefetch(loader: Iterable[Any] | Callable[[int], Iterable[Any]], device: object = "cpu", *,
             depth: int = 2, comm: Communicator | None = None,
             epochs: range | None = None) -> "Prefetched":
    """Iterate over a loader's batches; each batch is prepared while earlier batches are used.

        for images, labels in mpiring.data.prefetch(loader, "cuda", epochs=range(3)):
            ...

    A thread draws batches from the loader. For a GPU, it copies their arrays to pinned memory, and
    queues the copy to the GPU on a separate stream. For the CPU, it leaves them unchanged. The
    loader is therefore up to `depth` + 1 batches ahead of training. In checkpoints, save the
    `state_dict()` of the result, not that of the loader or its sampler.

    With `epochs`, the thread continues over all epochs. When it has drawn the last batch of an
    epoch, it calls `set_epoch` with the next epoch, and begins the next iteration over the loader.
    This calls each `set_epoch` of the loader, its dataset, its sampler and its batch sampler. The
    attribute `epoch` of the result is the epoch of the last batch that was yielded. To work between
    epochs, iterate over each epoch separately:

        data = mpiring.data.prefetch(loader, "cuda", epochs=range(3))
        for epoch, batches in data.by_epoch():
            for images, labels in batches:
                ...

    While the loader runs Python code, it holds the interpreter's lock, and each operation of
    training may wait for up to 5 ms. Functions of NumPy and PyTorch release the lock. DataLoader
    workers avoid the waits; sys.setswitchinterval(0.0002) shortens them.

    On a GPU, NumPy arrays become CuPy arrays, and PyTorch CPU tensors become GPU tensors, in C
    order. All other objects in a batch remain unchanged.

    Use batches on the stream that is current when they are drawn. Arrays live as long as you keep
    references to them. Arrays of one batch share memory, so one array keeps the memory of all.

    Args:
        loader: Any iterable over batches, which are arrays or pytrees of dicts, lists and tuples.
            For the CPU, it must not overwrite batches that it has yielded. With `epochs`, it must
            be iterable repeatedly, or a function that is called with each epoch and returns an
            iterable.
        device: Name of the device: "cuda" for the current GPU, "cuda:1" for a specific GPU, "xpu"
            for tensors on an Intel GPU, "cpu" for none. It may also be a torch.device.
        depth: Number of batches to draw ahead.
        comm: Communicator whose trace (`MPIRING_TRACE`) records how long the program waits for
            batches; None for no record.
        epochs: Epochs to iterate over, as `range(3)`; None for one iteration over the loader, which
            does not call `set_epoch`.

    Returns:
        An iterable with state. Without `epochs`, it has a length if the loader has one. Each
        iteration starts an iteration over the loader. Exceptions of the loader are raised after the
        batches before them, in their epoch. If you leave an iteration early, it waits up to 5 s for
        the batch that is being loaded.

    Raises:
        ConfigError: There is no such device, `comm` is not a communicator, `epochs` is not a range
            of numbers from 0, or the loader cannot be iterated repeatedly.
        MissingDependencyError: There is no GPU, or CuPy is missing (PyTorch tensors do not need
            CuPy). The iteration may also raise this error.

    Collective: no.
    """
    whole_number("depth", depth, 1)
    if comm is not None:
        refuse_other_than_communicators(comm)
    if epochs is not None:
        _refuse_epochs(epochs, loader)
    return Prefetched(loader, _gpu_of(device), depth, comm, epochs)


class Prefetched:
    """The batches of a loader, on a GPU of this kind and index, or on the CPU; see `prefetch`."""

    def __init__(self, loader: Any, gpu: tuple[str, int] | None, depth: int,
                 comm: Communicator | None = None, epochs: range | None = None) -> None:
        self._loader, self._gpu, self._depth, self._epochs = loader, gpu, depth, epochs
        self._waited = None if comm is None else comm.recorder.waited_for_data
        self._carriers: dict[type[Carrier], Carrier] = {}
        # Epoch of the last batch that was yielded; None if there is none, or without epochs.
        self.epoch: int | None = None
        # Whether all batches of this epoch were yielded.
        self._over = False
        self._source, self._samples = _source_of(loader)
        # Its state after the last batch that was yielded; None if it is not ahead.
        self._state: Any = None
        # Whether the next iteration continues the epoch of a state.
        self._resumes = False
        # Thread of an iteration that was left early.
        self._abandoned: BackgroundIterator[tuple[Arrive, Any]] | None = None

    def __len__(self) -> int:
        if self._epochs is not None:
            # Epochs may have different numbers of batches.
            raise TypeError("prefetch with epochs has no len(); len(loader) is that of one epoch")
        return len(self._loader)

    def __iter__(self) -> Generator[Any, None, None]:
        """Yield batches; the thread ends with the generator, even after an exception."""
        with contextlib.closing(self.by_epoch()) as epochs:
            for _, batches in epochs:
                yield from batches

    def by_epoch(self) -> Generator[tuple[int | None, Iterator[Any]], None, None]:
        """Yield each epoch, with an iterator over its batches.

        If you leave the batches of an epoch early, the next epoch begins with a new thread. After
        `load_state_dict`, the first epoch has the batches that remain.

        Raises:
            ClosedError: Batches were requested after this iterator was closed or deleted.

        Collective: no. Blocking: until the first epoch has begun, not for others.
        """
        left: Sequence[int | None] = [None] if self._epochs is None else self._epochs
        resumes, self._resumes = self._resumes, False
        if resumes:
            left = left[left.index(self.epoch):]
        # The batches of a complete epoch were yielded before the state was saved.
        skips = resumes and self._over
        while left:
            if self._abandoned is not None:
                # Two threads must not draw from the loader at once.
                self._abandoned.join()
            if self._source is not None and self._state is None:
                self._state = self._loader_state()
            ahead = BackgroundIterator(self._iterations(left, resumes), self._depth, self._waited)
            try:
                for epoch in left:
                    left = left[1:]
                    batches = self._receive(epoch, ahead)
                    if skips:
                        collections.deque(batches, maxlen=0)
                    else:
                        yield epoch, batches
                    batches.close()
                    resumes = skips = False
                    if (self.epoch, self._over) != (epoch, True):
                        break
            finally:
                self._abandoned = None if ahead.close() else ahead

    def state_dict(self) -> Any:
        """Return the loader's state after the last batch that was yielded.

        Batches that were drawn ahead do not count; they will be drawn again. Save the state after
        training on the last batch that was yielded.

        Returns:
            A copy of the result of the `state_dict()` of the loader. For a PyTorch DataLoader, it
            is that of its DistributedSampler or TokenBatches. With `epochs`, it is a dict that also
            has the epoch.

        Raises:
            ConfigError: The loader has no such method.

        Collective: no. Blocking: no.
        """
        self._refuse_stateless()
        state = copy.deepcopy(self._state) if self._state is not None else self._loader_state()
        if self._epochs is None:
            return state
        return {"epoch": self.epoch, "over": self._over, "loader": state}

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration resume at a saved position.

        Args:
            state: Result of `state_dict()`, with `epochs` or without, as here.

        Raises:
            ConfigError: The loader has no such method, or `epochs` lacks the epoch of the state.

        Collective: no, unless the loader's method is.
        """
        self._refuse_stateless()
        epoch = None
        if self._epochs is not None:
            refuse_other_state(state, ("epoch", "over", "loader"), "of prefetch with epochs")
            epoch, self._over, state = state["epoch"], state["over"], state["loader"]
            if epoch is not None and epoch not in self._epochs:
                raise ConfigError(f"the state is of epoch {epoch}, which is not among "
                                  f"epochs={self._epochs}: pass all epochs of the training")
        if epoch is not None:
            _set_epoch(self._loader, epoch)
        self._source.load_state_dict(state)
        self.epoch, self._resumes, self._state = epoch, epoch is not None, None

    def _refuse_stateless(self) -> None:
        if self._source is None:
            raise ConfigError(
                f"the loader, a {type(self._loader).__name__}, has no state_dict() and "
                f"load_state_dict(): prefetch one that has, as torchdata's StatefulDataLoader or "
                f"TokenBatches, or a DataLoader with the DistributedSampler of mpiring. Without "
                f"epochs, you can also save the sampler's: sampler.state_dict(seen=...)")

    def _loader_state(self, drawn: int = 0) -> Any:
        """Return a copy of the state after a number of batches of this iteration, or now."""
        seen = drawn * self._samples
        # The loader may return the same object every time, and change it later.
        return copy.deepcopy(self._source.state_dict(**({"seen": seen} if seen else {})))

    def _iterations(self, epochs: Sequence[int | None], is_set: bool) -> Iterator[Iterator[Any]]:
        """Begin an iteration over the loader for each epoch, when it is requested."""
        for epoch in epochs:
            if epoch is not None and not is_set:
                _set_epoch(self._loader, epoch)
            is_set, batches = False, self._loader
            if epoch is not None and callable(batches) and not hasattr(batches, "__iter__"):
                batches = batches(epoch)
            # map keeps no reference to a batch, so its memory is freed when the user drops it.
            yield map(self._send_batch, batches, itertools.count(1))

    def _send_batch(self, batch: Any, number: int) -> tuple[Arrive, Any]:
        arrive = (lambda: batch) if self._gpu is None else self._send_arrays(batch)
        return arrive, None if self._source is None else self._loader_state(number)

    def _receive(self, epoch: int | None, ahead: Iterator[tuple[Arrive, Any]]
                 ) -> Generator[Any, None, None]:
        yield from map(functools.partial(self._receive_batch, epoch), ahead)
        self.epoch, self._over = epoch, True
        if self._epochs is None:
            self._state = None

    def _receive_batch(self, epoch: int | None, sent: tuple[Arrive, Any]) -> Any:
        arrive, state = sent
        batch = arrive()
        self.epoch, self._over, self._state = epoch, False, state
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


def _refuse_epochs(epochs: Any, loader: Any) -> None:
    """Raise ConfigError unless the loader can be iterated in each of these epochs."""
    if not isinstance(epochs, range) or min((*epochs[:1], *epochs[-1:]), default=0) < 0:
        raise ConfigError(f"epochs={epochs!r:.200}: expected a range from 0, such as range(3)")
    if isinstance(loader, Iterator):
        raise ConfigError(f"the loader, a {type(loader).__name__}, is an iterator, which has a "
                          f"single epoch: pass a function of the epoch that returns an iterator")


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to all parts of a loader that choose their batches or samples by it."""
    batches = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, "dataset", None), getattr(loader, "sampler", None),
             getattr(batches, "sampler", None), batches, loader]
    for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
        part.set_epoch(epoch)


def _source_of(loader: Any) -> tuple[Any, int]:
    """Return the object that saves the position in a loader, and its samples per batch.

    It is the loader itself (0 samples: it counts), or the sampler of a PyTorch DataLoader, if this
    sampler returns its state after any number of samples. Otherwise, it is None.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader, 0
    data: Any = sys.modules.get("torch.utils.data")
    # Other loaders may leave out batches, or yield them in another order.
    if (data is None or getattr(type(loader), "__iter__", None) is not data.DataLoader.__iter__
            or not getattr(loader, "in_order", True)):
        return None, 0
    sampler, samples = loader.sampler if loader.batch_sampler is None else loader.batch_sampler, 1
    if type(sampler) is data.BatchSampler:
        sampler, samples = sampler.sampler, sampler.batch_size
    state_dict = getattr(sampler, "state_dict", None)
    counts = state_dict and "seen" in inspect.signature(state_dict).parameters
    return (sampler, samples) if counts else (None, 0)


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


# Function to call before this thread forks, as `prepare_fork`; only for a BackgroundIterator.
_thread = threading.local()


@functools.cache
def _prepare_forks() -> None:
    """Replace os.fork, which multiprocessing calls, by a function that calls `prepare_fork` first.

    Functions of os.register_at_fork must not wait: other such functions hold locks meanwhile.
    """
    fork = os.fork

    def prepared_fork() -> int:
        if hasattr(_thread, "prepare_fork"):
            _thread.prepare_fork()
        return fork()

    os.fork = functools.update_wrapper(prepared_fork, fork)


class BackgroundIterator(Iterator[T], Generic[T]):
    """Items of several iterators, drawn by a thread; at most `depth` items are ready at a time.

    After the items of each iterator, it raises StopIteration, and then continues with the next
    iterator. Exceptions of an iterator are raised after the items before them. Call `close` after
    use.

    A fork inherits the locks that the program holds at that moment, such as that of PyTorch's
    random generator, and would wait for them forever. If an iterator forks, as a DataLoader does
    to start workers, the thread first waits until the program requests an item. The program then
    waits until the iterator has begun or returned an item.

    `waited` is called with the start and the end of each wait, as times of time.monotonic().
    """

    def __init__(self, iterations: Iterator[Iterator[T]], depth: int,
                 waited: Callable[[float, float], None] | None = None) -> None:
        # The first begins here: only the main thread can watch the workers of a DataLoader. The
        # inner `iter` keeps no reference to it.
        self._iterations = itertools.chain(iter([next(iterations)]), iterations)
        self._waited = waited
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        # Not a semaphore, which is Python code and acquires several locks.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        # Has an element while the program requests an item, or has left.
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Held by the thread from its wait for the program until it has forked; and whether it is.
        self._turn, self._holds = threading.Lock(), False
        _prepare_forks()
        self._stop = threading.Event()
        self._patience_s = _PATIENCE_S
        # A daemon, because the program may end while the iterator hangs.
        self._thread = threading.Thread(target=self._draw, daemon=True, name="mpiring prefetch")
        self._thread.start()
        # A thread that still runs during Python's shutdown may crash it.
        atexit.register(self.close)

    def __next__(self) -> T:
        began_s = time.monotonic()
        self._idle.put(None)
        try:
            item = self._item()
            with self._turn:
                self._idle.get()
        except BaseException:
            # After a signal, such as that of Ctrl-C, the iterator may never return.
            self._patience_s = 0.0
            raise
        if self._waited is not None:
            self._waited(began_s, time.monotonic())
        if isinstance(item, _End):
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
        self._idle.put(None)
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
        _thread.prepare_fork = self._hold_program
        try:
            for items in self._iterations:
                self._release_program()
                while self._draw_item(items):
                    pass
                # Processes that the next iterator forks must not inherit this one.
                del items
                if self._stop.is_set():
                    self._ready.put(_End(ClosedError("the iteration over these epochs has ended: "
                                                     "keep by_epoch() in a variable")))
                    break
                self._ready.put(_End())
        except BaseException as error:
            self._ready.put(_End(error))
        finally:
            self._release_program()

    def _draw_item(self, items: Iterator[T]) -> bool:
        """Draw an item when there is room for it; return False at the end."""
        self._room.get()
        if self._stop.is_set():
            return False
        try:
            # This keeps no reference to the item: its memory is freed when the user drops it.
            self._ready.put(next(items))
        except StopIteration:
            self._room.put(None)
            return False
        finally:
            self._release_program()
        return True

    def _hold_program(self) -> None:
        """Wait until the program requests an item, and keep it from returning with the item."""
        if not self._holds:
            self._turn.acquire()
            self._idle.get()
            self._holds = True

    def _release_program(self) -> None:
        if self._holds:
            self._holds = False
            self._idle.put(None)
            self._turn.release()
