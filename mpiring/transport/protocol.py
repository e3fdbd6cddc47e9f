"""The protocol of the ranks of a node in shared memory: write, synchronize, reduce or read, leave.

The protocol is written once. `protocol` is given a dialect: functions that load, store, copy and
reduce. One dialect uses Python and NumPy (`node_call`), the other one uses numba's intrinsics
(`compiled`). Tests run the Python dialect on simulated memory that acts as an adversary. A call is
an array of words (see `layout`), so that one dialect can continue where the other one has stopped.

Operation s uses area `s % AREAS` of every rank's segment, once every rank's flag there is at least
`(s + 1 - AREAS) << COUNT_BITS | ENDED`. Then the operation runs in phases. In each phase, a rank
writes to its own segment, and publishes its flag `(s + 1) << COUNT_BITS | c` for its barrier number
c. It waits until all flags have reached this value, and then sees the data that the other ranks
have written. After the last phase it publishes ENDED, because it no longer reads other segments.
Publishing stores with release semantics; waiting loads with acquire semantics. A rank writes to
another rank's segment only in PIECES and ROWS and, between two ranks, in READS and SLOTS.

With the first flag, a rank publishes the digest of its call, and the header. A rank compares all
digests before it uses any data. The phases are:

READS   0: write a part of the vector, then read the other ranks' parts.
SLOTS   0: write a part of the vector, then reduce all ranks' slots, in rank order.
WINDOWS 0: write a note with the position of the vector, then compare all notes with the known ones.
        1: reduce this rank's slice of all vectors, and store it into all of them.
PIECES  j: write piece j except this rank's slice, and reduce this slice of piece j - 1 into all
        slots. Then read the other results from this rank's slot. The first piece is piece 1, and
        pieces use the halves of the slots alternately. In phase 0, write a note that the vector is
        in no window.
ROWS    j: write piece j of each other rank's part, and reduce this rank's piece j - 1 from all
        slots and the vector. Pieces use the halves of the slots alternately.

In PIECES, results overwrite the contributions from which they were reduced. So a cache line moves
from the owner of a slot to the rank that reduces it, and back; no third rank keeps a copy. If each
rank stored its results in its own slot, 1 MiB took three times as long (measured on two cores). For
the same reason, ROWS also reduces into the slots. Between two ranks, a rank that has read a part of
a slot that the other rank does not read writes this part again. Otherwise both ranks would keep a
copy, and 64 KiB took up to three times as long.

In an allreduce in windows, a rank that may return late for phase 1 writes its vector to its slot.
Its note says so, and it arrives at three barriers at once. All other ranks then also write their
vectors to their slots.
"""

from collections.abc import Callable
from typing import Any

from .layout import (
    AREAS, AREA_WORDS, BEGUN, CALL_AREA, CALL_BARRIERS, CALL_BASES, CALL_BEGAN, CALL_CLOCK,
    CALL_COUNT, CALL_DIGEST, CALL_FIRST, CALL_HALF, CALL_IDENTITY, CALL_IS_OPERATION, CALL_KIND,
    CALL_LAST, CALL_LENGTH, CALL_NOTE, CALL_PHASE, CALL_POLLS, CALL_RANK, CALL_RANKS,
    CALL_REDUCE_LENGTH, CALL_REDUCE_START, CALL_SEQUENCE, CALL_SPINS, CALL_STAGE, CALL_WIDTH,
    CALL_WRITE_LENGTH, CALL_WRITE_START, CALL_YIELDS, COUNTER_GATE, COUNTER_HEADERS,
    COUNTER_HELD, COUNTER_RING, COUNTER_SEQUENCE, COUNT_BITS, DIGEST_WORD, DISAGREE, DONE, ENDED,
    FALLBACK, FORM_WORD, GATED, HELD, IDLE, IN_SLOT, LATE, NOTE_WORD, NOTE_WORDS, PIECES, POLL,
    PUBLISH, READS, RESUME, RING, RING_BEGAN, RING_ENDED, RING_IDENTITY, RING_SEQUENCE, RING_WORDS,
    ROWS, SLOTS, WAITING, WINDOWS, WRITING)

# Maximum number of phases per run; they take a few milliseconds.
_MAX_PHASES = 32
# An area is free once the previous operation in it, whose number is lower by AREAS, has ended. The
# flag is then this much lower than the count with which this operation begins.
_AHEAD = (AREAS << COUNT_BITS) - ENDED
# Offset of a rank's note of its first barrier.
_NOTE = NOTE_WORD + NOTE_WORDS
_IN_SLOT, _ = IN_SLOT


