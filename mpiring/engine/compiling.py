"""Compiles what runs sums and means, once per kind of machine, rather than amid other work."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..memory import sums
from ..operations.agreement import Call
from ..transport import compiled_rounds, pipeline

if TYPE_CHECKING:
    from .group import Group

COMPILED_EARLY = ("float32", "float64", "int64")


def compile_rounds(group: "Group", dtypes: Sequence[str] = COMPILED_EARLY) -> None:
    """Compile what runs sums and means, unless it is on disk; without numba, do nothing.

    A rank that keeps nothing on disk (see the setting `tuning_folder`) does not compile either: it
    would at every start.

    Args:
        group: Short sums are compiled if its ranks share one memory, long ones if any do.
        dtypes: Their names, the same on all ranks.

    Collective: yes. Blocking: yes, for a few seconds per dtype the first time.
    """
    memory, rounds = group.sharing.memory, group.config.rounds == "auto"
    keeps = bool(group.config.tuning_folder)
    if len(group.sharing.memory_groups) > 1:
        if memory is not None and keeps:
            _compile_long(dtypes)
        return
    dtypes = [name for name in dtypes if name in compiled_rounds.DTYPES]
    if memory is None or not dtypes:
        return
    # The first one saves it for the others.
    for turn in (memory.rank == 0, memory.rank > 0):
        if turn and keeps:
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
