"""What a compressing Reducer works with while nodes exchange a slice of a bucket."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import DTypeLike

from ..sharding.state import SliceState
from ..memory.arrays import Array
from ..transport.base import Channel

_LINE = 64


@dataclass
class Cost:
    """Cost of compression on this rank.

    Attributes:
        encode_s, decode_s: Seconds of computing before and after messages; on a GPU, of queueing
            it there.
        wire_s: Seconds of waiting for messages; those of buckets under way at once add up.
    """

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.encode_s + other.encode_s, self.wire_s + other.wire_s,
                    self.decode_s + other.decode_s)


@dataclass(frozen=True)
class SliceExchange:
    """The exchange of one slice between nodes.

    Attributes:
        net: Channel of the ranks that have the slice, one of each node.
        state: This rank's state of the slice.
        borrow: Lends scratch memory, given the number of elements and their dtype.
        step: Steps that have counted.
        position: Numbers of the bucket, of the slice, and of what it is cut into: the same on all
            nodes, and different for all that random numbers are drawn for.
        cost: Is added to.
    """

    net: Channel
    state: SliceState
    borrow: Callable[[int, DTypeLike], AbstractContextManager[Array]]
    step: int
    position: tuple[int, ...]
    cost: Cost = field(default_factory=Cost)

    def seeded(self, seed: int) -> "SliceExchange":
        """Return the same exchange, with other random numbers."""
        return replace(self, position=(*self.position, seed))

    def key(self, *numbers: int) -> int:
        """Return 64 bits that differ with the step, the position, the rank, and `numbers`."""
        text = repr((self.step, self.position, self.net.rank, numbers)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @contextmanager
    def borrow_bytes(self, sizes: Sequence[int]) -> Iterator[list[Array]]:
        """Lend vectors of these sizes, which begin on cache lines."""
        ends = list(itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes))
        with self.borrow(ends[-1], np.uint8) as memory:
            yield [memory[start:start + size] for start, size in zip([0, *ends], sizes)]

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the seconds within as encoding."""
        began = time.perf_counter()
        yield
        self.cost.encode_s += time.perf_counter() - began

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the seconds within as decoding."""
        began = time.perf_counter()
        yield
        self.cost.decode_s += time.perf_counter() - began