def protocol(d: Any) -> Callable[..., Any]:
    """Return `run(call, mode, vector)`, which runs a call as far as possible; see layout.

    The protocol is written in the dialect `d`. The argument `call` of its functions is the words of
    a call, in any form. Offsets within areas are in words. Offsets within slots and vectors are in
    elements.

    Attributes:
        form: Number that is written with a digest, see layout.FORM_WORD.
        inlined: Decorator of each function of the protocol.
        counter: Function of a call that returns the words of its counter.
        bind: Function of a call and a vector that makes the call use the vector.
        load: Function of a rank's segment and a word's offset that returns the word.
        all_arrived: Function of a call, a flag's offset and a value. It returns whether all ranks'
            flags have reached the value. Then all earlier stores of these ranks are visible.
        store: Function of a segment, an offset and a value that sets a word.
        publish: Function like `store`. A rank that loads the word then sees all earlier stores.
        write_header: Function that copies the call's header to this rank's segment.
        write: Function of at, start, n that copies n elements of the vector to this rank's slot.
        read: Function of rank, at, start, n that copies n elements of a rank's slot to the vector.
        write_back: Function of rank, at, start, n that copies n elements of the vector to a rank's
            slot.
        reduce: Function of at, start, n. For SLOTS, it reduces n elements of all slots into the
            vector. For WINDOWS, it reduces n elements of all vectors into all vectors. For PIECES
            and ROWS, it reduces the other ranks' slots and this rank's vector into all of them.
        relax, give_way: Functions to call between two checks, to keep the core or to give it away.
        now: Function of a clock that returns the time in ns.
        count: Function of a call and ns that counts a fast call, and returns the previous count.
    """
    counter_of, all_arrived, begin, wait, run_phases = (
        d.counter, d.all_arrived, _beginning(d), _waiting(d), _phases(d))

    def run(call, mode, vector):  # type: ignore[no-untyped-def]
        counter = counter_of(call)
        # Only a complete operation must be begun here; a part was begun by `join`.
        if call[CALL_IS_OPERATION] != 0 and mode != RESUME and mode != POLL:
            if not begin(call, counter, mode, vector):
                return GATED
            mode = mode & 3
        if call[CALL_STAGE] == BEGUN:
            ended = ((call[CALL_SEQUENCE] + 1) << COUNT_BITS) - _AHEAD
            if call[CALL_SEQUENCE] >= AREAS and not all_arrived(
                    call, call[CALL_AREA], ended) and not wait(call, ended, mode):
                return LATE
            call[CALL_STAGE] = WRITING
        return run_phases(call, counter, mode)

    return run


def _phases(d: Any) -> Any:
    """Return a function that runs as many phases as the other ranks have reached."""
    all_arrived, wait, leave = d.all_arrived, _waiting(d), _leaving(d)
    write, reduce, read = _writing(d), _reducing(d), _reading(d)
    arrive, agreement = _arriving(d), _agreeing(d)

    @d.inlined
    def run_phases(call, counter, mode):  # type: ignore[no-untyped-def]
        for _ in range(_MAX_PHASES):
            j = call[CALL_PHASE]
            if call[CALL_STAGE] == WRITING:
                if j <= call[CALL_LAST]:
                    write(call, j)
                if j > 0:
                    reduce(call, j)
                if j > call[CALL_LAST]:
                    leave(call, counter)
                    return DONE
                arrive(call, counter, j)
                call[CALL_STAGE] = WAITING
                if mode == PUBLISH:
                    return DONE
            count = call[CALL_COUNT]
            if not all_arrived(call, call[CALL_AREA], count) and not wait(call, count, mode):
                return LATE
            if j == 0 and call[CALL_IS_OPERATION] != 0:
                status = agreement(call)
                if status != DONE:
                    return status
            read(call, j)
            call[CALL_PHASE] = j + 1
            call[CALL_STAGE] = WRITING
        return LATE

    return run_phases


def _beginning(d: Any) -> Any:
    """Return a function that begins an operation, or returns False if the gate is closed."""
    bind, now = d.bind, d.now

    @d.inlined
    def begin(call, counter, mode, vector):  # type: ignore[no-untyped-def]
        if call[CALL_STAGE] != IDLE or counter[COUNTER_GATE] != 0 or (
                mode < HELD and counter[COUNTER_HELD] != 0):
            return False
        # Set this first, so that a signal handler can see that the call has begun.
        call[CALL_STAGE] = BEGUN
        call[CALL_BEGAN] = now(call[CALL_CLOCK])
        sequence = counter[COUNTER_SEQUENCE]
        call[CALL_SEQUENCE] = sequence
        counter[COUNTER_SEQUENCE] = sequence + 1
        call[CALL_AREA] = sequence % AREAS * AREA_WORDS
        call[CALL_COUNT] = (sequence + 1) << COUNT_BITS
        call[CALL_PHASE] = call[CALL_FIRST]
        bind(call, vector)
        return True

    return begin


