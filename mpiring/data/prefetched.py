"""Draws batches of data in a thread, and copies them to a GPU, while earlier ones are used."""

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
from ..communicator import Communicator, refuse_other_than_communicators
from ..errors import ConfigError, MissingDependencyError
from ..gpu.arrays import gpu_named
from ..gpu.carriers import ArrayCarrier, Carrier, TensorCarrier
from ..memory.arrays import dtype_name
from ..memory.pytrees import mapped
from ..memory.tensors import is_tensor

T = TypeVar("T")
# Returns a batch, where it is to be used.
Arrive = Callable[[], Any]

_log = logging.getLogger("mpiring")

# A loader that is busy when nobody wants its batches any more is waited for so long.
_PATIENCE_S = 5.0
# CPython does not end a wait for a signal that came just before it began: the next look does.
_LOOK_S = 1.0


def prefetch(loader: Iterable[Any], device: object, *, depth: int = 2,
             comm: Communicator | None = None) -> "Prefetched":
    """Iterate over a loader's batches, each made ready while earlier ones are used.

        for images, labels in mpiring.data.prefetch(loader, "cuda"):
            ...

    A thread draws batches from the loader. For a GPU, it copies their arrays into pinned memory,
    and has the GPU fetch them on a stream of its own; for the CPU, it leaves them as they are. The
    loader is therefore `depth` batches ahead of training, or one more: what is to be saved in a
    checkpoint is `state_dict()` of what is returned, not of the loader.

    Work in Python itself, unlike NumPy's or PyTorch's, holds the interpreter's lock: where loading
    is made of it, each operation of training waits for up to 5 ms. DataLoader's workers avoid that;
    sys.setswitchinterval(0.0002) shortens it.

    On a GPU, NumPy arrays become CuPy's, and PyTorch's CPU tensors become tensors there; in C's
    order, row after row. Whatever else is in a batch stays what it is.

    Use batches on the stream that is current when they are drawn. Arrays live as long as you keep
    them; those of a batch share memory, so that one keeps the memory of all.

    Args:
        loader: Any iterable. Its batches are arrays, or nests of dicts, lists and tuples. For the
            CPU, it must not write again to those that it has yielded.
        device: "cuda" for the GPU that is current now, "cuda:1" for a certain one (also as a
            torch.device); "xpu" for tensors on one of Intel's; "cpu" for none.
        depth: How many batches are drawn ahead.
        comm: Where there is a trace (`MPIRING_TRACE`), of which communicator: the time that the
            program waits for batches is written to it.

    Returns:
        An iterable, with a length if the loader has one, and a state. Each iteration is one of the
        loader; its exceptions are raised after the batches before them. An iteration that is left
        early waits for the batch that is being loaded, but no longer than 5 s.

    Raises:
        ConfigError: There is no such device, or `comm` is no communicator.
        MissingDependencyError: There is no GPU, or no CuPy (PyTorch's tensors need none); also
            from the iteration.

    Collective: no.
    """
    whole_number("depth", depth, 1)
    if comm is not None:
        refuse_other_than_communicators(comm)
    return Prefetched(loader, _gpu_of(device), depth, comm)


