"""Layout of the memory that Python and compiled code share: node memory, counter, and call.

Offsets are in words of 8 bytes (int64). All constants are numbers, because compiled code adds
offsets to addresses.
"""

from typing import Final

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

# Number of the next operation, from 0.
COUNTER_SEQUENCE: Final = 0
# 0 while the fast path is open; otherwise one bit per reason. The group is closed, an operation has
# failed, every operation must be traced, this process is a fork, or started calls must be run
# first.
COUNTER_GATE: Final = 1
GATE_CLOSED, GATE_FAILED, GATE_TRACED, GATE_FORKED, GATE_STARTED = (
    1 << bit for bit in range(5))
# Number of completed fast calls, and time (in ns) that callers spent in them.
COUNTER_CALLS: Final = 2
COUNTER_NANOSECONDS: Final = 3
# Number of times that the counter's lock is held. Compiled code does not acquire the lock, but
# begins no call while it is held.
COUNTER_HELD: Final = 4
# For each area, the identity of the call whose header this rank wrote there last; 0 if Python wrote
# the header. It is written with each header.
COUNTER_HEADERS: Final = 8
# The last fast calls: recorded call number k (COUNTER_CALLS counts them) is in entry `k % RING`.
COUNTER_RING: Final = 16
RING: Final = 1024
# An entry: identity of the call, its number, and its begin and end in ns of CLOCK_MONOTONIC.
RING_IDENTITY, RING_SEQUENCE, RING_BEGAN, RING_ENDED, RING_WORDS = range(5)
COUNTER_WORDS: Final = COUNTER_RING + RING * RING_WORDS

# A call: a series of equal operations, see protocol. Private memory. Compiled code uses the
# addresses of the counter's words, of the call itself and of the segments; Python uses objects
# instead.

# Constants. The address of the counter's words, the call's identity there (never 0), the number of
# ranks of the node, and this rank's number. The kind (below), the length of the vector, and the
# divisor of a result (1 except for a mean).
(CALL_COUNTER, CALL_IDENTITY, CALL_RANKS, CALL_RANK, CALL_KIND, CALL_LENGTH,
 CALL_DIVISOR) = range(7)
# Digest of the header, and address of its HEADER_BYTES bytes.
CALL_DIGEST, CALL_HEADER = 7, 8
# Number of checks of the flags while the rank keeps its core, then of those between which it gives
# the core away, and the number for POLL.
CALL_SPINS, CALL_YIELDS, CALL_POLLS = 9, 10, 11
# This rank's note, see collectives.shared.allreduce: the vector's window, and the offset there.
# Then the number of barriers at which the rank arrives when its vector is in its slot.
CALL_NOTE: Final = 12
CALL_BARRIERS: Final = 14
# The first and the last phase; 1 if the call is a complete operation, 0 if it is a part of one.
CALL_FIRST, CALL_LAST, CALL_IS_OPERATION = 15, 16, 17
# In elements: the ranges to write and to reduce.
CALL_WRITE_START, CALL_WRITE_LENGTH, CALL_REDUCE_START, CALL_REDUCE_LENGTH = range(18, 22)
# In elements: the length of a slice of a piece (PIECES) or of a piece (ROWS), and the length of
# half a slot.
CALL_WIDTH, CALL_HALF = 22, 23
# Variable: the address of the vector, for compiled code.
CALL_VECTOR: Final = 24
# Progress: the stage, the phase, the operation's number, the offset of its area, and the value of
# this rank's flag.
CALL_STAGE, CALL_PHASE, CALL_SEQUENCE, CALL_AREA, CALL_COUNT = range(25, 30)
# Time when the call began, in ns. The run that completes the call records it in the counter; 0 if
# the engine records it instead.
CALL_BEGAN: Final = 30
# Number of the clock; for compiled code, the address of the next two words, which receive seconds
# and nanoseconds. Then the address of the call's words.
CALL_CLOCK: Final = 31
CALL_ADDRESS: Final = 34
# Number of bytes of an element, for compiled code that copies.
CALL_ITEMSIZE: Final = 35
# For each rank of the node, the address of its segment of node memory. Then the addresses of the
# vectors to reduce. Then, for each rank, two words. For WINDOWS, they are the known position of the
# rank's vector (its note). Otherwise they are a range (start, length) of this rank's vector, which
# is read from the other rank's slot or, for ROWS, written for the other rank.
CALL_BASES: Final = 36

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


def call_words(ranks: int) -> int:
    """Return the number of words of a call."""
    return CALL_BASES + 4 * ranks