def _waiting(d: Any) -> Any:
    """Return a function that waits for a limited time until all flags have reached a value."""
    all_arrived, relax, give_way = d.all_arrived, d.relax, d.give_way

    @d.inlined
    def wait(call, value, mode):  # type: ignore[no-untyped-def]
        polls, spins, area = 1, call[CALL_SPINS], call[CALL_AREA]
        limit = call[CALL_POLLS] if mode == POLL else spins
        if mode == RESUME:
            limit = spins + call[CALL_YIELDS]
        while polls < limit:
            if polls < spins:
                relax()
            else:
                give_way()
            if all_arrived(call, area, value):
                return True
            polls += 1
        return False

    return wait


def _arriving(d: Any) -> Any:
    """Return a function that publishes the data and, in the first phase, also the call."""
    store, publish, write_header, form = d.store, d.publish, d.write_header, d.form

    @d.inlined
    def arrive(call, counter, j):  # type: ignore[no-untyped-def]
        area, count = call[CALL_AREA], call[CALL_COUNT] + 1
        if j == 0 and call[CALL_IS_OPERATION] != 0:
            base = call[CALL_BASES + call[CALL_RANK]]
            count += call[CALL_BARRIERS] - 1
            if call[CALL_NOTE] != 0:
                store(base, area + _NOTE, call[CALL_NOTE])
                store(base, area + _NOTE + 1, call[CALL_NOTE + 1])
            store(base, area + DIGEST_WORD, call[CALL_DIGEST])
            # If a rank writes its vector to its slot after a note, it uses NumPy.
            store(base, area + FORM_WORD, form if call[CALL_KIND] <= SLOTS else 0)
            written = COUNTER_HEADERS + call[CALL_SEQUENCE] % AREAS
            if counter[written] != call[CALL_IDENTITY]:
                write_header(call)
                counter[written] = call[CALL_IDENTITY]
        call[CALL_COUNT] = count
        publish(call[CALL_BASES + call[CALL_RANK]], area, count)

    return arrive


def _agreeing(d: Any) -> Any:
    """Return a function that compares all ranks' calls: DONE, DISAGREE or FALLBACK."""
    load, form = d.load, d.form

    @d.inlined
    def agreement(call):  # type: ignore[no-untyped-def]
        fallback, area, kind, digest = False, call[CALL_AREA], call[CALL_KIND], call[CALL_DIGEST]
        for r in range(call[CALL_RANKS]):
            base = call[CALL_BASES + r]
            if load(base, area + DIGEST_WORD) != digest:
                return DISAGREE
            if kind == WINDOWS:
                known = CALL_BASES + 2 * (call[CALL_RANKS] + r)
                if load(base, area + _NOTE) != call[known] or (
                        load(base, area + _NOTE + 1) != call[known + 1]):
                    fallback = True
            elif form == 1 and kind == SLOTS and load(base, area + FORM_WORD) == 0:
                fallback = True
            elif kind == PIECES and load(base, area + _NOTE) == _IN_SLOT:
                fallback = True
        return FALLBACK if fallback else DONE

    return agreement


def _pieces(d: Any) -> Any:
    """Return a function of a piece's number that returns where this rank's slice of it begins.

    It returns the offsets in a slot and in the vector, the length of the slice, and the lengths
    before and after it in the piece.
    """
    @d.inlined
    def bounds(call, j):  # type: ignore[no-untyped-def]
        width, p = call[CALL_WIDTH], call[CALL_RANKS]
        first = (j - 1) * width * p
        size = min(width * p, call[CALL_LENGTH] - first)
        before = min(call[CALL_RANK] * width, size)
        n = min(width, size - before)
        return (j & 1) * call[CALL_HALF] + before, first + before, n, before, size - before - n

    return bounds


def _parts(d: Any) -> Any:
    """Return a function of j, start, n that returns the offset and length of a part's piece j."""
    @d.inlined
    def piece(call, j, start, n):  # type: ignore[no-untyped-def]
        done = min(j * call[CALL_WIDTH], n)
        return start + done, min(call[CALL_WIDTH], n - done)

    return piece


