"""Where what Python and compiled code share lies: node memory, the counter of a group, a call.

Offsets are in words of 8 bytes (int64). Everything here is a number: a compiled function takes
addresses and adds offsets to them.
"""

from typing import Final

from .base import HEADER_BYTES, LANES

# Node memory: per rank a segment of AREAS areas.

AREAS: Final = 4
SLOT_BYTES: Final = 512 << 10
NOTE_WORDS: Final = 8
# Of a lane: its flag on a cache line of its own, and two notes, used in turn: barrier number c of
# an operation leaves its note in the one of parity `c & 1`.
NOTE_WORD: Final = 8
LANE_WORDS: Final = NOTE_WORD + 2 * NOTE_WORDS
# An area begins with the flag of lane 0; beside it, in the same cache line:
DIGEST_WORD: Final = 1
# 1 if compiled code will combine the slots, 0 if NumPy will: they may differ in the bits of a NaN,
# so that all ranks take NumPy unless all can do without. Whoever writes a digest, writes this.
FORM_WORD: Final = 2
HEADER_WORD: Final = LANES * LANE_WORDS
SLOT_WORD: Final = -(-(HEADER_WORD * 8 + HEADER_BYTES) // 64) * 8
AREA_WORDS: Final = SLOT_WORD + SLOT_BYTES // 8
# Behind the areas, once the rank has failed: when, in ns of CLOCK_MONOTONIC; the kind of its error;
# 1 when it has reported that. See launch.ending.
REPORT_FAILED, REPORT_KIND, REPORT_PRINTED = range(AREAS * AREA_WORDS, AREAS * AREA_WORDS + 3)
NODE_MEMORY_BYTES: Final = (AREAS * AREA_WORDS + 8) * 8
# A flag counts the barriers of one operation in its low bits; above is the operation's number,
# plus 1.
COUNT_BITS: Final = 24
ENDED: Final = (1 << COUNT_BITS) - 1

# The counter of a group: what its operations have in common on this rank. Private memory.

# The number of the next operation, from 0.
COUNTER_SEQUENCE: Final = 0
# 0 while the fast path is open; else bits that say why not: the group is closed; an operation has
# failed; every operation is to be traced; this process is a fork; calls were started that are to be
# looked at first.
COUNTER_GATE: Final = 1
GATE_CLOSED, GATE_FAILED, GATE_TRACED, GATE_FORKED, GATE_STARTED = (
    1 << bit for bit in range(5))
# How many fast calls were complete and noted, and for how long (in ns) callers were in them.
COUNTER_CALLS: Final = 2
COUNTER_NANOSECONDS: Final = 3
# How often the counter's lock is held: compiled code, which does not take it, then begins nothing.
COUNTER_HELD: Final = 4
# Per area: the identity of the call whose header this rank wrote there last; 0 if that was written
# by Python. Whoever writes a header, writes this.
COUNTER_WRITTEN: Final = 8
# The last fast calls: number k of those noted (COUNTER_CALLS counts them) in entry `k % RING`.
COUNTER_RING: Final = 16
RING: Final = 1024
# An entry: the call's identity, its number, and when it began and ended in ns of CLOCK_MONOTONIC.
RING_IDENTITY, RING_SEQUENCE, RING_BEGAN, RING_ENDED, RING_WORDS = range(5)
COUNTER_WORDS: Final = COUNTER_RING + RING * RING_WORDS

# A call: one operation after another, all of them the same; see protocol. Private memory. In Python
# objects stand where compiled code has addresses: the counter's words, the call itself, segments.

# Made once: the address of the counter's words; what stands for the call there, never 0; how many
# ranks the node has, and which of them this one is; what moves (below); the length of the vector;
# what a result is divided by (1 but for a mean).
(CALL_COUNTER, CALL_IDENTITY, CALL_RANKS, CALL_RANK, CALL_KIND, CALL_LENGTH,
 CALL_DIVISOR) = range(7)
# The header's digest, and the address of its HEADER_BYTES bytes.
CALL_DIGEST, CALL_HEADER = 7, 8
# Looks at a meeting: keeping the core; then giving it away; and of LOOK.
CALL_SPINS, CALL_YIELDS, CALL_LOOKS = 9, 10, 11
# What this rank's note says, see collectives.shared.allreduce: the window of the vector, and its
# offset there; and at how many barriers the rank arrives when its vector is laid down.
CALL_NOTE: Final = 12
CALL_BARRIERS: Final = 14
# The first and the last phase; 1 if the call is a whole operation, 0 if it is a part of one.
CALL_FIRST, CALL_LAST, CALL_WHOLE = 15, 16, 17
# In elements: where what is written begins, and how long it is; what is reduced; of PIECES, the
# length of a slice of a piece, and half of a slot.
CALL_WRITES, CALL_WRITTEN, CALL_REDUCES, CALL_REDUCED, CALL_WIDTH, CALL_HALF = range(18, 24)
# Changes. The address of the vector, for compiled code.
CALL_VECTOR: Final = 24
# How far it is: the stage, the phase, the operation's number, where its area begins, and what this
# rank's flag says.
CALL_STAGE, CALL_PHASE, CALL_SEQUENCE, CALL_AREA, CALL_COUNT = range(25, 30)
# When it began, in ns. Who completes a call notes it in the counter unless this is 0: the engine
# then keeps its record.
CALL_BEGAN: Final = 30
# The clock: its number; of compiled code, the address of the two words behind, seconds and
# nanoseconds. Where the call's words are.
CALL_CLOCK: Final = 31
CALL_ADDRESS: Final = 34
# How many bytes an element has, for compiled code that copies.
CALL_ITEMSIZE: Final = 35
# Per rank of the node, the address of its segment of node memory; then the addresses of the vectors
# that are reduced; then two words: where the rank's vector is known to be (its note), or what is
# read from its slot (start, length).
CALL_BASES: Final = 36

# What moves: parts of the slots are read; all slots are reduced; all windows, in place; or all
# private vectors, piece by piece.
READS, SLOTS, WINDOWS, PIECES = range(4)

# Stages: not begun; waiting until the area is free; about to write; waiting for the others.
IDLE, BEGUN, WRITING, MEETING = range(4)

# How to run a call. BEGIN: from IDLE, as far as it goes. PUBLISH: from IDLE, until what this rank
# writes is published. GO_ON: from where it is, giving the core away. LOOK: from where it is, with
# few looks at each meeting. HELD is added to BEGIN or PUBLISH by who holds the counter's lock.
BEGIN, PUBLISH, GO_ON, LOOK, HELD = range(5)

# What running it returns. DONE: complete, and IDLE again (with PUBLISH: it is published). LATE:
# another rank is; go on later. GATED: not begun, it was not IDLE or the gate is closed: take the
# ordinary path. DISAGREE: published, and another rank's call is another one. OTHERWISE: published,
# all have come and agree, but Python has to reduce (compiled code only); or, in WINDOWS, the
# vectors are not where they were.
DONE, LATE, GATED, DISAGREE, OTHERWISE = range(5)


def call_words(ranks: int) -> int:
    """Return how many words a call has."""
    return CALL_BASES + 4 * ranks
