"""Names what is compared: mpiring's algorithms, MPI's own allreduce, and the peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collectives import native
from ...config import ALGORITHMS
from ...errors import ConfigError
from ...memory.arrays import Array
from . import peers
from .world import World

Call = Callable[[], object]

NATIVE = "MPI_Allreduce"
COPY = "memory copy"
# On GPUs.
NAIVE, NAIVE_PINNED = "naive", "naive, pinned"
DEVICE_COPY, PINNED_COPIES = "device copy", "pinned copies"
# With what all are compared; and what only shows a limit, with the buffers that it is one for.
REFERENCES = (NATIVE, NAIVE)
LIMITS = {COPY: ("empty", "private"), DEVICE_COPY: ("empty",), PINNED_COPIES: ("private",)}
KINDS = ("mpiring", "mpi", *peers.NAMES, "nccl")
ON_CPU, ON_GPU = ("mpiring", "mpi", *peers.NAMES), ("mpiring", "mpi", "nccl")
# Ways to take training steps.
ALONE = "compute only"
OURS = "mpiring DataParallel"
GLOO = "Gloo + PyTorch's DDP"


def _refuse_to_start(x: Array) -> Callable[[], Call]:
    raise ConfigError("only blocking calls can be measured")


@dataclass(frozen=True)
class Contender:
    """A way to sum an array over the ranks, in place.

    Both fields are given the array and return what to call again and again;
    they raise ConfigError for an array that the contender cannot sum.

    Attributes:
        name: As it stands in tables.
        blocking: Returns a function that sums the array.
        starting: Returns a function that begins to sum it, and returns one that waits.
        sums: False for what is measured only to show a limit.
    """

    name: str
    blocking: Callable[[Array], Call]
    starting: Callable[[Array], Callable[[], Call]] = _refuse_to_start
    sums: bool = True


def mpiring(world: World, algorithm: str) -> Contender:
    """Return mpiring with an algorithm of `config.ALGORITHMS`."""
    comm = world.comm
    return Contender(
        f"mpiring {algorithm}",
        lambda x: lambda: comm.allreduce(x, algorithm=algorithm),
        lambda x: lambda: comm.iallreduce(x, algorithm=algorithm).wait)


def mpi(world: World) -> Contender:
    """Return MPI's own allreduce, the reference: called by mpi4py, in place."""
    raw, library = world.raw, world.mpi

    def call(x: Array) -> Call:
        refuse_unknown(x.dtype)
        return lambda: raw.Allreduce(library.IN_PLACE, x, op=library.SUM)

    def start(x: Array) -> Callable[[], Call]:
        refuse_unknown(x.dtype)
        return lambda: raw.Iallreduce(library.IN_PLACE, x, op=library.SUM).Wait

    return Contender(NATIVE, call, start)


def refuse_unknown(dtype: np.dtype[Any]) -> None:
    """Raise ConfigError if MPI cannot sum a dtype."""
    if not native.supports(dtype, "sum"):
        raise ConfigError(f"MPI has no {dtype.name}")


def memory_copy() -> Contender:
    """Return the limit on one node: every rank reads and writes each byte once, as a copy does.

    Less traffic there cannot be: each sum is read from every rank's array and
    stored in every rank's array, 2 n bytes for each of the ranks.
    """
    def call(x: Array) -> Call:
        # Written to, so that it has memory of its own, not the system's one page of zeros.
        other = np.ones_like(x)
        return lambda: np.copyto(other, x)

    return Contender(COPY, call, sums=False)


def chosen(world: World, kinds: Sequence[str] | None, algorithms: Sequence[str] | None,
           interface: str | None = None) -> list[Contender]:
    """Return the contenders that a command line asks for; "auto" and MPI's own always.

    Args:
        kinds: Of KINDS; by default all that are installed.
        algorithms: Of mpiring; by default all.
        interface: Network interface for Gloo, by name.

    Raises:
        MissingDependencyError: A kind was asked for that is not installed.

    Collective: yes. Blocking: yes.
    """
    found = [mpi(world), *own(world, kinds, algorithms)]
    for name in peers.NAMES:
        if peers.takes_part(name, kinds, world):
            label, blocking, starting = peers.opened(name, world, interface)
            found.append(Contender(label, blocking, starting))
    return found


def own(world: World, kinds: Sequence[str] | None,
        algorithms: Sequence[str] | None) -> list[Contender]:
    """Return mpiring with those algorithms that a command line asks for; see `chosen`."""
    wanted = ALGORITHMS if algorithms is None else algorithms
    ours = kinds is None or "mpiring" in kinds
    return [mpiring(world, name) for name in ALGORITHMS
            if name == "auto" or ours and name in wanted]
