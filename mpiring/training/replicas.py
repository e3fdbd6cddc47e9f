"""Compares the replicas of a model across ranks, and stops, or restores a rank that differs."""

import collections
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..errors import ReplicaError
from ..memory.arrays import Array
from ..memory.digest import digest, has_xxh3
from ..memory.pytrees import at, leaves, path_text
from ..operations.agreement import Call
from ..text import first_few

_log = logging.getLogger("mpiring")


@dataclass(frozen=True)
class Replicated:
    """An array or a number that should have the same bits on all ranks.

    Attributes:

        read: Function that returns the bytes, or a copy of them: shape (n,), uint8.
        write: Function that replaces the bytes, given a vector of this shape and dtype.
        floats: Function that returns bytes as float64; None for items that may not differ by
            rounding.
        precision: Relative distance between two adjacent numbers.
    """

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]
    floats: Callable[[Array], Array] | None = None
    precision: float = 0.0


class Replicas:
    """The parameters and the optimizer state of a model, of which each rank has a replica.

    Args:
        comm: Communicator of the ranks, whose settings `digest_steps` and `digest_action` apply.
        items: Function that yields the current state; names are the same on all ranks.
        model: Number of the model as a string for messages; see `Communicator.next_model`.

    Attributes:
        paused: Whether comparisons are suspended, because ranks may differ temporarily.
        by_optimizer: Whether an optimizer calls `begin_update`. Between its updates, the program
            may change parameters on purpose, also differently on each rank, as SAM does. If None,
            this is unknown, and comparisons are one step late.
        written: Whether the program itself has written parameters since the last comparison, so
            that they may differ by rounding.
    """

    def __init__(self, comm: Communicator, items: Callable[[], Iterable[Replicated]], model: str,
                 *, by_optimizer: bool | None) -> None:
        self.paused, self.by_optimizer, self.written = False, by_optimizer, False
        self._comm, self._items, self._model = comm, items, model
        self._steps = self._compared = 0
        # Whether digests are XXH3; None before ranks have agreed.
        self._fast: bool | None = None

    def end_step(self) -> None:
        """Count a step of training; compare if this is due and no optimizer does so.

        Collective; blocking if it compares. Raises the errors of `compare`.
        """
        was_due = self._is_due
        self._steps += 1
        if not self.by_optimizer and self._is_due and (was_due or self.by_optimizer is False):
            self.compare()

    def begin_update(self) -> None:
        """Compare if this is due, before an optimizer updates the parameters.

        Collective; blocking if it compares. Raises the errors of `compare`.
        """
        self.by_optimizer = True
        if self._is_due:
            self.compare()

    @property
    def _is_due(self) -> bool:
        """Whether `digest_steps` steps have passed since the last comparison."""
        every = self._comm.config.digest_steps
        return bool(every) and not self.paused and self._steps - self._compared >= every

    def compare(self) -> None:
        """Compare the bits of all ranks; if they are equal, this costs a message of 16 bytes.

        Items that only some ranks have are ignored. If ranks differ by rounding, all ranks get the
        items of rank 0. If ranks differ, and `digest_action` is "stop", or there is no majority to
        restore from, all ranks raise ReplicaError. Collective, blocking.
        """
        steps, self._compared = self._steps - self._compared, self._steps
        written, self.written = self.written, False
        if self._comm.size == 1:
            return
        if self._fast is None:
            # A rank without xxhash would compute other digests of the same bits.
            self._fast = bool(self._comm.allreduce(np.array([has_xxh3()]), op="min")[0])
        items = {item.name: item for item in self._items()}
        digests = {name: digest([items[name].read()], fast=self._fast) for name in sorted(items)}
        if self._are_equal(digests):
            return
        hosts, by_rank, writes = zip(*self._comm.allgather_object(
            (socket.gethostname(), digests, written)))
        differences = _differences(by_rank)
        if not differences:
            return
        text = f"after {self._steps} steps, {_described(differences, hosts)}"
        different = [items[name] for name in sorted(set().union(*differences.values()))]
        if self._differ_by_rounding(different, steps, written=any(writes)):
            self._copy_all(different)
            text += ", by rounding, as a + b - b differs from a; copied from rank 0"
        else:
            self._restore(items, differences, text)
            text += "; restored from those"
        if self._comm.rank == 0:
            _log.warning("%s", text)

    def _restore(self, items: Mapping[str, Replicated], differences: "_Differences",
                 text: str) -> None:
        """Copy items from the majority; raise ReplicaError if this is not wanted or possible."""
        if self._comm.config.digest_action == "stop":
            raise ReplicaError(
                f"rank {self._comm.rank}: {text}. One tensor alone: look at that host's memory; "
                f"many: look for what ranks do differently, such as random numbers, the order of "
                f"a set, or a step that not all of them take. Go on from a checkpoint; "
                f"digest_action='restore' copies what differs from a rank of the majority")
        if not all(majority for _, majority in differences):
            raise ReplicaError(
                f"rank {self._comm.rank}: {text}. There is no majority to restore from; resume "
                f"from a checkpoint")
        for (odd, majority), names in differences.items():
            for name in names:
                self._copy(items[name], majority[0], odd)

    def _are_equal(self, digests: Mapping[str, int]) -> bool:
        """Return whether all ranks have the same digests; the same answer on all."""
        combined = np.uint64(digest(
            [f"{name} {number:x}\n".encode() for name, number in digests.items()]))
        # The minimum, and the complement of the maximum.
        both = np.array([combined, ~combined])
        self._comm.submit(
            Call("compare digests", f"after {self._steps} steps", self._model),
            lambda collectives: collectives.allreduce(both, op="min")).wait()
        return bool(both[0] == ~both[1])

    def _differ_by_rounding(self, items: Iterable[Replicated], steps: int, *,
                            written: bool) -> bool:
        """Return whether ranks differ by at most one unit of the last place per step.

        The unit is that of the largest number, since a small one may be the difference of two
        larger ones. A single number that no rank's program has `written` is more likely a flipped
        bit. `steps` have passed since the last comparison.
        """
        largest = 0.0
        # Largest difference in units, and number of numbers that differ.
        most = np.zeros(2)
        for item in items:
            if item.floats is None:
                return False
            own, other = item.floats(item.read()), item.floats(self._read_from(item, 0))
            largest = max(largest, np.abs(other).max(initial=0))
            distances = np.abs(own - other)
            most[0] = np.maximum(most[0], distances.max(initial=0) / item.precision)
            most[1] += np.count_nonzero(distances)
        self._comm.allreduce(most, op="max")
        return bool(most[0] <= steps * largest and (written or most[1] > 1))

    def _copy_all(self, items: Iterable[Replicated], root: int = 0) -> None:
        for item in items:
            self._copy(item, root, range(self._comm.size))

    def _copy(self, item: Replicated, root: int, ranks: Iterable[int]) -> None:
        raw = self._read_from(item, root)
        if self._comm.rank in ranks:
            item.write(raw)

    def _read_from(self, item: Replicated, root: int) -> Array:
        """Return the bytes of an item on rank `root`."""
        raw = item.read()
        if self._comm.rank != root:
            raw = np.empty_like(raw)
        return self._comm.broadcast(raw, root=root)

    def copy_from(self, root: int) -> None:
        """Copy the items that all ranks have from one rank to all ranks. Collective, blocking."""
        items = {item.name: item for item in self._items()}
        by_rank = self._comm.allgather_object(list(items))
        self._copy_all([items[name] for name in sorted(set(items).intersection(*by_rank))], root)


