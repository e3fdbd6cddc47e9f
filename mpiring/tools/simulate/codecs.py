"""Measures the cost and traffic of Reducers by running them on a few simulated nodes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...provisional import Collectives, Schedule, buckets, operations
from ...reducers import Cast, Compressor, Int8, OneBit, PowerSGD, TopK
from ...simulated.network import SimulatedNetwork
from .counted import counted
from .profile import Profile

# Each Reducer as a program writes it, its loss, and a function that makes one without warm-up. The
# loss is 1 for rounding to 16 bits, 2 for unbiased rounding to 8 bits, and 3 for an approximation
# with error feedback.
REDUCERS: Sequence[tuple[str, int, Callable[[], Compressor]]] = (
    ('Cast("bfloat16")', 1, lambda: Cast("bfloat16")),
    ("Int8()", 2, Int8),
    ("PowerSGD(rank=2)", 3, lambda: PowerSGD(rank=2, start_step=0)),
    ("OneBit()", 3, lambda: OneBit(warmup_steps=0)),
    ("TopK(0.001)", 3, lambda: TopK(0.001)))
# Large enough that the overhead of a call is negligible.
_SAMPLE_BYTES = 4 << 20
# Number of timed calls, of which the fastest counts. They follow a warm-up call.
_CALLS = 3


@dataclass(frozen=True)
class CodecPrices:
    """The time and traffic of a Reducer per byte of a gradient slice.

    Attributes:
        encode_s, decode_s: Seconds of computation before and after communication.
        reduced: Bytes to allreduce; each of N nodes sends 2(N-1)/N times this number.
        gathered: Bytes to allgather; each node sends N-1 times this number.
    """

    encode_s: float
    decode_s: float
    reduced: float
    gathered: float


def measured(profile: Profile) -> list[CodecPrices]:
    """Measure the costs of each of REDUCERS on this machine, for tensors as in the profile."""
    tensors = list(_sample(profile))
    return [_measured(make, tensors)
            for _, _, make in counted("simulate step: measure codecs", REDUCERS)]


def _sample(profile: Profile) -> Iterator[buckets.TensorSpec]:
    """Yield the largest tensors of the model, truncated to the length of the sample."""
    nbytes, dtype = 0, np.dtype(np.float32)
    for tensor in sorted(profile.tensors, key=lambda tensor: -tensor.size):
        if nbytes < _SAMPLE_BYTES:
            rows, *row = tensor.shape or (1,)
            row_bytes = max(1, dtype.itemsize * math.prod(row))
            shape = ((min(rows, _SAMPLE_BYTES // row_bytes), *row) if row_bytes <= _SAMPLE_BYTES
                     else (_SAMPLE_BYTES // dtype.itemsize,))
            yield (cut := replace(tensor, shape=shape, dtype=dtype))
            nbytes += dtype.itemsize * cut.size


def _measured(make: Callable[[], Compressor], tensors: Sequence[buckets.TensorSpec]) -> CodecPrices:
    two, three = (_Nodes(make, tensors, count) for count in (2, 3))
    encode_s, decode_s = two.seconds()
    # Each of 2 nodes sends reduced + gathered, and each of 3 sends 4/3 reduced + 2 gathered.
    sent = [nodes.sent() / two.nbytes for nodes in (two, three)]
    gathered = max(0.0, min(sent[0], 1.5 * sent[1] - 2 * sent[0]))
    return CodecPrices(encode_s / two.nbytes, decode_s / two.nbytes, sent[0] - gathered, gathered)


class _Nodes:
    """A few simulated nodes with one rank each and random gradients in one bucket."""

    def __init__(self, make: Callable[[], Compressor], tensors: Sequence[buckets.TensorSpec],
                 count: int) -> None:
        self._network = SimulatedNetwork(count)
        self._reducers = [make() for _ in range(count)]
        self._buckets = [
            buckets.Bucket(0, buckets.BucketPlan(tuple(tensors)), np.empty) for _ in range(count)]
        self.nbytes, self._operations = self._buckets[0].flat.nbytes, 0
        order = [tensor.name for tensor in tensors]
        self._run(lambda call: self._reducers[call.rank].attach_buckets(
            call, [self._buckets[call.rank]], order))
        self._reduce()

    def seconds(self) -> tuple[float, float]:
        """Return the shortest encoding and decoding times of rank 0 in a reduction, in seconds."""
        costs = []
        for _ in range(_CALLS):
            self._reduce()
            costs.append(self._reducers[0].take_cost())
        return min(cost.encode_s for cost in costs), min(cost.decode_s for cost in costs)

    def sent(self) -> int:
        """Return the number of bytes that a rank sends in a reduction."""
        before = self._network.bytes_sent[0]
        self._reduce()
        return self._network.bytes_sent[0] - before

    def _reduce(self) -> None:
        for rank, bucket in enumerate(self._buckets):
            for name, view in bucket.views.items():
                rng = np.random.default_rng((rank, len(name)))
                view[...] = rng.standard_normal(view.shape, np.float32)
            self._reducers[rank].take_cost()
        self._run(lambda call: self._reducers[call.rank].reduce(call, self._buckets[call.rank]))
        for reducer in self._reducers:
            reducer.commit_step(True)

    def _run(self, build: Callable[[Collectives], Schedule[None]]) -> None:
        nodes = [[rank] for rank in range(self._network.size)]
        self._operations += 1
        self._network.run(lambda net: build(
            Collectives(operations.alone(net, nodes), None, self._operations)))
