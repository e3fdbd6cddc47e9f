"""Combines the vectors of a node's ranks, and hands the result out to them, part by part."""

from collections.abc import Sequence

from ..memory.arrays import Array
from ..memory.reduction import Combine

# From here on, copies to the vectors of a node go past the caches: the length of a processor's
# last cache. Measured.
_CACHES_BYTES = 32 << 20


class Local:
    """The vectors of a node, of which one rank exchanges a part with other nodes.

    The rank combines the vectors just before it sends a part, and stores a result as soon as it
    has one, while other parts are on the wire. Each source is read once, and each result written
    once: the node's contributions are combined in one pass with the part from another node.

    Args:
        vectors: Per rank of the node, its vector, in memory that they share.
        rank: The number of this rank's vector.
        chunks: What the rank exchanges, as ranges of the vectors.
        within: The op on the node; also copies.
    """

    def __init__(self, vectors: Sequence[Array], rank: int, chunks: Sequence[slice],
                 within: Combine) -> None:
        self._vectors = vectors
        self._rank = rank
        self._starts = [chunk.start for chunk in chunks]
        self._within = within
        self._is_long = len(vectors) * vectors[0].nbytes >= _CACHES_BYTES

    def collect(self, i: int, part: slice) -> None:
        """Combine what the node has of a part of chunk `i`, into this rank's vector."""
        sources = self._of_all(i, part)
        self._within.combine(sources, sources[self._rank])

    def add(self, i: int, part: slice, received: Array, between: Combine | None, *,
            hands_out: bool) -> None:
        """Combine what the node has of a part, not collected, and then what came from others.

        Args:
            between: The op on what all nodes have, if that completes the result.
            hands_out: Store a complete result into the vectors of all ranks of the node.
        """
        sources = self._of_all(i, part)
        outs = sources if between and hands_out else [sources[self._rank]]
        (between or self._within).combine([*sources, received], *outs)

    def spread(self, i: int, part: slice) -> None:
        """Copy a result in this rank's vector to the node's other ranks."""
        outs = self._of_all(i, part)
        self._within.copy(outs.pop(self._rank), *outs, past_caches=self._is_long)

    def _of_all(self, i: int, part: slice) -> list[Array]:
        start = self._starts[i]
        return [x[start + part.start:start + part.stop] for x in self._vectors]
