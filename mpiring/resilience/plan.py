"""Determines the files that each rank writes for a checkpoint, before the state is copied."""

import collections
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import whole_number
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.arrays import dtype_name
from ..memory.digest import has_xxh3
from ..memory.pytrees import leaves, path_text
from ..sharding.sliced import Range, Sliced
from .folder import on_all_ranks, rank_and_host
from .manifest import (REPLICATED, SHARDED, Entry, gap, own_name, piece_name, range_text,
                       slices_name)
from .tree import STORED_KINDS, Arrays, Kind, Leaf, Outline, SlicedTensors, outline, rebuild

# Index of a tensor, and start and stop of a range of it.
OwnRange = tuple[int, int, int]


@dataclass(frozen=True)
class SavePlan:
    """The files that this rank writes for a checkpoint.

    Names of files lack their hashes. `names` are those of all ranks. `slices` has the ranges of
    each tensor, with the ranks that save them; None without sharded state. `fast` stands for XXH3,
    which all ranks must have.
    """

    step: int
    outlines: Mapping[str, Outline]
    names: Sequence[str]
    slices: Mapping[str, Entry] | None
    fast: bool


def agree(comm: Communicator, kinds: Sequence[Kind], step: int, replicated: Any, own: Any,
          sharded: Any) -> SavePlan:
    """Return the files that this rank must write; see Checkpoints.save.

    Raises:
        ConfigError: The state of a rank cannot be saved, or the ranks' states do not fit together.
            Raised on all ranks.

    Collective: yes. Blocking: yes.
    """
    outlines: dict[str, Outline] = {}
    slices: dict[str, Sliced] = {}

    def describe() -> tuple[int, Sequence[str], Sequence[OwnRange], str, bool]:
        # JSON does not support NumPy integers.
        number = int(whole_number("step", step, 0))
        unsliced_kinds = (*kinds, SlicedTensors(refused=True))
        outlines[REPLICATED] = outline(replicated, unsliced_kinds, "replicated")
        if own is not None:
            outlines[own_name(comm.rank)] = outline(own, unsliced_kinds, "own")
        digest = ""
        if sharded is not None:
            tree = outline(sharded, (*kinds, SlicedTensors()), "sharded")
            slices.update({name: leaf.value for name, leaf in tree.leaves.items()
                           if isinstance(leaf.value, Sliced)})
            outlines[SHARDED] = Outline(tree.text, {
                name: leaf for name, leaf in tree.leaves.items() if name not in slices})
            digest = hashlib.sha256(tree.text.encode()).hexdigest()
        pieces = {piece_name(name, ends): Leaf(Arrays(), x, dtype_name(x.dtype), x.shape)
                  for name, tensor in slices.items() for ends, x in tensor.pieces.items()}
        if pieces:
            outlines[slices_name(comm.rank)] = Outline("null", pieces)
        names = [name for name in outlines if comm.rank == 0 or name not in (REPLICATED, SHARDED)]
        ranges = [(index, *ends) for index, tensor in enumerate(slices.values())
                  for ends in tensor.pieces]
        return number, names, ranges, digest, has_xxh3()

    steps, names, ranges, digests, fast = zip(
        *on_all_ranks(comm, "Checkpoints.save", describe, ConfigError, rank_and_host(comm)))
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise ConfigError(f"rank {rank} saves step {other}, but rank 0 saves step {steps[0]}")
    _refuse_other_trees(comm, digests, outlines)
    return SavePlan(steps[0], {name: outlines[name] for name in names[comm.rank]},
                    [name for of_rank in names for name in of_rank],
                    None if sharded is None else _entries(slices, ranges), all(fast))


def _refuse_other_trees(comm: Communicator, digests: Sequence[str],
                        outlines: Mapping[str, Outline]) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            text = outlines[SHARDED].text if SHARDED in outlines else ""
            first, second = (comm.broadcast_object(text, root=root) for root in (0, rank))
            raise ConfigError(
                f"{_difference(first, second, rank)}; sharded must be equal on all ranks, but for "
                f"the pieces in its Sliced leaves")


def _difference(first: str, second: str, rank: int) -> str:
    """Return the first difference of the trees of rank 0 and of another rank."""
    if not first or not second:
        return (f"rank {0 if first else rank} saves sharded state, but rank "
                f"{rank if first else 0} does not")
    leaves_0, leaves_rank = _leaf_texts(first), _leaf_texts(second)
    for path in {**leaves_0, **leaves_rank}:
        if leaves_0.get(path) != leaves_rank.get(path):
            return (f"sharded{path} is {leaves_0.get(path, 'missing')} on rank 0, but "
                    f"{leaves_rank.get(path, 'missing')} on rank {rank}")
    return f"sharded has other dicts and lists on rank 0 than on rank {rank}"


def _leaf_texts(text: str) -> dict[str, str]:
    tree = rebuild(text, collections.defaultdict(lambda: None), STORED_KINDS)
    return {path_text(path): f"{leaf!r:.80}" for path, leaf in leaves(tree)}


def _entries(slices: Mapping[str, Sliced], ranks: Sequence[Sequence[OwnRange]]) -> dict[str, Entry]:
    """Return the ranges of each tensor, with the ranks that save them, from each rank's ranges.

    Raises ConfigError if a range is saved by no rank, or by two.
    """
    owned: list[list[tuple[Range, int]]] = [[] for _ in slices]
    for rank, ranges in enumerate(ranks):
        for number, start, stop in ranges:
            owned[number].append(((start, stop), rank))
    entries = {}
    for (name, tensor), owned_by in zip(slices.items(), owned):
        problem = gap(name, owned_by, tensor.size)
        if problem:
            raise ConfigError(problem)
        entries[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape),
                         "ranks": {range_text(ends): rank for ends, rank in owned_by}}
    return entries
