"""Combines the vectors of a node's ranks, and copies the result to all of them, part by part."""

from collections.abc import Sequence

from ..memory.arrays import Array
from ..memory.reduction import Combine

# Longer vectors of a node are copied around the caches: the size of a processor's last-level
# cache. Measured.
_CACHES_BYTES = 32 << 20


class Local:
    """The vectors of a node, of which one rank exchanges a part with other nodes.

    The rank combines the vectors just before it sends a part, and stores each result as soon as
    it arrives, while other parts are on the wire. Each source is read once and each result is
    written once: one pass combines the node's contributions with the part from another node.

    Args:
        vectors: Vector of each rank of the node, in shared memory.
        rank: Number of this rank's vector.
        chunks: Ranges of the vectors that the rank exchanges.
        within: Implementation of the op on the node; also copies.
    """

    def __init__(self, vectors: Sequence[Array], rank: int, chunks: Sequence[slice],
                 within: Combine) -> None:
        self._vectors = vectors
        self._rank = rank
        self._starts = [chunk.start for chunk in chunks]
        self._within = within
        self._is_long = len(vectors) * vectors[0].nbytes >= _CACHES_BYTES

    def collect(self, i: int, part: slice) -> None:
        """Combine the node's contributions to a part of chunk `i`, into this rank's vector."""
        sources = self._of_all(i, part)
        self._within.combine(sources, sources[self._rank])

    def add(self, i: int, part: slice, received: Array, between: Combine | None, *,
            hands_out: bool) -> None:
        """Combine the node's contributions to a part, not yet collected, with a received part.

        Args:
            i: Number of the chunk.
            part: Range within the chunk.
            received: Part from another node.
            between: Implementation of the op between nodes, if this completes the result.
            hands_out: If true, store a complete result into the vectors of all ranks of the node.
        """
        sources = self._of_all(i, part)
        outs = sources if between and hands_out else [sources[self._rank]]
        (between or self._within).combine([*sources, received], *outs)

    def spread(self, i: int, part: slice) -> None:
        """Copy a result from this rank's vector to the node's other ranks."""
        outs = self._of_all(i, part)
        self._within.copy(outs.pop(self._rank), *outs, past_caches=self._is_long)

    def _of_all(self, i: int, part: slice) -> list[Array]:
        start = self._starts[i]
        return [x[start + part.start:start + part.stop] for x in self._vectors]
