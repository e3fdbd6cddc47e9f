"""Describes an operation of this rank, from its call to its end."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..operations.agreement import Call

# Reports truncate calls to this length, because a call may name all gradients of a bucket.
_WIDTH = 100
# A line without its times.
_LINE = re.compile(r"^ +\d\d:\d\d:\d\d\.\d{3} (.*): (queued for|queued|NOT COMPLETE)", re.MULTILINE)


@dataclass(slots=True, eq=False, repr=False)
class Flight:
    """An operation of this rank, from its call to its end; holds no array.

    Attributes:
        call: Description of the operation.
        sequence: Number of the operation in its communicator.
        group: Name of its communicator; see Recorder.name.
        algorithm: Algorithm of an allreduce; "" if there is no choice, or if it is not yet known.
        called_s, started_s, ended_s: Times of time.monotonic(); 0 for future events.
        exposed_s: Seconds that callers have waited for it.
        sent: List whose only number is the bytes that this rank has sent in it.
    """

    call: Call
    sequence: int
    group: str = ""
    algorithm: str = ""
    called_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    ended_s: float = 0.0
    exposed_s: float = 0.0
    sent: Sequence[int] = (0,)

    def __repr__(self) -> str:
        # Operations that ranks agreed on earlier, and queue on a GPU, have negative numbers.
        number = f"#{self.sequence}" if self.sequence >= 0 else f"#{-self.sequence} on a GPU"
        return f"{number} {self.call}"

    def line(self, now_s: float, clock_s: float) -> str:
        """Return a line about the operation.

        Args:
            now_s: Current time of time.monotonic().
            clock_s: Difference of time.time() and time.monotonic().
        """
        text = repr(self)
        text = text if len(text) <= _WIDTH else f"{text:.{_WIDTH}}…"
        about = ", ".join(filter(None, [
            text, f"{self.call.nbytes:,} bytes" * bool(self.call.nbytes), self.algorithm,
            f"among {self.group}" * bool(self.group)]))
        called_s = self.called_s + clock_s
        clock = time.strftime("%H:%M:%S", time.localtime(called_s))
        return f"{clock}.{int(called_s * 1e3) % 1000:03d} {about}: {self._progress(now_s)}"

    def _progress(self, now_s: float) -> str:
        if not self.started_s:
            return f"queued for {now_s - self.called_s:.1f} s"
        if not self.ended_s:
            return f"NOT COMPLETE after {now_s - self.started_s:.1f} s"
        return (f"queued {_ms(self.started_s - self.called_s)}, took "
                f"{_ms(self.ended_s - self.started_s)}, waited for {_ms(self.exposed_s)} ms")


def operations_in(report: str) -> list[tuple[str, str]]:
    """Return the operations in the lines of a report, and how far each is, without times."""
    return _LINE.findall(report)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
