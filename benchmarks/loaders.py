"""Makes loaders whose batches take a wanted time, by work of a kind that real ones do."""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpiring.tools.bench import timing

# A batch's work is so many pieces, of about a millisecond or less: sizes that loaders meet.
_BYTES = 1 << 18
_TO_SORT = 1 << 16
_TO_ADD = 20_000
_TRIALS = 20


def _unpacks() -> timing.Action:
    """Decompress what has as many kinds of bytes as text; without the GIL."""
    text = np.random.default_rng(0).integers(0, 64, _BYTES, dtype=np.uint8)
    packed = zlib.compress(text.tobytes())
    return lambda: zlib.decompress(packed)


def _sorts() -> timing.Action:
    """Sort with NumPy; without the GIL."""
    values = np.random.default_rng(0).random(_TO_SORT, np.float32)
    return lambda: np.sort(values)


_PIECES: dict[str, Callable[[], timing.Action]] = {
    "zlib": _unpacks, "numpy": _sorts, "python": lambda: lambda: sum(iter(range(_TO_ADD)))}
# "sleep" waits, as for a disk; "python" holds the GIL.
WORK = ("sleep", *_PIECES)


def work_for(kind: str, seconds: float) -> timing.Action:
    """Return a function that takes so long on a core of its own.

    Args:
        kind: One of WORK.
    """
    if kind == "sleep":
        return lambda: time.sleep(seconds)
    piece = _PIECES[kind]()
    pieces = round(seconds / timing.median([timing.by_clock(piece) for _ in range(_TRIALS)]))

    def work() -> None:
        for _ in range(pieces):
            piece()

    return work


def worked_for(batches: Iterable[Any], work: timing.Action) -> Iterator[Any]:
    """Yield batches, each after some work."""
    for batch in batches:
        work()
        yield batch
