"""Runs a group's short calls as rounds, in the caller's thread; what is late goes to the engine."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory import sums
from ..memory.arrays import Array
from ..operations.agreement import Call, refuse_others
from ..record.recorder import Flight
from ..transport import compiled_rounds, pipeline
from ..transport.base import Schedule, Task
from ..transport.layout import (
    BEGIN, DISAGREE, DONE, GATED, GO_ON, LATE, LOOK, OTHERWISE, ROUND_BEGAN, ROUND_SEQUENCE,
    ROUND_STAGE)
from ..transport.rounds import Round

if TYPE_CHECKING:
    from .group import Group

# A program may combine vectors of ever new shapes.
_MOST_CALLS = 256
COMPILED_EARLY = ("float32", "float64", "int64")
# What rounds do to the bit: every rank combines all vectors, see collectives.shared.
_ALGORITHM = "eager"


def compile_rounds(group: "Group", dtypes: Sequence[str] = COMPILED_EARLY) -> None:
    """Compile what runs sums and means, unless it is on disk; without numba, do nothing.

    Args:
        group: Short sums are compiled if its ranks share one memory, long ones if any do.
        dtypes: Their names, the same on all ranks.

    Collective: yes. Blocking: yes, for a few seconds per dtype the first time.
    """
    memory, rounds = group.sharing.memory, group.config.rounds == "auto"
    if len(group.sharing.memory_groups) > 1:
        if memory is not None:
            _compile_long(dtypes)
        return
    dtypes = [name for name in dtypes if name in compiled_rounds.DTYPES]
    if memory is None or not dtypes:
        return
    # The first one saves it for the others.
    for turn in (memory.rank == 0, memory.rank > 0):
        if turn:
            for name in dtypes if rounds else ():
                compiled_rounds.code("sum", name, group.size, compiles=True)
            _compile_long(dtypes)
        group.run(Call("barrier", "(while sums are compiled)"),
                  lambda collectives: collectives.barrier())
    if group.short is not None:
        group.short.forget()


def _compile_long(dtypes: Sequence[str]) -> None:
    for name in dtypes:
        if name in sums.DTYPES:
            sums.code(name, compiles=True)
            pipeline.code(name, compiles=True)


class ShortCalls:
    """The short calls that a group has made before, and may make again as rounds.

    Whether a call is a round, each rank decides by itself: the others cannot tell.

    Args:
        group: Its ranks share one memory.
    """

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._rounds: dict[tuple[str, np.dtype[Any], tuple[int, ...]], tuple[Round, Call]] = {}

    def allreduce(self, x: Any, op: Any) -> bool:
        """Combine `x` over all ranks, in place, if such a call was made before; return whether.

        Args:
            x: A NumPy array.
            op: As in Communicator.allreduce.

        Raises: as Communicator.allreduce.
        """
        try:
            found = self._rounds.get((op, x.dtype, x.shape))
        except TypeError:
            # An op that is none; the ordinary path says so.
            return False
        # Nothing is known about the array: its memory, shape and flags may change at any time.
        if found is None or not x.flags.carray:
            return False
        return self.run(*found, x if x.ndim == 1 else x.reshape(-1))

    def note(self, call: Call, x: Any, op: Any) -> None:
        """Note an allreduce that was made, so that the next one like it is a round.

        Args:
            call: What it was.
            x, op: As for `allreduce`.
        """
        if type(op) is not str or not x.flags.carray:
            return
        if len(self._rounds) >= _MOST_CALLS:
            self._rounds.clear()
        round_ = self.round(call, x.reshape(-1), op)
        if round_ is not None:
            self._rounds[op, x.dtype, x.shape] = round_, call

    def forget(self) -> None:
        """Forget what was noted, since there may be a better way now."""
        self._rounds.clear()

    def round(self, call: Call, x: Array, op: str) -> Round | None:
        """Return what runs an allreduce as a round; None where it cannot.

        Args:
            call: What it is.
            x: A vector like those that are to be combined.
            op: As in Reduction.
        """
        memory, ledger = self._group.sharing.memory, self._group.sharing.ledger
        if memory is None or self._group.algorithm_of(x, op) != _ALGORITHM:
            return None
        return Round(memory, ledger.identity_of(call, _ALGORITHM), call.header, call.digest, op,
                     x.dtype, x.size, compiled=self._group.config.rounds == "auto")

    def run(self, round_: Round, call: Call, x: Array) -> bool:
        """Run a round to its end; return False, and do nothing, if the gate is closed.

        Args:
            round_, call: What to run, and what it is.
            x: Its vector.
        """
        try:
            status = round_.run(BEGIN, x)
            return status == DONE or self.go_on(status, round_, call, x)
        except BaseException as error:
            self.fail(round_, error)
            raise

    def go_on(self, status: int, round_: Round, call: Call, x: Array) -> bool:
        """Run what is left of a round to its end; return False if it has not begun.

        Args:
            status: What its beginning has returned; not DONE.
            round_, call, x: As for `run`.
        """
        if status == LATE or status == OTHERWISE:
            status = round_.run(GO_ON, x)
        if status == LATE or status == DISAGREE:
            self._hand_over(round_, call, x)
        return status != GATED

    def fail(self, round_: Round, error: BaseException) -> None:
        """Let later calls fail if an error came amid a round: the other ranks go on."""
        if round_.words[ROUND_STAGE]:
            self._group.engine.fail(error)

    def _hand_over(self, round_: Round, call: Call, x: Array) -> None:
        """Let the engine run what is left of a round; from here on all is as for any operation."""
        words, engine = round_.words, self._group.engine
        began_s, words[ROUND_BEGAN] = words[ROUND_BEGAN] / 1e9, 0
        flight = Flight(call, words[ROUND_SEQUENCE], self._group.sharing.ledger.group, _ALGORITHM,
                        began_s, began_s)
        handle = self._group.watched(flight, Task(_rest(round_, call, x)))
        with engine.lock:
            flight.exposed_s = seconds = time.monotonic() - began_s
            handle.lane.at_once_s += seconds
        engine.run(handle)


def _rest(round_: Round, call: Call, x: Array) -> Schedule[None]:
    rest = _Rest(round_, x)
    yield (rest,)
    if rest.status == DISAGREE:
        node = round_.memory.node(round_.words[ROUND_SEQUENCE], round_.header, round_.digest)
        refuse_others(call, node)


class _Rest:
    """What is left of a round; complete when it is, or when ranks disagree."""

    def __init__(self, round_: Round, x: Array) -> None:
        self.status, self._round, self._x = LATE, round_, x

    def __repr__(self) -> str:
        return f"stage {self._round.words[ROUND_STAGE]} of a round"

    def test(self) -> bool:
        """Run it as far as it goes; return whether anything is left to wait for."""
        if self.status == LATE:
            self.status = self._round.run(LOOK, self._x)
        return self.status != LATE
