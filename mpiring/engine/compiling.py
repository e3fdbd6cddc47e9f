"""Compiles what runs sums and means, once per kind of machine, rather than amid other work."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..jit import copies, sums
from ..operations.agreement import Call
from ..transport import compiled, waiting

if TYPE_CHECKING:
    from .group import Group

COMPILED_EARLY = ("float32", "float64", "int64")


def compile_fast_calls(group: "Group", dtypes: Sequence[str]) -> None:
    """Compile what runs sums and means, unless it is on disk; without numba, do nothing.

    The ranks of a node share the work. One that keeps nothing on disk (see the setting
    `tuning_folder`) does not compile: it would at every start.

    Args:
        group: Short sums are compiled if its ranks share one memory, long ones if any do.
        dtypes: Their names, the same on all ranks.

    Collective: yes. Blocking: yes, for a few seconds per dtype the first time.
    """
    dtypes = [name for name in dtypes if name in compiled.DTYPES]
    if not dtypes or all(len(ranks) == 1 for ranks in group.sharing.memory_groups):
        return
    memory = group.sharing.memory
    compilations = [*_compilations(group, dtypes)] if memory and group.config.tuning_folder else []
    # What others save is loaded; what cannot be saved is made by each.
    for share in (compilations[memory.rank::len(memory.ranks)] if memory else [], compilations):
        for compilation in share:
            compilation(compiles=True)
        group.run(Call("barrier", "(while sums are compiled)"),
                  lambda collectives: collectives.barrier(), patient=waiting.OPENING_S)
    group.fast_calls.forget()


def _compilations(group: "Group", dtypes: Sequence[str]) -> Iterator[Any]:
    for name in dtypes:
        yield partial(compiled.code, "sum", name, group.size)
        if name in sums.DTYPES:
            yield partial(sums.code, name)
    yield copies.code
