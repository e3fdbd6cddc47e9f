"""Layout of the memory that Python and compiled code share: node memory, counter, and call.

Offsets are in words of 8 bytes (int64). Python and compiled code use the same names for the words
of the counter and of a call. An address in compiled code is an object in Python.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Final

from .base import HEADER_BYTES, LANES

# Node memory: a segment of AREAS areas for each rank.

AREAS: Final = 4
SLOT_BYTES: Final = 1 << 20
NOTE_WORDS: Final = 8
# A lane has a flag on its own cache line, and two notes that are used alternately: barrier number c
# of an operation writes note `c & 1`.
NOTE_WORD: Final = 8
LANE_WORDS: Final = NOTE_WORD + 2 * NOTE_WORDS
# An area begins with the flag of lane 0. The next two words are on the same cache line.
# Digest of the header of the rank's call.
DIGEST_WORD: Final = 1
# 1 if compiled code will combine the slots, 0 if NumPy will. Their results may differ in the bits
# of a NaN, so all ranks use NumPy unless all can use compiled code. It is written with each digest.
FORM_WORD: Final = 2
HEADER_WORD: Final = LANES * LANE_WORDS
SLOT_WORD: Final = -(-(HEADER_WORD * 8 + HEADER_BYTES) // 64) * 8
AREA_WORDS: Final = SLOT_WORD + SLOT_BYTES // 8
# After the areas, once the rank has failed: the time in ns of CLOCK_MONOTONIC, the kind of its
# error, and 1 when it has reported the error. See launch.ending.
REPORT_FAILED, REPORT_KIND, REPORT_PRINTED = range(AREAS * AREA_WORDS, AREAS * AREA_WORDS + 3)
NODE_MEMORY_BYTES: Final = (AREAS * AREA_WORDS + 8) * 8
# A flag counts the barriers of one operation in its low bits. The high bits are the operation's
# number plus 1.
COUNT_BITS: Final = 24
ENDED: Final = (1 << COUNT_BITS) - 1

# The counter of a group: state of its operations on this rank. Private memory.

COUNTER_WORDS: Final = (
    # Number of the next operation, from 0.
    "sequence",
    # 0 while the fast path is open; otherwise one bit per reason (GATE_CLOSED, …).
    "gate",
    # Number of completed fast calls, and time (in ns) that callers spent in them.
    "fast_calls", "fast_ns",
    # Number of times that the counter's lock is held. Compiled code does not acquire the lock, but
    # begins no call while it is held.
    "held")
COUNTER_ARRAYS: Final = (
    # For each area, the identity of the call whose header this rank wrote there last; 0 if Python
    # wrote the header. It is written with each header.
    "headers",
    # The last fast calls: call number k (`fast_calls` counts them) has entry `k % RING`. The words
    # of an entry are the call's identity, its number, and its begin and end in ns of
    # CLOCK_MONOTONIC.
    "ring")
RING: Final = 1024
ENTRY_WORDS: Final = 4
# Reasons for a closed gate: the group is closed, an operation has failed, every operation must be
# traced, this process is a fork, or started calls must be run first.
GATE_CLOSED, GATE_FAILED, GATE_TRACED, GATE_FORKED, GATE_STARTED = (
    1 << bit for bit in range(5))

# A call: a series of equal operations, see protocol. Private memory: variables, constants, and the
# addresses of arrays.

CALL_VARIABLES: Final = (
    # Progress: the stage, the phase, the operation's number, the offset of its area, and the value
    # of this rank's flag.
    "stage", "phase", "sequence", "area", "count",
    # Time when the call began, in ns. The run that completes the call records it in the counter; 0
    # if the engine records it instead.
    "began",
    # The call's identity in the counter (never 0), and the digest of its header. They change only
    # between runs.
    "identity", "digest",
    # The addresses of the header's HEADER_BYTES bytes and of the vector, for compiled code.
    "header_address", "vector")
CALL_CONSTANTS: Final = (
    # The counter of the group.
    "counter",
    # The number of ranks of the node, and this rank's number.
    "ranks", "rank",
    # The kind (below), the length of the vector, and the number of bytes of an element. The divisor
    # of a result is 1 except for a mean.
    "kind", "length", "itemsize", "divisor",
    # Number of checks of the flags while the rank keeps its core, then of those between which it
    # gives the core away, and the number for POLL.
    "spins", "yields", "polls",
    # This rank's note, see collectives.shared.allreduce: the vector's window (0 if there is no
    # note), and the offset there. Then the number of barriers at which the rank arrives when its
    # vector is in its slot.
    "window", "offset", "barriers",
    # The first and the last phase; 1 if the call is a complete operation, 0 if it is a part of one.
    "first", "last", "is_operation",
    # In elements: the ranges to write and to reduce.
    "write_start", "write_length", "reduce_start", "reduce_length",
    # In elements: the length of a slice of a piece (PIECES) or of a piece (ROWS), and the length of
    # half a slot.
    "width", "half")
# Arrays with a number for each rank of the node.
CALL_ARRAYS: Final = (
    # The address of its segment of node memory, and of a vector to reduce, for compiled code.
    "segments", "vectors",
    # For WINDOWS, the known position of its vector (its note).
    "windows", "offsets",
    # A range of this rank's vector, which is read from the other rank's slot or, for ROWS, written
    # for the other rank.
    "starts", "lengths")

# Note of a vector that is in no window.
NOWHERE: Final = (-1, 0)
# Note of a vector in its rank's staging slot, because other ranks cannot wait for that rank.
IN_SLOT: Final = (-2, 0)

# Kinds. READS: reads parts of the slots. SLOTS: reduces all slots. WINDOWS: reduces vectors in
# windows in place. PIECES: reduces private vectors piece by piece. ROWS: reduces this rank's part
# of private vectors piece by piece.
READS, SLOTS, WINDOWS, PIECES, ROWS = range(5)

# Stages: not begun, waiting for a free area, about to write, and waiting for the other ranks.
IDLE, BEGUN, WRITING, WAITING = range(4)

# Modes of a run. BEGIN: from IDLE, as far as possible. PUBLISH: from IDLE, until this rank's data
# is published. RESUME: from the current stage, giving the core away. POLL: from the current stage,
# with few checks of the flags. Add HELD to BEGIN or PUBLISH while you hold the counter's lock.
BEGIN, PUBLISH, RESUME, POLL, HELD = range(5)

# Status of a run. DONE: complete, and IDLE again (published, in a run with PUBLISH). LATE: another
# rank is late, so run it again later. GATED: not begun, because it was not IDLE or the gate is
# closed, so use the ordinary path. DISAGREE: published, but another rank made a different call.
# FALLBACK: published, and all ranks have arrived and agree, but Python must reduce (compiled code
# only), or a vector is not where the call expects it.
DONE, LATE, GATED, DISAGREE, FALLBACK = range(5)


def fields(variables: Sequence[str], constants: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a ctypes structure: variables by name, and an array of constants."""
    return [*((name, ctypes.c_int64) for name in variables),
            ("constants", ctypes.c_int64 * len(constants))]


class Counter(ctypes.Structure):
    """The memory of a counter, with the names of COUNTER_WORDS and COUNTER_ARRAYS."""

    _fields_ = fields(COUNTER_WORDS, COUNTER_ARRAYS)
    __slots__ = *COUNTER_ARRAYS, "__weakref__"
    # Otherwise, structures are not hashable.
    __hash__ = object.__hash__

    def __init__(self) -> None:
        arrays = [array("q", bytes(8 * words)) for words in (AREAS, RING * ENTRY_WORDS)]
        self.headers, self.ring = [memoryview(words) for words in arrays]
        self.constants[:] = [words.buffer_info()[0] for words in arrays]
