"""Lets one rank of a node report in full an error that several ranks raise."""

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from ..transport.layout import REPORT_FAILED, REPORT_KIND, REPORT_PRINTED

# So much later than the first rank the others may fail, and still find that it is the first.
_TOGETHER_S = 0.05
# How long the others give it to print, before they do.
_PRINT_S = 5.0
_PAUSE_S = 0.01

# Per rank, numbers that can be set.
Words = Sequence[Any]


class FirstReport:
    """The report of the first rank of a node that fails, told to the others without messages.

    Args:
        words: Returns the node memory's words per rank of the node; None once it is given back.
        rank: This rank among them.
    """

    def __init__(self, words: Callable[[], Words | None], rank: int) -> None:
        self._words, self._rank = words, rank

    def is_due(self, error: BaseException) -> bool:
        """Return whether this rank is to report an error in full.

        If another rank has failed before with such an error, return False once it has reported.

        Collective: no. Blocking: for 0.05 s, or 5 s at most.
        """
        words = self._words()
        if words is None:
            return True
        kind = zlib.crc32(type(error).__qualname__.encode())
        words[self._rank][REPORT_KIND] = kind
        words[self._rank][REPORT_FAILED] = time.monotonic_ns()
        time.sleep(_TOGETHER_S)
        _, first = min((its[REPORT_FAILED], rank) for rank, its in enumerate(words)
                       if its[REPORT_FAILED] and its[REPORT_KIND] == kind)
        deadline = time.monotonic() + _PRINT_S
        while first != self._rank and not words[first][REPORT_PRINTED]:
            if time.monotonic() > deadline:
                # It has been killed meanwhile: no error may go without a report.
                return True
            time.sleep(_PAUSE_S)
        return first == self._rank

    def printed(self) -> None:
        """Tell the others that this rank has reported."""
        words = self._words()
        if words is not None:
            words[self._rank][REPORT_PRINTED] = 1