class Prefetched:
    """The batches of a loader, on a device; see `prefetch`.

    Args:
        loader: Any iterable.
        gpu: Kind and index of the GPU; None for the CPU.
        depth: How many batches are drawn ahead.
        comm: Whose trace tells of waits for batches, or None.
    """

    def __init__(self, loader: Iterable[Any], gpu: tuple[str, int] | None, depth: int,
                 comm: Communicator | None = None) -> None:
        self._loader, self._gpu, self._depth = loader, gpu, depth
        self._waited = None if comm is None else comm.recorder.waited_for_data
        self._carriers: dict[type[Carrier], Carrier] = {}
        # The loader's, as of the last batch that was yielded; None where it is not ahead.
        self._state: Any = None
        # The thread of an iteration that was left.
        self._left: BackgroundIterator[tuple[Arrive, Any]] | None = None

    def __len__(self) -> int:
        return len(cast(Any, self._loader))

    def __iter__(self) -> Generator[Any, None, None]:
        """Yield batches; the thread ends with the generator, however that ends."""
        if self._left is not None:
            # The loader may not be drawn from twice at once.
            self._left.join()
        if self._has_state() and self._state is None:
            self._state = self._loader_state()
        # map keeps no reference to a batch: its memory is free once its user drops it.
        ahead = BackgroundIterator(map(self._drawn, self._loader), self._depth, self._waited)
        try:
            yield from map(self._received, ahead)
            self._state = None
        finally:
            self._left = None if ahead.close() else ahead

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch that was yielded.

        Batches that were drawn ahead do not count: they come again. Save it after training on
        that batch.

        Returns:
            A copy of what the loader's own `state_dict()` has returned.

        Raises:
            ConfigError: The loader has no such method.

        Collective: no. Blocking: no.
        """
        self._refuse_stateless()
        return copy.deepcopy(self._state) if self._state is not None else self._loader_state()

    def load_state_dict(self, state: Any) -> None:
        """Have the next iteration resume where `state_dict` was called.

        Args:
            state: Passed to the loader's own `load_state_dict()`.

        Raises:
            ConfigError: The loader has no such method.

        Collective: no, but for what the loader does.
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
        # The loader may return the same object again and again, and go on to change it.
        return copy.deepcopy(cast(Any, self._loader).state_dict())

    def _drawn(self, batch: Any) -> tuple[Arrive, Any]:
        """Send a batch; return how to receive it, and the loader's state."""
        arrive = (lambda: batch) if self._gpu is None else self._sent(batch)
        return arrive, self._loader_state() if self._has_state() else None

    def _received(self, drawn: tuple[Arrive, Any]) -> Any:
        arrive, state = drawn
        batch = arrive()
        self._state = state
        return batch

    def _sent(self, batch: Any) -> Arrive:
        """Send the arrays of a batch; return a function that returns it with their copies."""
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
        """Return the carrier to the GPU; raises MissingDependencyError, or ConfigError."""
        if carrier not in self._carriers:
            kind, index = cast(tuple[str, int], self._gpu)
            if carrier is TensorCarrier:
                self._carriers[carrier] = TensorCarrier(kind, index)
            elif kind == "cuda":
                from ..gpu import cuda
                self._carriers[carrier] = ArrayCarrier(cuda.device(index))
            else:
                raise ConfigError(
                    f"NumPy arrays, for {kind}:{index}: they become CuPy's, on one of NVIDIA's "
                    f"GPUs; have the loader yield tensors of PyTorch's")
        return self._carriers[carrier]


def _kind_of(leaf: object) -> type[Carrier] | None:
    """Return what brings a leaf of a batch to a GPU; None for what stays as it is."""
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
    """Return the GPU that this thread has in use, by PyTorch or by CuPy: both ask CUDA."""
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
    """Comes after the last item: why there are no more."""

    error: BaseException | None = None


class BackgroundIterator(Iterator[T], Generic[T]):
    """Items of an iterator, drawn by a thread; at most `depth` wait to be asked for.

    Exceptions of the iterator are raised after the items before them. To be closed.

    Args:
        items: Asked for its items in the thread only.
        depth: As above.
        waited: Is told from when to when a caller has waited for an item or the end, in times of
            time.monotonic().
    """

    def __init__(self, items: Iterator[T], depth: int,
                 waited: Callable[[float, float], None] | None = None) -> None:
        self._items, self._waited = items, waited
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._room, self._stop = threading.Semaphore(depth), threading.Event()
        self._patience_s = _PATIENCE_S
        # A daemon, because the program may end while the iterator hangs.
        self._thread = threading.Thread(target=self._draw, daemon=True, name="mpiring prefetch")
        self._thread.start()
        # A thread that runs on while Python is torn down may crash it.
        atexit.register(self.close)

    def __next__(self) -> T:
        began_s = time.monotonic()
        try:
            item = self._item()
        except BaseException:
            # A signal, as of Ctrl-C: the iterator may never return.
            self._patience_s = 0.0
            raise
        if self._waited is not None:
            self._waited(began_s, time.monotonic())
        if isinstance(item, _End):
            self._ready.put(_End())
            raise item.error or StopIteration
        self._room.release()
        return item

    def _item(self) -> T | _End:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_LOOK_S)

    def close(self) -> bool:
        """End the thread, which may be in the midst of a draw; wait some seconds for it.

        Returns:
            Whether it has ended.
        """
        atexit.unregister(self.close)
        self._stop.set()
        self._room.release()
        patience_s, self._patience_s = self._patience_s, 0.0
        # Garbage may be collected in any thread.
        if patience_s and self._thread is not threading.current_thread():
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("prefetch: the loader has not returned for %g s since the iteration "
                             "was left; its thread goes on alone, and ends with that batch",
                             patience_s)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Return when the thread has ended, after `close`.

        Blocking: yes.
        """
        self._thread.join()

    def _draw(self) -> None:
        """Draw until there are no more items, or the iteration has been left."""
        end = _End()
        try:
            while self._room.acquire() and not self._stop.is_set():
                # No reference to an item stays here: its memory is its user's.
                self._ready.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:
            end = _End(error)
        self._ready.put(end)