# Names of items that differ between ranks, by the ranks outside of the majority, and the majority.
# The majority is the largest group of ranks that agree; it is empty if two groups are the largest.
_Differences = Mapping[tuple[tuple[int, ...], tuple[int, ...]], Sequence[str]]


def _differences(by_rank: Sequence[Mapping[str, int]]) -> _Differences:
    """Compare all ranks' digests of the items that all ranks have."""
    differences = collections.defaultdict(list)
    for name in sorted(set(by_rank[0]).intersection(*by_rank)):
        ranks = collections.defaultdict(list)
        for rank, digests in enumerate(by_rank):
            ranks[digests[name]].append(rank)
        if len(ranks) > 1:
            first, second = sorted(ranks.values(), key=len, reverse=True)[:2]
            majority = tuple(first) if len(first) > len(second) else ()
            odd = tuple(rank for rank in range(len(by_rank)) if rank not in majority)
            differences[odd, majority].append(name)
    return differences


def _described(differences: _Differences, hosts: Sequence[str]) -> str:
    """Return a string with the ranks that differ, and the items in which they differ."""
    return "; ".join(
        f"{_ranks(odd, hosts)} "
        + (f"differ{'s' * (len(odd) == 1)} from ranks {first_few([*map(str, majority)], 8)}"
           if majority else "differ from each other, without a majority,")
        + f" in {first_few(names, 5)}" for (odd, majority), names in differences.items())


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + first_few(
        [f"{rank} on {hosts[rank]}" for rank in ranks], 8)


def replicated_in(nest: Any, name: str, leaf: Callable[[str, Any], Replicated | None],
                  ) -> Iterator[Replicated]:
    """Yield the arrays of a pytree, and the numbers in its mappings and lists.

    `leaf` returns the Replicated of an array, or None for other leaves, and for arrays that were
    yielded before.
    """
    for path, value in leaves(nest):
        full_name = name + path_text(path)
        if not isinstance(value, bool | int | float):
            item = leaf(full_name, value)
            if item is not None:
                yield item
        elif path and abs(value) < 2**63:
            holder = at(nest, path[:-1])
            # Numbers in a tuple cannot be replaced.
            if isinstance(holder, MutableMapping | list):
                yield _number(holder, path[-1], full_name)


def _number(holder: Any, key: Any, name: str) -> Replicated:
    """Return a Python number that can be compared and replaced."""
    value = np.array(holder[key])

    def write(raw: Array) -> None:
        holder[key] = raw.view(value.dtype)[0].item()

    return Replicated(name, lambda: value.reshape(1).view(np.uint8), write)
