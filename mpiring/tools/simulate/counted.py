"""Shows the progress of predictions, which may take minutes."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ...progress import Progress

# Interval between lines if there is no progress bar.
_LINES_S = 5.0

T = TypeVar("T")


def counted(text: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items; show on standard error how many are done."""
    with Progress(text, len(items), lines_every_s=_LINES_S) as progress:
        for item in items:
            yield item
            progress.step()
