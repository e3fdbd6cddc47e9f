"""Draws from an iterator in a thread, ahead of whoever uses what is drawn."""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("mpiring")

# A loader that is busy when nobody wants its batches any more is waited for so long.
_PATIENCE_S = 5.0
# CPython does not end a wait for a signal that came just before it began: the next look does.
_LOOK_S = 1.0


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