def _writing(d: Any) -> Any:
    """Return a function that writes the data of a phase."""
    copy, bounds, piece_of = d.write, _pieces(d), _parts(d)

    @d.inlined
    def write(call, j):  # type: ignore[no-untyped-def]
        half, p = (j & 1) * call[CALL_HALF], call[CALL_RANKS]
        if call[CALL_KIND] == ROWS:
            for r in range(p):
                if r != call[CALL_RANK]:
                    part = CALL_BASES + 2 * (p + r)
                    start, n = piece_of(call, j, call[part], call[part + 1])
                    copy(call, half + r * call[CALL_WIDTH], start, n)
        elif call[CALL_KIND] == PIECES:
            if 0 < j < call[CALL_LAST]:
                at, start, n, before, after = bounds(call, j)
                copy(call, at - before, start - before, before)
                copy(call, at + n, start + n, after)
        elif call[CALL_KIND] != WINDOWS:
            copy(call, call[CALL_WRITE_START], call[CALL_WRITE_START], call[CALL_WRITE_LENGTH])

    return write


def _reducing(d: Any) -> Any:
    """Return a function that reduces the data of the previous phase."""
    reduce_part, write_back, bounds, piece_of = d.reduce, d.write_back, _pieces(d), _parts(d)

    @d.inlined
    def reduce(call, j):  # type: ignore[no-untyped-def]
        kind, rank, p = call[CALL_KIND], call[CALL_RANK], call[CALL_RANKS]
        if kind == READS or kind == PIECES and j == 1 or (
                kind != ROWS and j > 1 and j > call[CALL_LAST]):
            return
        at = start = call[CALL_REDUCE_START]
        n = call[CALL_REDUCE_LENGTH]
        if kind == WINDOWS:
            # This rank's slice, see memory.arrays.slice_of.
            at, start = 0, rank * call[CALL_LENGTH] // p
            n = (rank + 1) * call[CALL_LENGTH] // p - start
        if kind == PIECES:
            at, start, n, before, after = bounds(call, j - 1)
        if kind == ROWS:
            part = CALL_BASES + 2 * (p + rank)
            at = (j - 1 & 1) * call[CALL_HALF] + rank * call[CALL_WIDTH]
            start, n = piece_of(call, j - 1, call[part], call[part + 1])
        reduce_part(call, at, start, n)
        if kind == SLOTS and p == 2 and n < call[CALL_LENGTH]:
            # In a reduce-scatter, the other rank does not read this part of its slot.
            write_back(call, 1 - rank, at, start, n)

    return reduce


def _reading(d: Any) -> Any:
    """Return a function that reads the slots' data for this rank."""
    copy, write_back, bounds = d.read, d.write_back, _pieces(d)

    @d.inlined
    def read(call, j):  # type: ignore[no-untyped-def]
        p = call[CALL_RANKS]
        if call[CALL_KIND] == READS:
            for r in range(p):
                part = CALL_BASES + 2 * (p + r)
                copy(call, r, call[part], call[part], call[part + 1])
                if p == 2:
                    write_back(call, r, call[part], call[part], call[part + 1])
        elif call[CALL_KIND] == PIECES and j > 1:
            at, start, n, before, after = bounds(call, j - 1)
            copy(call, call[CALL_RANK], at - before, start - before, before)
            copy(call, call[CALL_RANK], at + n, start + n, after)

    return read


def _leaving(d: Any) -> Any:
    """Return a function that ends the call, and its operation unless the call is a part of one."""
    publish, now, count = d.publish, d.now, d.count

    @d.inlined
    def leave(call, counter):  # type: ignore[no-untyped-def]
        if call[CALL_IS_OPERATION] != 0:
            publish(call[CALL_BASES + call[CALL_RANK]], call[CALL_AREA],
                    (call[CALL_SEQUENCE] + 1) << COUNT_BITS | ENDED)
        began = call[CALL_BEGAN]
        if began != 0:
            ended = now(call[CALL_CLOCK])
            entry = COUNTER_RING + count(call, ended - began) % RING * RING_WORDS
            counter[entry + RING_IDENTITY] = call[CALL_IDENTITY]
            counter[entry + RING_SEQUENCE] = call[CALL_SEQUENCE]
            counter[entry + RING_BEGAN] = began
            counter[entry + RING_ENDED] = ended
        # Set this last, because another thread may then begin the call again.
        call[CALL_STAGE] = IDLE

    return leave
