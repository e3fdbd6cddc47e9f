"""Measures by how much a rank's clock differs from rank 0's."""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

# The fastest of so many answers counts: whatever disturbs one makes it slower.
_ROUNDS = 20


@dataclass(frozen=True)
class ClockReading:
    """What a rank's time.monotonic() shows more than rank 0's.

    Attributes:
        at_s: When it was measured, by this rank's clock.
        offset_s: The difference.
        error_s: How far that may be from the truth.
    """

    at_s: float = 0.0
    offset_s: float = 0.0
    error_s: float = 0.0


def compare_clocks(comm: Any) -> ClockReading:
    """Ask rank 0 for its time, several times; the answer that came soonest is the best.

    Args:
        comm: An MPI communicator on which nothing else is sent.

    Collective: yes. Blocking: yes.
    Source: Cristian, Distributed Computing 3, 1989.
    """
    box = np.zeros(1)
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(_ROUNDS):
                comm.Recv(box, other)
                box[0] = time.monotonic()
                comm.Send(box, other)
        return ClockReading(time.monotonic())
    best = ClockReading(error_s=math.inf)
    for _ in range(_ROUNDS):
        began = time.monotonic()
        comm.Send(box, 0)
        comm.Recv(box, 0)
        ended = time.monotonic()
        if (ended - began) / 2 < best.error_s:
            middle = (began + ended) / 2
            best = ClockReading(middle, middle - float(box[0]), (ended - began) / 2)
    return best
