"""Keeps count of the communicators that are open, and of the lines that made them."""

import sys
import warnings
from collections import Counter

# A report names so many of the lines that made dropped communicators.
_LINES = 3

_open: "set[Opening]" = set()


class Opening:
    """An open communicator: one of those that `census` counts, from now on until `close`."""

    def __init__(self) -> None:
        self._line = _users_line()
        self._dropped = False
        _open.add(self)

    def close(self) -> None:
        """Count it no more."""
        _open.discard(self)

    def drop(self, what: str) -> None:
        """Warn that nobody can close it any more; for the garbage collector: takes no lock.

        Args:
            what: Names it.
        """
        self._dropped = True
        warnings.warn_explicit(
            f"{what}, made in this line, was dropped without close(): a communicator of MPI's, "
            f"and some memory, are kept until the program ends; call close() on all its ranks, "
            f"or use `with`", ResourceWarning, *self._line)

    @staticmethod
    def census() -> str:
        """Return how many are open in this process, and which lines made those dropped."""
        dropped = [one._line for one in list(_open) if one._dropped]
        text = f"{len(_open)} communicators of mpiring's are open in this process"
        if not dropped:
            return text
        lines = ", ".join(f"{file}:{line} ({count})" for (file, line), count in
                          Counter(dropped).most_common(_LINES))
        return f"{text}, {len(dropped)} of them dropped without close(), made at {lines}"


def _users_line() -> tuple[str, int]:
    """Return the file and line that called this package."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
