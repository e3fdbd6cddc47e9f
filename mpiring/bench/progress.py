"""Shows how far a benchmark is, on a terminal; with tqdm, where that is installed."""

import sys
from typing import Any


class Progress:
    """A bar on standard error, above which lines can be printed.

    Args:
        text: What is going on.
        total: How many steps it has.
        shown: False on ranks that have nothing to show.
    """

    def __init__(self, text: str, total: int, *, shown: bool = True) -> None:
        self._shown = shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=text, leave=False)

    def say(self, line: str) -> None:
        """Print a line on standard output."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        elif self._shown:
            print(line, flush=True)

    def step(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
