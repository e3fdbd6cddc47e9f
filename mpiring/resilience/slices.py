"""State that is cut into slices, in a checkpoint: which rank's file has which ranges."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..memory.arrays import dtype_name, dtype_named
from ..sharding.sliced import Range, Sliced
from .checkpoint_file import Layout, map_file
from .publisher import slices_name
from .tree import Arrays, Bytes, Leaf, Outline

# Of a tensor: dtype, shape, and the rank that has saved a range, by a text of the range.
Entry = dict[str, Any]
# Name and length.
File = tuple[str, int]
_BLOCK_BYTES = 32 << 20


class SlicedTensors:
    """Tensors of which ranges are here: a kind of arrays in a tree.

    Args:
        refused: Explain that such a tensor cannot be saved here.
    """

    name = "sliced"

    def __init__(self, *, refused: bool = False) -> None:
        self._refused = refused

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of the whole tensor; None for other objects."""
        if not isinstance(x, Sliced):
            return None
        if self._refused:
            raise ConfigError("a Sliced, of which each rank has other ranges, cannot be saved "
                              "here; pass this state as sharded=")
        return dtype_name(x.dtype), x.shape

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of the whole tensor to `out`, a block at a time."""
        elements, block = out.view(x.dtype), max(1, _BLOCK_BYTES // x.dtype.itemsize)
        for start in range(0, x.size, block):
            stop = min(start + block, x.size)
            elements[start:stop] = x.read(start, stop)

    def build(self, dtype: str, shape: tuple[int, ...], data: Mapping[Range, Bytes]) -> Any:
        """Return a tensor of these pieces, which share the memory of `data`."""
        known = dtype_named(dtype, [dtype])
        return Sliced(shape, {ends: x.view(known) for ends, x in data.items()}, known)


def split_slices(outlined: Outline) -> tuple[Outline, dict[str, Sliced]]:
    """Return the outline of a tree without its Sliced leaves, and these by name."""
    slices = {name: leaf.value for name, leaf in outlined.leaves.items()
              if isinstance(leaf.value, Sliced)}
    others = {name: leaf for name, leaf in outlined.leaves.items() if name not in slices}
    return Outline(outlined.text, others), slices


def outline_of_pieces(slices: Mapping[str, Sliced]) -> Outline:
    """Return the outline of the file with this rank's pieces; its tree is None."""
    return Outline("null", {
        _piece(name, ends): Leaf(Arrays(), x, dtype_name(x.dtype), x.shape)
        for name, tensor in slices.items() for ends, x in tensor.pieces.items()})


def _piece(name: str, ends: Range) -> str:
    """Return the name of a piece in its file."""
    return f"{name}[{_text(ends)}]"


def _text(ends: Range) -> str:
    return f"{ends[0]}:{ends[1]}"


def ranges_of(slices: Mapping[str, Sliced]) -> dict[int, list[Range]]:
    """Return the ranges of this rank, by the number of their tensor; short, since it travels."""
    return {number: list(tensor.pieces) for number, tensor in enumerate(slices.values())
            if tensor.pieces}


def entries(slices: Mapping[str, Sliced],
            ranks: Sequence[Mapping[int, Sequence[Range]]]) -> dict[str, Entry]:
    """Return, for the manifest, which rank saves which ranges.

    Args:
        slices: This rank's.
        ranks: What `ranges_of` has returned on each rank.

    Raises:
        ConfigError: A range is saved by no rank, or by two.
    """
    by_name: dict[str, Entry] = {
        name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "ranks": {}}
        for name, tensor in slices.items()}
    names = list(slices)
    for rank, ranges in enumerate(ranks):
        for number, its_ranges in ranges.items():
            owners = by_name[names[number]]["ranks"]
            for ends in its_ranges:
                if _text(ends) in owners:
                    raise ConfigError(_twice(names[number], *ends, [owners[_text(ends)], rank]))
                owners[_text(ends)] = rank
    for name, entry in by_name.items():
        problem = _gap(name, entry, slices[name].size)
        if problem:
            raise ConfigError(problem)
    return by_name


def _gap(name: str, entry: Entry, size: int) -> str:
    """Return which elements of a tensor no rank has saved, or two have; or ""."""
    end, before = 0, 0
    for start, stop, rank in sorted((*ends, rank) for ends, rank in _owned(entry)):
        if start < end:
            return _twice(name, start, min(end, stop), [before, rank])
        if start > end:
            return _nowhere(name, end, start)
        end, before = stop, rank
    return _nowhere(name, end, size) if end != size else ""


def _twice(name: str, start: int, stop: int, ranks: Sequence[int]) -> str:
    return (f"elements {start} to {stop - 1} of {name} in sharded are saved by rank {ranks[0]} and "
            f"by rank {ranks[1]}; let each rank save its own slice")


def _nowhere(name: str, start: int, stop: int) -> str:
    return (f"elements {start} to {stop - 1} of {name} in sharded are saved by no rank; let each "
            f"rank save its own slice, and save on all ranks")


def _owned(entry: Entry) -> Iterator[tuple[Range, int]]:
    """Yield the ranges of a tensor, each with the rank that has saved it."""
    for text, rank in entry["ranks"].items():
        start, _, stop = text.partition(":")
        yield (int(start), int(stop)), rank


def refuse_gaps(by_name: Mapping[str, Entry]) -> None:
    """Raise CheckpointError if a manifest does not have all elements of all tensors once."""
    for name, entry in by_name.items():
        problem = _gap(name, entry, math.prod(entry["shape"]))
        if problem:
            raise CheckpointError(f"the manifest is not whole: {problem.partition(';')[0]}")


def files_of(by_name: Mapping[str, Entry], files: Mapping[str, File]) -> dict[int, File]:
    """Return the files with pieces, by the rank that has saved them.

    Args:
        files: All of a checkpoint, by their names without the hash.

    Raises:
        CheckpointError: One is not among them.
    """
    ranks = sorted({rank for entry in by_name.values() for _, rank in _owned(entry)})
    for rank in ranks:
        if slices_name(rank) not in files:
            raise CheckpointError(f"the manifest is not whole: it names no file of rank {rank}")
    return {rank: files[slices_name(rank)] for rank in ranks}


class MappedSlices:
    """The files with the pieces of all ranks, mapped into memory and read when they are looked at.

    Args:
        folder: The checkpoint.
        files: By the rank that has saved it.

    Raises:
        CheckpointError: A file is missing, cannot be read, or has another length.
    """

    def __init__(self, folder: Path, files: Mapping[int, File]) -> None:
        self._files = {rank: map_file(folder / name, nbytes)
                       for rank, (name, nbytes) in files.items()}

    def pieces(self, by_name: Mapping[str, Entry],
               layouts: Mapping[int, Layout]) -> dict[str, dict[Range, Bytes]]:
        """Return the bytes of the pieces, by the name of their tensor and their range.

        Args:
            by_name: Of the manifest.
            layouts: Where a rank's file has its pieces.

        Raises:
            CheckpointError: A file does not have the pieces that the manifest names.
        """
        pieces: dict[str, dict[Range, Bytes]] = {name: {} for name in by_name}
        for name, entry in by_name.items():
            for ends, rank in _owned(entry):
                bounds = layouts[rank].get(_piece(name, ends))
                if bounds is None:
                    raise CheckpointError(f"the file of rank {rank} does not have the elements "
                                          f"{_text(ends)} of {name}, which the manifest names")
                pieces[name][ends] = self._files[rank][bounds[0]:bounds[1]]
        return pieces
