"""Arrays as they lie in the files of a checkpoint, for those who need not calculate with them."""

from dataclasses import dataclass, field
from typing import Any

from .tree import KINDS, Bytes


@dataclass(frozen=True)
class Stored:
    """An array of any kind.

    Attributes:
        kind, dtype, shape: As in the tree.
        data: Its elements; None where only the tree is looked at.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"a {self.kind} of {self.dtype} and shape {self.shape}"


class StoredKind:
    """A kind of arrays that are left as they lie in the files.

    Args:
        name: Of the kind.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape; None for other objects."""
        return (x.dtype, x.shape) if isinstance(x, Stored) and x.kind == self.name else None

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements to `out`."""
        out[...] = x.data

    def build(self, dtype: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return an array of these elements."""
        return Stored(self.name, dtype, shape, data)


STORED_KINDS = tuple(map(StoredKind, KINDS))
