"""Agrees on what each rank writes of a checkpoint, before anything is copied."""

import collections
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arguments import whole_number
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.pytrees import leaves
from ..sharding.sliced import Range, Sliced
from .folder import where
from .publisher import SHARDED, slices_name, written_name
from .slices import Entry, SlicedTensors, entries, outline_of_pieces, ranges_of, split_slices
from .stored import STORED_KINDS
from .tree import Kind, Outline, outline, rebuild


@dataclass(frozen=True)
class Plan:
    """What this rank writes of a checkpoint.

    Attributes:
        step: Of the training.
        outlines: By the names of the files, without their hashes.
        names: Of the files of all ranks.
        slices: Which rank saves which ranges, by tensor; None without such state.
    """

    step: int
    outlines: Mapping[str, Outline]
    names: Sequence[str]
    slices: Mapping[str, Entry] | None


@dataclass(frozen=True)
class _Answer:
    """What a rank tells the others: `problem`, or all the rest.

    Attributes:
        ranges: See `ranges_of`.
        digest: Of the sharded state's tree; "" without such state.
    """

    problem: str
    step: int = 0
    has_own: bool = False
    ranges: Mapping[int, Sequence[Range]] = field(default_factory=dict)
    digest: str = ""


def agree(comm: Communicator, kinds: Sequence[Kind], step: int, replicated: Any, own: Any,
          sharded: Any) -> Plan:
    """Return what this rank is to write; see Checkpoints.save.

    Raises:
        ConfigError: The state of a rank cannot be saved, or does not fit that of the others; on
            all ranks.

    Collective: yes. Blocking: yes.
    """
    found: dict[str, Outline] = {}
    slices: dict[str, Sliced] = {}
    try:
        # JSON has no integers of NumPy.
        step = int(whole_number("step", step, 0))
        elsewhere = (*kinds, SlicedTensors(refused=True))
        found[written_name(None)] = outline(replicated, elsewhere, "replicated")
        if own is not None:
            found[written_name(comm.rank)] = outline(own, elsewhere, "own")
        if sharded is not None:
            found[SHARDED], slices = split_slices(
                outline(sharded, (*kinds, SlicedTensors()), "sharded"))
        answer = _Answer("", step, own is not None, ranges_of(slices), _digest(found))
    except ConfigError as exc:
        answer = _Answer(f"{where(comm)}: {exc}")
    answers: list[_Answer] = comm.allgather_object(answer, label="Checkpoints.save")
    for rank, its in enumerate(answers):
        if its.problem or its.step != answers[0].step:
            raise ConfigError(its.problem or f"rank {rank} saves step {its.step}, but rank 0 saves "
                                             f"step {answers[0].step}")
    _refuse_other_trees(comm, [its.digest for its in answers], found)
    located = None if sharded is None else entries(slices, [its.ranges for its in answers])
    if answer.ranges:
        found[slices_name(comm.rank)] = outline_of_pieces(slices)
    if comm.rank:
        found = {name: found[name] for name in found if name not in (written_name(None), SHARDED)}
    return Plan(step, found, list(_names(answers, sharded is not None)), located)


def _digest(found: Mapping[str, Outline]) -> str:
    return hashlib.sha256(found[SHARDED].text.encode()).hexdigest() if SHARDED in found else ""


def _names(answers: Sequence[_Answer], sharded: bool) -> Iterator[str]:
    """Yield the names of the files of all ranks."""
    yield written_name(None)
    if sharded:
        yield SHARDED
    for rank, its in enumerate(answers):
        if its.has_own:
            yield written_name(rank)
        if its.ranges:
            yield slices_name(rank)


def _refuse_other_trees(comm: Communicator, digests: Sequence[str],
                        found: Mapping[str, Outline]) -> None:
    """Raise ConfigError if the trees of sharded state differ; says where."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    text = found[SHARDED].text if SHARDED in found else ""
    first, second = (comm.broadcast_object(text, root=rank) for rank in (0, other))
    raise ConfigError(
        f"{_difference(first, second, other)}; sharded must be equal on all ranks, but for the "
        f"pieces in its Sliced leaves")


def _difference(first: str, second: str, rank: int) -> str:
    """Say where two trees differ."""
    if not first or not second:
        return (f"rank {0 if first else rank} saves sharded state, but rank "
                f"{rank if first else 0} does not")
    here, there = _described(first), _described(second)
    for path in {**here, **there}:
        if here.get(path) != there.get(path):
            return (f"sharded{path} is {here.get(path, 'missing')} on rank 0, but "
                    f"{there.get(path, 'missing')} on rank {rank}")
    return f"sharded has other dicts and lists on rank 0 than on rank {rank}"


def _described(text: str) -> dict[str, str]:
    """Return the leaves of a tree, as texts."""
    tree = rebuild(text, collections.defaultdict(lambda: None), STORED_KINDS)
    return {"".join(f"[{key!r}]" for key in path): f"{leaf!r:.80}" for path, leaf in leaves(tree)}
