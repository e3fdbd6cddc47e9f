"""The protocol of the ranks of a node in shared memory: write, synchronize, reduce or read, leave.

The protocol is written once. `protocol` is given a dialect: functions that load, store, copy and
reduce. One dialect uses Python and NumPy (`node_call`), the other one uses numba's intrinsics
(`compiled`). Tests run the Python dialect on simulated memory that acts as an adversary. Both
dialects use the same words of a call (see `layout`), so that one can continue where the other one
has stopped.

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
    AREAS, AREA_WORDS, BEGUN, COUNT_BITS, DIGEST_WORD, DISAGREE, DONE, ENDED, ENTRY_WORDS, FALLBACK,
    FORM_WORD, GATED, HELD, IDLE, IN_SLOT, LATE, NOTE_WORD, NOTE_WORDS, PIECES, POLL, PUBLISH,
    READS, RESUME, RING, ROWS, SLOTS, WAITING, WINDOWS, WRITING)

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

    The protocol is written in the dialect `d`. The argument `call` of its functions has the names
    of layout as attributes. Offsets within areas are in words. Offsets within slots and vectors are
    in elements.

    Attributes:
        form: Number that is written with a digest, see layout.FORM_WORD.
        inlined: Decorator of each function of the protocol.
        counter: Function of a call that returns its counter, with the names of layout.
        bind: Function of a call and a vector that makes the call use the vector.
        load: Function of a rank's segment and a word's offset that returns the word.
        all_arrived: Function of a call and a value that returns whether all ranks' flags have
            reached the value. Then all earlier stores of these ranks are visible.
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
        now: Function that returns the time of CLOCK_MONOTONIC in ns.
        count: Function of a call and ns that counts a fast call, and returns the previous count.
    """
    counter_of, all_arrived, begin, wait, run_phases = (
        d.counter, d.all_arrived, _beginning(d), _waiting(d), _phases(d))

    def run(call, mode, vector):  # type: ignore[no-untyped-def]
        counter = counter_of(call)
        # Only a complete operation must be begun here; a part was begun by `join`.
        if call.is_operation != 0 and mode != RESUME and mode != POLL:
            if not begin(call, counter, mode, vector):
                return GATED
            mode = mode & 3
        if call.stage == BEGUN:
            sequence = call.sequence
            ended = ((sequence + 1) << COUNT_BITS) - _AHEAD
            if sequence >= AREAS and not all_arrived(call, ended) and not wait(call, ended, mode):
                return LATE
            call.stage = WRITING
        return run_phases(call, counter, mode)

    return run


def _phases(d: Any) -> Any:
    """Return a function that runs as many phases as the other ranks have reached."""
    all_arrived, wait, leave = d.all_arrived, _waiting(d), _leaving(d)
    write, reduce, read = _writing(d), _reducing(d), _reading(d)
    arrive, agreement = _arriving(d), _agreeing(d)

    @d.inlined
    def run_phases(call, counter, mode):  # type: ignore[no-untyped-def]
        j, stage = call.phase, call.stage
        for _ in range(_MAX_PHASES):
            if stage == WRITING:
                if j <= call.last:
                    write(call, j)
                if j > 0:
                    reduce(call, j)
                if j > call.last:
                    leave(call, counter)
                    return DONE
                arrive(call, counter, j)
                call.stage = WAITING
                if mode == PUBLISH:
                    return DONE
            count = call.count
            if not all_arrived(call, count) and not wait(call, count, mode):
                return LATE
            if j == 0 and call.is_operation != 0:
                status = agreement(call)
                if status != DONE:
                    return status
            read(call, j)
            j += 1
            call.phase = j
            call.stage = stage = WRITING
        return LATE

    return run_phases


def _beginning(d: Any) -> Any:
    """Return a function that begins an operation, or returns False if the gate is closed."""
    bind, now = d.bind, d.now

    @d.inlined
    def begin(call, counter, mode, vector):  # type: ignore[no-untyped-def]
        if call.stage != IDLE or counter.gate != 0 or (mode < HELD and counter.held != 0):
            return False
        # Set this first, so that a signal handler can see that the call has begun.
        call.stage = BEGUN
        call.began = now()
        sequence = counter.sequence
        call.sequence = sequence
        counter.sequence = sequence + 1
        call.area = sequence % AREAS * AREA_WORDS
        call.count = (sequence + 1) << COUNT_BITS
        call.phase = call.first
        bind(call, vector)
        return True

    return begin


def _waiting(d: Any) -> Any:
    """Return a function that waits for a limited time until all flags have reached a value."""
    all_arrived, relax, give_way = d.all_arrived, d.relax, d.give_way

    @d.inlined
    def wait(call, value, mode):  # type: ignore[no-untyped-def]
        polls, spins = 1, call.spins
        limit = call.polls if mode == POLL else spins
        if mode == RESUME:
            limit = spins + call.yields
        while polls < limit:
            if polls < spins:
                relax()
            else:
                give_way()
            if all_arrived(call, value):
                return True
            polls += 1
        return False

    return wait


