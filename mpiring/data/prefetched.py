"""Copies batches of data to a GPU while earlier ones are used."""

import functools
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import numpy as np

from ..arguments import whole_number
from ..errors import ConfigError, MissingDependencyError
from ..gpu.arrays import gpu_index
from ..gpu.carriers import ArrayCarrier, Carrier, TensorCarrier, torch_cuda
from ..memory.arrays import dtype_name
from ..memory.nests import mapped
from ..memory.tensors import is_tensor


def prefetch(loader: Iterable[Any], device: object, *, depth: int = 2) -> "Prefetched":
    """Iterate over a loader's batches on a GPU, each copied there while earlier ones are used.

        for images, labels in mpiring.data.prefetch(loader, "cuda"):
            ...

    A thread draws batches from the loader, copies their arrays into pinned memory, and has the
    GPU fetch them on a stream of its own. The loader is therefore `depth` batches ahead of
    training (`DistributedSampler.state_dict` takes `seen`).

    NumPy arrays become CuPy's, and PyTorch's CPU tensors become CUDA tensors; in C's order, row
    after row. Whatever else is in a batch stays what it is.

    Use batches on the stream that is current when they are drawn. Arrays live as long as you keep
    them; those of a batch share memory, so that one keeps the memory of all.

    Args:
        loader: Any iterable. Its batches are arrays, or nests of dicts, lists and tuples.
        device: "cuda" for the GPU that is current now, "cuda:1" for a certain one (also as a
            torch.device); "cpu" leaves batches as they are, and starts no thread.
        depth: How many batches are fetched ahead.

    Returns:
        An iterable, with a length if the loader has one. Each iteration is one of the loader;
        its exceptions are raised after the batches before them.

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
        self._carriers: dict[type[Carrier], Carrier] = {}

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
                # No reference to a batch stays here: its memory is free once its user drops it.
                yield arrive()
                del arrive
        finally:
            stop.set()
            room.release()
            thread.join()

    def _load(self, ready: "queue.SimpleQueue[Callable[[], Any] | None]",
              room: threading.Semaphore, stop: threading.Event) -> None:
        """Send batches until the loader is empty, or the iteration has ended."""
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

    def _carrier_of(self, kind: type[Carrier]) -> Carrier:
        if kind not in self._carriers:
            self._carriers[kind] = _carrier(kind, cast(int, self._index))
        return self._carriers[kind]


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


def _carrier(kind: type[Carrier], index: int) -> Carrier:
    """Return a carrier to a GPU; raises MissingDependencyError."""
    if kind is TensorCarrier:
        return TensorCarrier(index)
    from ..gpu import cuda
    return ArrayCarrier(cuda.device(index))


def _index_of(device: object) -> int | None:
    """Return the index of a GPU; None for the CPU."""
    if str(device).partition(":")[0] == "cpu":
        return None
    index = gpu_index(device)
    return _current_gpu() if index is None else index


def _current_gpu() -> int:
    """Return the GPU that this thread has in use, by PyTorch or by CuPy: both ask CUDA."""
    problem = None
    if "torch" in sys.modules:
        try:
            return int(torch_cuda().current_device())
        except MissingDependencyError as error:
            problem = error
    from ..gpu import cuda
    try:
        return int(cuda.cupy().cuda.runtime.getDevice())
    except MissingDependencyError as error:
        raise problem or error


def _raise(error: BaseException) -> None:
    raise error
