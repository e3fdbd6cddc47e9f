"""The collective algorithms: generators that run on any transport.

All ranks call an algorithm, which does not block. A vector `x` has shape (n,) and is contiguous.
The slice of rank r is `x[bounds[r]:bounds[r + 1]]`, with `bounds` from 0 to n. The `chunks` are
contiguous vectors of one dtype, one per rank. Their lengths, and those of pieces, are equal on all
ranks.
"""

from . import native, ring
from .operation import Tuning
