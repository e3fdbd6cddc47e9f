"""Horovod's process sets: sets of ranks that run collectives among themselves."""

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import Communicator, MpiringError
from ..provisional import first_few, same_on_all
from .arrays import NumPyArrays
from .lending import Lender
from .matching import Matcher
from .requests import STEP, HorovodInternalError, NamedRequest, Terms

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class ProcessSet:
    """Set of ranks that run collectives among themselves; each collective accepts one.

    Before its first use, pass it to `init` or to `add_process_set` on every rank.

    Args:
        ranks_or_comm: Ranks, or an mpi4py communicator that contains them.

    Attributes:
        process_set_id: Number of the set, 0 for all ranks; None before `init`, and after the set
            has been removed.
        ranks: Ranks in ascending order.
        mpi_comm: The communicator, if one was passed.

    Raises:
        ValueError: The argument is neither ranks nor a communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        self._comm: Communicator | None = None
        self._matcher: Matcher | None = None
        self._lender: Lender | None = None
        # Optimizers by the names of their steps, and how many have had parameters of these names.
        self._steps: dict[str, weakref.WeakMethod[Callable[[], None]]] = {}
        self._step_counts = Counter[str]()
        if not isinstance(ranks_or_comm, Iterable) and hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): ProcessSet should be initialized "
                             f"with a list of process ranks or an mpi4py Comm object")
        self.ranks = sorted(ranks)

    def __repr__(self) -> str:
        return (f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
                f"mpi_comm={self.mpi_comm})")

    def size(self) -> int | None:
        """Return the number of ranks; None before `init`."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return this rank's number within the set; None before `init`.

        Raises:
            ValueError: This rank is not in the set.
        """
        return None if self.process_set_id is None else self.comm.rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None before `init`."""
        return None if self.process_set_id is None else self._comm is not None

    @property
    def comm(self) -> Communicator:
        """Communicator of the set's ranks, which must all make its calls in the same order.

        Raises ValueError if `init` was not called, or this rank is not in the set.
        """
        if self.process_set_id is None:
            raise ValueError(NOT_INITIALIZED if not self.ranks else
                             f"{self}: Process set does not exist or has not been registered.")
        if self._comm is None:
            raise ValueError(f"{self}: Process is not part of provided process set.")
        return self._comm

    @property
    def matcher(self) -> Matcher:
        """Matcher of the set's operations; it raises the same errors as `comm`."""
        if self._matcher is None:
            raise ValueError(f"rank {self.comm.rank}: {self} no longer has operations")
        return self._matcher

    @property
    def lender(self) -> Lender:
        """Lender of communicators for the set's optimizers; it raises the same errors as `comm`."""
        if self._lender is None:
            self._lender = Lender(self.comm)
        return self._lender

    def arrive(self, kind: str, name: str = "", op: str = "") -> Communicator:
        """Return `comm` once all ranks have arrived at a collective that they run on it.

        Meanwhile, operations that other ranks wait for can start. Without a name, calls are
        numbered. `op` is the reduction of a STEP. Raises HorovodInternalError if a rank cannot
        arrive, because it has ended or called `join`. Collective, blocking.
        """
        if self.comm.size > 1:
            self.matcher.finish(self.matcher.submit(
                NamedRequest(NumPyArrays(), name, Terms(kind, op=op), ())))
        return self.comm

    def register(self, step: Callable[[], None], parameters: Iterable[str]) -> str:
        """Return the name for the steps of an optimizer, the same on all ranks.

        `step` is the optimizer's method that takes part in a step without gradients.
        """
        names = sorted(parameters)
        text = f"{first_few(names, 2)} ({zlib.crc32(repr(names).encode()):08x})"
        self._step_counts[text] += 1
        name = f"{text} #{self._step_counts[text]}"
        key = f"{STEP}.{name}"
        self._steps[key] = weakref.WeakMethod(step, lambda _: self._steps.pop(key, None))
        return name

    def step_without_batch(self, name: str) -> None:
        """Take part in a step of an optimizer for which only other ranks have gradients.

        Raises HorovodInternalError if this rank has no such optimizer. Collective, blocking.
        """
        step = self._steps[name]() if name in self._steps else None
        if step is None:
            raise HorovodInternalError(
                f"rank {self.comm.rank} has called join(), but has no optimizer for {name!r}: "
                f"create the same DistributedOptimizer on every rank, and keep it until join()")
        step()

    def root(self, rank: int) -> int:
        """Return the number of a global rank within the set; raise ValueError if it is outside."""
        if self.ranks is None or rank not in self.ranks:
            raise ValueError(f"root_rank={rank!r}: expected one of the ranks of {self}")
        return self.ranks.index(rank)

    def open(self, number: int, ranks: Sequence[int], comm: Communicator | None,
             matcher: Matcher | None) -> None:
        """Set the number and the ranks; `comm` and `matcher` are None on ranks outside the set."""
        self.process_set_id, self.ranks = number, list(ranks)
        self._comm, self._matcher = comm, matcher

    def close(self) -> None:
        """Wait for the set's operations and ranks, then reset its number. Collective, blocking."""
        try:
            if self._matcher is not None:
                self._matcher.close()
            if self._lender is not None:
                self._lender.close()
            if self._comm is not None:
                self._comm.close()
        finally:
            self.process_set_id = self._comm = self._matcher = self._lender = None


def ranks_of(process_set: ProcessSet, world: Communicator, world_mpi: Any) -> list[int]:
    """Return the ranks of a set, which must be the same on all ranks. Collective, blocking.

    `world_mpi` includes all ranks of the set. All ranks raise ValueError if a rank does not exist,
    or if sets differ between ranks.
    """
    try:
        with same_on_all(world, "ProcessSet") as same:
            ranks = process_set.ranks
            if ranks is None and process_set.mpi_comm is not None:
                members = process_set.mpi_comm.Get_group()
                ranks = sorted(members.Translate_ranks(
                    list(range(members.size)), world_mpi.Get_group()))
            else:
                same["ranks"] = ranks
            if not ranks or len(set(ranks)) < len(ranks) or not (
                    0 <= ranks[0] and ranks[-1] < world.size):
                raise ValueError(f"rank {world.rank}: {process_set}: expected distinct ranks from "
                                 f"0 to {world.size - 1}")
    except MpiringError as error:
        raise ValueError(str(error)) from error
    return ranks
