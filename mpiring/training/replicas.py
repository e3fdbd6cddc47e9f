"""Compares what all ranks should have in common, and stops or mends a rank that differs."""

import collections
import functools
import logging
import operator
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..errors import ReplicaError
from ..memory.arrays import Array
from ..memory.digest import digest
from ..memory.nests import leaves
from ..operations.agreement import Call
from ..text import first_few

_log = logging.getLogger("mpiring")


@dataclass(frozen=True)
class Replicated:
    """A piece of memory that has the same bits on all ranks.

    Attributes:
        name: For messages; tells it from all other parts.
        read: Returns its bytes: shape (n,), uint8; perhaps a copy.
        write: Replaces its bytes by such a vector.
    """

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]


class Replicas:
    """The parameters and the optimiser state of a model, of which each rank has a replica.

    Args:
        comm: The ranks. Its settings say how often to compare, and what to do.
        parts: Yields them as they are at present; the same names on all ranks, in any order.

    Attributes:
        paused: Nothing is compared at present: ranks may differ for a while.
    """

    def __init__(self, comm: Communicator, parts: Callable[[], Iterable[Replicated]]) -> None:
        self.paused = False
        self._comm, self._parts = comm, parts
        self._steps = self._compared = 0

    def end_step(self) -> None:
        """Count a step of training; compare if `digest_steps` have passed since the last time.

        Raises: as `compare`.

        Collective: yes. Blocking: if it compares.
        """
        self._steps += 1
        every = self._comm.config.digest_steps
        if every and not self.paused and self._steps - self._compared >= every:
            self.compare()

    def compare(self) -> None:
        """Find out whether all ranks have the same bits, by a message of 16 bytes if they do.

        Parts that only some ranks have do not count.

        Raises:
            ReplicaError: Ranks differ, and `digest_action` is "stop", or there is no majority
                to restore from. On all ranks.

        Collective: yes. Blocking: yes.
        """
        self._compared = self._steps
        if self._comm.size == 1:
            return
        parts = {part.name: part for part in self._parts()}
        digests = {name: digest([parts[name].read()]) for name in sorted(parts)}
        if self._are_equal(digests):
            return
        everybodys = self._comm.allgather_object((socket.gethostname(), digests))
        different = _different([theirs for _, theirs in everybodys])
        if not different:
            return
        hosts = [host for host, _ in everybodys]
        told = f"after {self._steps} steps, {_described(different, hosts)}"
        if self._comm.config.digest_action == "stop":
            raise ReplicaError(
                f"rank {self._comm.rank}: {told}. One tensor alone: look at that host's memory; "
                f"many: look for what ranks do differently, such as random numbers, the order of "
                f"a set, or a step that not all of them take. Go on from a checkpoint; "
                f"digest_action='restore' copies what differs from a rank of the majority")
        if not all(one.majority for one in different):
            raise ReplicaError(
                f"rank {self._comm.rank}: {told}. There is no majority to restore from; go on "
                f"from a checkpoint")
        for one in different:
            self._copy(parts[one.name], one.majority[0], one.odd)
        if self._comm.rank == 0:
            _log.warning("%s; restored from those", told)

    def _are_equal(self, digests: Mapping[str, int]) -> bool:
        """Return whether all ranks have the same digests; the same answer on all."""
        mine = np.uint64(digest(
            [f"{name} {number:x}\n".encode() for name, number in digests.items()]))
        # The least of all, and the greatest: its complement is the least.
        both = np.array([mine, ~mine])
        self._comm.submit(
            Call("compare digests", f"after {self._steps} steps"),
            lambda collectives: collectives.allreduce(both, op="min")).wait()
        return bool(both[0] == ~both[1])

    def _copy(self, part: Replicated, root: int, ranks: Iterable[int]) -> None:
        mine = part.read()
        here = mine if self._comm.rank == root else np.empty_like(mine)
        self._comm.broadcast(here, root=root)
        if self._comm.rank in ranks:
            part.write(here)

    def copy_from(self, root: int) -> None:
        """Give all ranks the parts of one rank, as far as all ranks have them.

        Collective: yes. Blocking: yes.
        """
        parts = {part.name: part for part in self._parts()}
        everybodys = self._comm.allgather_object(list(parts))
        for name in sorted(set(parts).intersection(*everybodys)):
            self._copy(parts[name], root, range(self._comm.size))


@dataclass(frozen=True)
class _Different:
    """A part that is not the same on all ranks.

    Attributes:
        name: The part's.
        odd: The ranks that are not of the majority.
        majority: The ranks that agree, and are more than any others that do; often none of two.
    """

    name: str
    odd: tuple[int, ...]
    majority: tuple[int, ...]


def _different(everybodys: Sequence[Mapping[str, int]]) -> list[_Different]:
    """Return the parts that all ranks have, and that are not the same on all."""
    found = []
    for name in sorted(set(everybodys[0]).intersection(*everybodys)):
        ranks: dict[int, list[int]] = {}
        for rank, digests in enumerate(everybodys):
            ranks.setdefault(digests[name], []).append(rank)
        if len(ranks) > 1:
            first, second = sorted(ranks.values(), key=len, reverse=True)[:2]
            majority = tuple(first) if len(first) > len(second) else ()
            odd = tuple(rank for rank in range(len(everybodys)) if rank not in majority)
            found.append(_Different(name, odd, majority))
    return found


def _described(different: Sequence[_Different], hosts: Sequence[str]) -> str:
    """Return which ranks differ in what, as a text."""
    names: dict[_Different, list[str]] = collections.defaultdict(list)
    for one in different:
        names[_Different("", one.odd, one.majority)].append(one.name)
    return "; ".join(
        f"{_ranks(who.odd, hosts)} "
        + (f"differ{'s' * (len(who.odd) == 1)} from ranks {_list(who.majority)}"
           if who.majority else "differ from each other, without a majority,")
        + f" in {first_few(those, 5)}" for who, those in names.items())


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + first_few(
        [f"{rank} on {hosts[rank]}" for rank in ranks], 8)


def _list(ranks: Sequence[int]) -> str:
    return first_few([str(rank) for rank in ranks], 8)


def replicated_in(nest: Any, name: str, leaf: Callable[[str, Any], Replicated | None],
                  ) -> Iterator[Replicated]:
    """Yield the arrays of a nest, and the numbers of its mappings and lists, as parts.

    Args:
        nest: See memory.nests.
        name: Of the nest.
        leaf: Returns the part that an array is; None for other leaves, and for arrays that were
            yielded before.
    """
    for path, value in leaves(nest):
        its_name = name + "".join(f"[{key!r}]" for key in path)
        if not isinstance(value, bool | int | float):
            part = leaf(its_name, value)
            if part is not None:
                yield part
        elif path and abs(value) < 2**63:
            holder = functools.reduce(operator.getitem, path[:-1], nest)
            # Those of a tuple cannot be replaced.
            if isinstance(holder, MutableMapping | list):
                yield _number(holder, path[-1], its_name)


def _number(holder: Any, key: Any, name: str) -> Replicated:
    """Return a number of Python's as a part."""
    value = np.array(holder[key])

    def write(raw: Array) -> None:
        holder[key] = raw.view(value.dtype)[0].item()

    return Replicated(name, lambda: value.reshape(1).view(np.uint8), write)
