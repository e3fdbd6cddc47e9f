"""Compiles sums and means once per kind of machine, before they are needed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..operations.agreement import Call
from ..transport import compiled, waiting
from .background import compilations

if TYPE_CHECKING:
    from .group import Group

COMPILED_EARLY = ("float32", "float64", "int64")


def compile_fast_calls(group: "Group", dtypes: Sequence[str]) -> None:
    """Compile sums and means for fast calls, unless they are on disk; without numba, do nothing.

    The ranks of a node divide the work. A rank that keeps nothing on disk (see the setting
    `tuning_folder`) does not compile, because it would have to compile again at every start. Short
    sums are compiled if all ranks of the group share one memory, long sums if any of them do.

    Collective: yes. Blocking: yes, for a few seconds per dtype the first time.
    """
    dtypes = [name for name in dtypes if name in compiled.DTYPES]
    if not dtypes or all(len(ranks) == 1 for ranks in group.sharing.memory_groups):
        return
    memory = group.sharing.memory
    wanted = [*compilations(group.size, dtypes)] if memory and group.config.tuning_folder else []
    # First, each rank compiles its share. Then it loads the code of the other ranks, and compiles
    # any code that is not on disk.
    for share in (wanted[memory.rank::len(memory.ranks)] if memory else [], wanted):
        for compilation in share:
            compilation(compiles=True)
        group.run(Call("barrier", "(while sums are compiled)", prepares=True),
                  lambda collectives: collectives.barrier(), patient=waiting.OPENING_S)
    group.fast_calls.forget()
