"""Where what Python and compiled code share lies: node memory, a Ledger's words, a Round's words.

Offsets are in words of 8 bytes (int64). Everything here is a number: a compiled function takes
addresses and adds offsets to them.

A round is one operation in which all ranks of a node meet in its memory. Operation s uses area
`s % AREAS` of every rank's segment, in stages, each of which may be run by another form (Python's
or a compiled one), in another thread:

1. Number: take LEDGER_SEQUENCE, and add 1 to it.
2. Wait until every rank's flag in the area, one's own among them, is at least
   `(s + 1 - AREAS) << COUNT_BITS | ENDED` (from operation AREAS on).
3. Lay one's part of the vector into one's own slot, where it lies in the vector; write the digest
   beside the flag, and the header unless LEDGER_WRITTEN says that it is there; publish the flag
   `(s + 1) << COUNT_BITS | 1`.
4. Wait until all others' flags are at least that; compare their digests.
5. Combine all slots, in rank order, into the vector, or take the others' parts out of them; see
   `moves`.
6. Publish the flag `(s + 1) << COUNT_BITS | ENDED`.

Publishing stores with release, waiting loads with acquire. Each rank writes to its own segment
only. Vectors in windows, of any length, are combined in place: 3 lays down a note of where the
vector is, as `collectives.shared.allreduce` does, 4 compares all notes with what is known, 5
combines this rank's slice of all windows, publishes `(s + 1) << COUNT_BITS | 2`, and waits for the
others' before 6. A rank that starts such an operation, and may not come back soon to combine a
slice, lays its vector into its slot, notes that, and publishes ROUND_BARRIERS barriers at once:
then all others lay theirs down, too.
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
# 1 when it has reported that. See launch.first_report.
REPORT_FAILED, REPORT_KIND, REPORT_PRINTED = range(AREAS * AREA_WORDS, AREAS * AREA_WORDS + 3)
NODE_MEMORY_BYTES: Final = (AREAS * AREA_WORDS + 8) * 8
# A flag counts the barriers of one operation in its low bits; above is the operation's number,
# plus 1.
COUNT_BITS: Final = 24
ENDED: Final = (1 << COUNT_BITS) - 1

# A Ledger: what the operations of one group have in common on this rank. Private memory.

# The number of the next operation, from 0.
LEDGER_SEQUENCE: Final = 0
# 0 while rounds may begin; else bits that say why not: the group is closed; an operation has
# failed; every operation is to be traced; this process is a fork; rounds were started that are to
# be looked at first.
LEDGER_GATE: Final = 1
GATE_CLOSED, GATE_FAILED, GATE_TRACED, GATE_FORKED, GATE_STARTED = (
    1 << bit for bit in range(5))
# How many rounds were complete and noted, and for how long (in ns) callers were in them.
LEDGER_ROUNDS: Final = 2
LEDGER_NANOSECONDS: Final = 3
# Per area: the identity of the round whose header this rank wrote there last; 0 if an operation
# that was no round did. Whoever writes a header, writes this.
LEDGER_WRITTEN: Final = 8
# The last rounds: number k of those noted (LEDGER_ROUNDS counts them) in entry `k % RING`.
LEDGER_RING: Final = 16
RING: Final = 1024
# An entry: the round's identity, its number, and when it began and ended in ns of CLOCK_MONOTONIC.
RING_IDENTITY, RING_SEQUENCE, RING_BEGAN, RING_ENDED, RING_WORDS = range(5)
LEDGER_WORDS: Final = LEDGER_RING + RING * RING_WORDS

# A Round: one operation after another, all by the same call. Private memory.

# Made once. The address of the ledger's words.
ROUND_LEDGER: Final = 0
# What stands for its call, and header, in the ledger; never 0.
ROUND_IDENTITY: Final = 1
# How many ranks the node has, and which of them this one is.
ROUND_RANKS: Final = 2
ROUND_RANK: Final = 3
# How many elements are combined, and how many bytes are laid down.
ROUND_LENGTH: Final = 4
ROUND_NBYTES: Final = 5
# 1 where nothing is combined, but taken; what a result is divided by (1 but for a mean).
ROUND_TAKES: Final = 6
ROUND_DIVISOR: Final = 7
# The header's digest, and the address of its HEADER_BYTES bytes.
ROUND_DIGEST: Final = 8
ROUND_HEADER: Final = 9
# Tries of BEGIN and PUBLISH at each meeting; tries of GO_ON, which give the core away after each.
ROUND_SPINS: Final = 10
ROUND_YIELDS: Final = 11
# Changes. The address of the vector: compiled code finds it here at every stage.
ROUND_VECTOR: Final = 12
# How far it is, see below; the operation's number from stage BEGUN on.
ROUND_STAGE: Final = 13
ROUND_SEQUENCE: Final = 14
# When it began, in ns. Who completes a round notes it in the ledger (LEDGER_ROUNDS,
# LEDGER_NANOSECONDS, RING) unless this is 0: the engine then keeps its record.
ROUND_BEGAN: Final = 15
# Two words for the clock of compiled code: seconds, nanoseconds.
ROUND_CLOCK: Final = 16
# 1 for a round in place.
ROUND_IN_PLACE: Final = 18
# What this rank's note says, see collectives.shared.allreduce: the window of the vector, and its
# offset there.
ROUND_NOTE: Final = 19
# How many barriers it has come to when its vector is published.
ROUND_BARRIERS: Final = 21
# Where in the vector, in bytes, what is combined begins, and what is laid down.
ROUND_COMBINES: Final = 22
ROUND_LAYS: Final = 23
# Per rank of the node, the address of its segment of node memory; behind these, of a round in
# place, the addresses of all ranks' vectors in windows, and the notes (two words each) that say so;
# of one that takes, where in the vector what is taken begins, and how many bytes that are.
ROUND_BASES: Final = 24

# Stages. COMBINED is for a round in place, which waits a second time.
NOTHING, BEGUN, PUBLISHED, COMBINED = range(4)

# How to run a round; compiled code is given the sum of this and the address of the words. BEGIN:
# from NOTHING, as far as it goes. PUBLISH: from NOTHING, until it is PUBLISHED. GO_ON: from where
# it is, giving the core away. LOOK: from where it is, with a single try at each meeting.
BEGIN, PUBLISH, GO_ON, LOOK = range(4)

# What `run` returns. DONE: complete, and the stage is NOTHING again (with PUBLISH: it is
# published). LATE: another rank is; go on from the stage. GATED: not begun, the stage was not
# NOTHING or the gate is closed: take the ordinary path. DISAGREE: published, and another rank's
# call is another one. OTHERWISE (compiled code only): published, all have come and agree, but
# Python has to combine; or, in place, the vectors are not where they were: the rest is a schedule's
# if they do not all lie in one window.
DONE, LATE, GATED, DISAGREE, OTHERWISE = range(5)


def round_words(ranks: int) -> int:
    """Return how many words a Round has."""
    return ROUND_BASES + 4 * ranks
