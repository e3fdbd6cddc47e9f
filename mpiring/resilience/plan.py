"""Agrees on what each rank writes of a checkpoint, before anything is copied."""

import collections
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import whole_number
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.pytrees import leaves
from ..sharding.sliced import Range, Sliced
from .folder import on_all_ranks, where
from .publisher import SHARDED, slices_name, written_name
from .slices import Entry, SlicedTensors, entries, outline_of_pieces, ranges_of, split_slices
from .tree import STORED_KINDS, Kind, Outline, outline, rebuild


@dataclass(frozen=True)
class SavePlan:
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
    """What a rank tells the others.

    Attributes:
        names: Of the files that it writes, if it is not rank 0: those of its own state.
        ranges: See `ranges_of`.
        digest: Of the sharded state's tree; "" without such state.
    """

    step: int
    names: Sequence[str]
    ranges: Mapping[int, Sequence[Range]]
    digest: str


def agree(comm: Communicator, kinds: Sequence[Kind], step: int, replicated: Any, own: Any,
          sharded: Any) -> SavePlan:
    """Return what this rank is to write; see Checkpoints.save.

    Raises:
        ConfigError: The state of a rank cannot be saved, or does not fit that of the others; on
            all ranks.

    Collective: yes. Blocking: yes.
    """
    outlines: dict[str, Outline] = {}
    slices: dict[str, Sliced] = {}

    def describe() -> _Answer:
        # JSON has no integers of NumPy.
        number = int(whole_number("step", step, 0))
        elsewhere = (*kinds, SlicedTensors(refused=True))
        outlines[written_name(None)] = outline(replicated, elsewhere, "replicated")
        if own is not None:
            outlines[written_name(comm.rank)] = outline(own, elsewhere, "own")
        digest = ""
        if sharded is not None:
            outlines[SHARDED], tensors = split_slices(
                outline(sharded, (*kinds, SlicedTensors()), "sharded"))
            slices.update(tensors)
            digest = hashlib.sha256(outlines[SHARDED].text.encode()).hexdigest()
        if any(tensor.pieces for tensor in slices.values()):
            outlines[slices_name(comm.rank)] = outline_of_pieces(slices)
        if comm.rank:
            outlines.pop(written_name(None))
        names = [name for name in outlines if comm.rank == 0 or name != SHARDED]
        return _Answer(number, names, ranges_of(slices), digest)

    answers = on_all_ranks(comm, "Checkpoints.save", describe, ConfigError, where(comm))
    for rank, answer in enumerate(answers):
        if answer.step != answers[0].step:
            raise ConfigError(f"rank {rank} saves step {answer.step}, but rank 0 saves step "
                              f"{answers[0].step}")
    _refuse_other_trees(comm, [answer.digest for answer in answers], outlines)
    located = None if sharded is None else entries(slices, [answer.ranges for answer in answers])
    names = [name for answer in answers for name in answer.names]
    return SavePlan(answers[0].step, {name: outlines[name] for name in answers[comm.rank].names},
                    names, located)


def _refuse_other_trees(comm: Communicator, digests: Sequence[str],
                        outlines: Mapping[str, Outline]) -> None:
    """Raise ConfigError if the trees of sharded state differ; says where."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    text = outlines[SHARDED].text if SHARDED in outlines else ""
    first, second = (comm.broadcast_object(text, root=rank) for rank in (0, other))
    raise ConfigError(
        f"{_difference(first, second, other)}; sharded must be equal on all ranks, but for the "
        f"pieces in its Sliced leaves")


def _difference(first: str, second: str, rank: int) -> str:
    """Say where two trees differ."""
    if not first or not second:
        return (f"rank {0 if first else rank} saves sharded state, but rank "
                f"{rank if first else 0} does not")
    ones, others = _described(first), _described(second)
    for path in {**ones, **others}:
        if ones.get(path) != others.get(path):
            return (f"sharded{path} is {ones.get(path, 'missing')} on rank 0, but "
                    f"{others.get(path, 'missing')} on rank {rank}")
    return f"sharded has other dicts and lists on rank 0 than on rank {rank}"


def _described(text: str) -> dict[str, str]:
    """Return the leaves of a tree, as texts."""
    tree = rebuild(text, collections.defaultdict(lambda: None), STORED_KINDS)
    return {"".join(f"[{key!r}]" for key in path): f"{leaf!r:.80}" for path, leaf in leaves(tree)}
