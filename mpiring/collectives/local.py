"""Combines the vectors of a node's ranks, and copies the result to all of them, part by part."""

from collections.abc import Sequence

from ..memory.arrays import Array, slice_of
from ..memory.reduction import Combine

# Total length from which the vectors of a node are copied past the caches: the size of a
# processor's last-level cache. Measured.
_CACHES_BYTES = 32 << 20


class Local:
    """The vectors of a node's ranks; this rank exchanges a part of them with other nodes.

    The rank combines the vectors just before it sends a part, and stores each result as soon as it
    arrives, while other parts are on the wire. Each source is read once and each result is written
    once: one pass combines the node's contributions with the part from another node. The vectors
    are in shared memory; `chunks` are the ranges that the rank exchanges.
    """

    def __init__(self, vectors: Sequence[Array], rank: int, chunks: Sequence[slice],
                 within: Combine) -> None:
        self._vectors = vectors
        self._rank = rank
        self._chunks = chunks
        self._within = within
        self._is_long = len(vectors) * vectors[0].nbytes >= _CACHES_BYTES

    def collect(self, chunk: int, part: int, parts: int) -> None:
        """Combine the node's contributions to a part of a chunk, into this rank's vector."""
        sources = self._of_all(chunk, part, parts)
        self._within.combine(sources, sources[self._rank])

    def add(self, chunk: int, part: int, parts: int, received: Array, between: Combine | None, *,
            hands_out: bool) -> None:
        """Combine the node's contributions to a part, not yet collected, with a received part.

        The op `between` nodes is given if this completes the result. If `hands_out`, store a
        complete result into the vectors of all ranks of the node.
        """
        sources = self._of_all(chunk, part, parts)
        outs = sources if between and hands_out else [sources[self._rank]]
        (between or self._within).combine([*sources, received], *outs)

    def spread(self, chunk: int, part: int, parts: int) -> None:
        """Copy a result from this rank's vector to the node's other ranks."""
        outs = self._of_all(chunk, part, parts)
        self._within.copy(outs.pop(self._rank), *outs, past_caches=self._is_long)

    def _of_all(self, chunk: int, part: int, parts: int) -> list[Array]:
        return [slice_of(x[self._chunks[chunk]], part, parts) for x in self._vectors]
