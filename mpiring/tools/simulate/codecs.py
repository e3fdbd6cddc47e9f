"""Measures what Reducers cost and send, by running them between a few simulated nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ...buckets.bucket import Bucket, BucketPlan, TensorSpec
from ...collectives.native import Turns
from ...memory.scratch import Scratch
from ...operations.operation import Collectives
from ...operations.resources import Resources, Transport
from ...operations.windows import Windows
from ...reducers import Cast, Compressor, Int8, OneBit, PowerSGD, TopK
from ...simulated.network import SimulatedNetwork
from ...transport.base import Channel, Schedule
from .algorithms import SimulatedTransport
from .profile import Profile

# Reducers as programs write them, with their loss and how to make one that compresses from the
# first step on. The loss is 1 if they round to 16 bits, 2 if they round to 8 bits, right on
# average, and 3 if they approximate, with errors fed back.
REDUCERS: Sequence[tuple[str, int, Callable[[], Compressor]]] = (
    ('Cast("bfloat16")', 1, lambda: Cast("bfloat16")),
    ("Int8()", 2, Int8),
    ("PowerSGD(rank=2)", 3, lambda: PowerSGD(rank=2, start_step=0)),
    ("OneBit()", 3, lambda: OneBit(warmup_steps=0)),
    ("TopK(0.001)", 3, lambda: TopK(0.001)))
# Long enough that the cost of a call is a small part.
_SAMPLE_BYTES = 4 << 20
# The fastest of these calls counts; one before compiles, and touches memory.
_CALLS = 3


@dataclass(frozen=True)
class CodecPrices:
    """The costs and bytes of a Reducer, for each byte of a slice of gradients.

    Attributes:
        encode_s, decode_s: Seconds of computing before and after the messages.
        reduced: Bytes of which each of N nodes sends 2(N-1)/N, as in an allreduce.
        gathered: Bytes of which each node sends N-1 times as much, as in an allgather.
    """

    encode_s: float
    decode_s: float
    reduced: float
    gathered: float


def measured(profile: Profile) -> list[CodecPrices]:
    """Return the costs of each of REDUCERS on this machine.

    Args:
        profile: Profile of the model whose tensors are compressed, in their shapes.
    """
    tensors = list(_sample(profile))
    return [_measured(make, tensors) for _, _, make in REDUCERS]


def _sample(profile: Profile) -> Iterator[TensorSpec]:
    """Yield tensors of the model, the longest first and cut where they are too long."""
    nbytes, dtype = 0, np.dtype(np.float32)
    for tensor in sorted(profile.tensors, key=lambda tensor: -tensor.size):
        if nbytes < _SAMPLE_BYTES:
            row_bytes = max(1, dtype.itemsize * tensor.size // max(1, tensor.shape[0])
                            if tensor.shape else 1)
            rows = max(1, _SAMPLE_BYTES // row_bytes)
            shape = (min(rows, tensor.shape[0]), *tensor.shape[1:]) if tensor.shape else ()
            yield (cut := replace(tensor, shape=shape, dtype=dtype))
            nbytes += dtype.itemsize * cut.size


def _measured(make: Callable[[], Compressor], tensors: Sequence[TensorSpec]) -> CodecPrices:
    two, three = (_Nodes(make, tensors, count) for count in (2, 3))
    encode_s, decode_s = two.seconds()
    # A node sends `reduced + gathered` to one other, and 4/3 and 2 times as much to two.
    sent = [nodes.sent() / two.nbytes for nodes in (two, three)]
    gathered = max(0.0, min(sent[0], 1.5 * sent[1] - 2 * sent[0]))
    return CodecPrices(encode_s / two.nbytes, decode_s / two.nbytes, sent[0] - gathered, gathered)


class _Nodes:
    """A few simulated nodes of a rank each, with random gradients in one bucket.

    Args:
        make: Returns a Reducer.
        tensors: Tensors of the bucket.
        count: Number of nodes.

    Attributes:
        nbytes: Length of the bucket.
    """

    def __init__(self, make: Callable[[], Compressor], tensors: Sequence[TensorSpec],
                 count: int) -> None:
        self._network = SimulatedNetwork(count)
        self._reducers = [make() for _ in range(count)]
        self._buckets = [
            Bucket(0, BucketPlan(tuple(tensors)), np.empty) for _ in range(count)]
        self.nbytes, self._operations = self._buckets[0].flat.nbytes, 0
        order = [tensor.name for tensor in tensors]
        self._run(lambda call: self._reducers[call.rank].attach_buckets(
            call, [self._buckets[call.rank]], order))
        self._reduce()

    def seconds(self) -> tuple[float, float]:
        """Return the least seconds of encoding and of decoding in a rank's reduction."""
        costs = []
        for _ in range(_CALLS):
            self._reduce()
            costs.append(self._reducers[0].take_cost())
        return min(cost.encode_s for cost in costs), min(cost.decode_s for cost in costs)

    def sent(self) -> int:
        """Return how many bytes a rank sends in a reduction."""
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

        def program(net: Channel) -> Schedule[None]:
            transport = cast(Transport, SimulatedTransport(net))
            return build(Collectives(Resources(
                transport, Turns(), Scratch(keep=0), Windows(), range(net.size), nodes), None,
                self._operations))

        self._network.run(program)
