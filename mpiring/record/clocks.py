"""Measures the offset of a rank's clock from rank 0's."""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

# The fastest of this many answers counts: disturbances only make them slower.
_ROUNDS = 20


@dataclass(frozen=True)
class ClockReading:
    """Offset of a rank's time.monotonic() from rank 0's.

    Attributes:
        at_s: When it was measured, by this rank's clock.
        offset_s: This rank's time minus rank 0's.
        error_s: The most by which `offset_s` may be wrong.
    """

    at_s: float = 0.0
    offset_s: float = 0.0
    error_s: float = 0.0


def compare_clocks(comm: Any) -> ClockReading:
    """Return the offset from rank 0's clock, by the fastest of several questions and answers.

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