def _arriving(d: Any) -> Any:
    """Return a function that publishes the data and, in the first phase, also the call."""
    store, publish, write_header, form = d.store, d.publish, d.write_header, d.form

    @d.inlined
    def arrive(call, counter, j):  # type: ignore[no-untyped-def]
        area, count = call.area, call.count + 1
        if j == 0 and call.is_operation != 0:
            base = call.segments[call.rank]
            count += call.barriers - 1
            if call.window != 0:
                store(base, area + _NOTE, call.window)
                store(base, area + _NOTE + 1, call.offset)
            store(base, area + DIGEST_WORD, call.digest)
            # If a rank writes its vector to its slot after a note, it uses NumPy.
            store(base, area + FORM_WORD, form if call.kind <= SLOTS else 0)
            written = call.sequence % AREAS
            if counter.headers[written] != call.identity:
                write_header(call)
                counter.headers[written] = call.identity
        call.count = count
        publish(call.segments[call.rank], area, count)

    return arrive


def _agreeing(d: Any) -> Any:
    """Return a function that compares all ranks' calls: DONE, DISAGREE or FALLBACK."""
    load, form = d.load, d.form

    @d.inlined
    def agreement(call):  # type: ignore[no-untyped-def]
        fallback, area, kind, digest = False, call.area, call.kind, call.digest
        for r in range(call.ranks):
            base = call.segments[r]
            if load(base, area + DIGEST_WORD) != digest:
                return DISAGREE
            if kind == WINDOWS:
                if load(base, area + _NOTE) != call.windows[r] or (
                        load(base, area + _NOTE + 1) != call.offsets[r]):
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
        width, p = call.width, call.ranks
        first = (j - 1) * width * p
        size = min(width * p, call.length - first)
        before = min(call.rank * width, size)
        n = min(width, size - before)
        return (j & 1) * call.half + before, first + before, n, before, size - before - n

    return bounds


def _parts(d: Any) -> Any:
    """Return a function of j and a rank that returns the offset and length of piece j."""
    @d.inlined
    def piece(call, j, r):  # type: ignore[no-untyped-def]
        n = call.lengths[r]
        done = min(j * call.width, n)
        return call.starts[r] + done, min(call.width, n - done)

    return piece


def _writing(d: Any) -> Any:
    """Return a function that writes the data of a phase."""
    copy, bounds, piece_of = d.write, _pieces(d), _parts(d)

    @d.inlined
    def write(call, j):  # type: ignore[no-untyped-def]
        half, p = (j & 1) * call.half, call.ranks
        if call.kind == ROWS:
            for r in range(p):
                if r != call.rank:
                    start, n = piece_of(call, j, r)
                    copy(call, half + r * call.width, start, n)
        elif call.kind == PIECES:
            if 0 < j < call.last:
                at, start, n, before, after = bounds(call, j)
                copy(call, at - before, start - before, before)
                copy(call, at + n, start + n, after)
        elif call.kind != WINDOWS:
            copy(call, call.write_start, call.write_start, call.write_length)

    return write


def _reducing(d: Any) -> Any:
    """Return a function that reduces the data of the previous phase."""
    reduce_part, write_back, bounds, piece_of = d.reduce, d.write_back, _pieces(d), _parts(d)

    @d.inlined
    def reduce(call, j):  # type: ignore[no-untyped-def]
        kind, rank, p = call.kind, call.rank, call.ranks
        if kind == READS or kind == PIECES and j == 1 or (
                kind != ROWS and j > 1 and j > call.last):
            return
        at = start = call.reduce_start
        n = call.reduce_length
        if kind == WINDOWS:
            # This rank's slice, see memory.arrays.slice_of.
            at, start = 0, rank * call.length // p
            n = (rank + 1) * call.length // p - start
        if kind == PIECES:
            at, start, n, before, after = bounds(call, j - 1)
        if kind == ROWS:
            at = (j - 1 & 1) * call.half + rank * call.width
            start, n = piece_of(call, j - 1, rank)
        reduce_part(call, at, start, n)
        if kind == SLOTS and p == 2 and n < call.length:
            # In a reduce-scatter, the other rank does not read this part of its slot.
            write_back(call, 1 - rank, at, start, n)

    return reduce


def _reading(d: Any) -> Any:
    """Return a function that reads the slots' data for this rank."""
    copy, write_back, bounds = d.read, d.write_back, _pieces(d)

    @d.inlined
    def read(call, j):  # type: ignore[no-untyped-def]
        p = call.ranks
        if call.kind == READS:
            for r in range(p):
                start, n = call.starts[r], call.lengths[r]
                copy(call, r, start, start, n)
                if p == 2:
                    write_back(call, r, start, start, n)
        elif call.kind == PIECES and j > 1:
            at, start, n, before, after = bounds(call, j - 1)
            copy(call, call.rank, at - before, start - before, before)
            copy(call, call.rank, at + n, start + n, after)

    return read


def _leaving(d: Any) -> Any:
    """Return a function that ends the call, and its operation unless the call is a part of one."""
    publish, now, count = d.publish, d.now, d.count

    @d.inlined
    def leave(call, counter):  # type: ignore[no-untyped-def]
        sequence, began = call.sequence, call.began
        if call.is_operation != 0:
            publish(call.segments[call.rank], call.area, (sequence + 1) << COUNT_BITS | ENDED)
        if began != 0:
            ended = now()
            entry, ring = count(call, ended - began) % RING * ENTRY_WORDS, counter.ring
            ring[entry], ring[entry + 1] = call.identity, sequence
            ring[entry + 2], ring[entry + 3] = began, ended
        # Set this last, because another thread may then begin the call again.
        call.stage = IDLE

    return leave
