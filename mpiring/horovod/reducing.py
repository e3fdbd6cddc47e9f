"""Chooses the Reducer for Horovod's arguments."""

from typing import Any

from .. import Communicator, ConfigError
from ..provisional import Collectives, Schedule, buckets, gpu, training
from ..reducers import Adasum as AdasumReducer
from ..reducers import Cast, Mean, Reducer
from .compression import Compression
from .ops import OP_NAMES, Adasum, Average, Sum


class Combined:
    """Combines gradients by `op`, which is a reduction of `Communicator.allreduce`.

    All gradients are divided by `predivide` before the sum, and the sum is divided by the number of
    ranks over `predivide`.
    """

    queues = True

    def __init__(self, op: str, predivide: float = 1.0) -> None:
        self.op, self.predivide = op, predivide

    def __repr__(self) -> str:
        return f"Combined({self.op!r}, predivide={self.predivide})"

    def reduce(self, collectives: Collectives, bucket: buckets.Bucket) -> Schedule[None]:
        """Return the schedule of an allreduce of the bucket."""
        if self.predivide == 1:
            return collectives.allreduce(bucket.vector, op=self.op)
        return self._predivided(collectives.allreduce(bucket.vector, op="sum"), bucket.vector,
                                collectives.size)

    def _predivided(self, summing: Schedule[None], x: Any, size: int) -> Schedule[None]:
        gpu.divide(x, self.predivide)
        yield from summing
        gpu.divide(x, size / self.predivide)


def reducer_for(op: int, compression: Any, predivide: float,
                comm: Communicator | None = None) -> Reducer:
    """Return the Reducer for the arguments of a DistributedOptimizer.

    Without compression, it is the Reducer that the setting of `comm` names.

    For Sum, the Reducer computes a mean, as for Average; see SumWeighing. Only means and sums are
    compressed. Compressed sums ignore `predivide`, since they do not need it. Raises ConfigError if
    there is no such op or compression.
    """
    reduces = not isinstance(compression, type) and callable(getattr(compression, "reduce", None))
    if not reduces and compression not in (Compression.none, Compression.fp16):
        raise ConfigError(
            f"compression={compression!r}: gradients are compressed when they are fused, not one "
            f"by one; pass Compression.none, Compression.fp16, or a Reducer such as "
            f"mpiring.reducers.PowerSGD(rank=2)")
    if op == Adasum:
        return AdasumReducer()
    if op not in OP_NAMES:
        raise ConfigError(f"op={op!r}: expected one of Average, Sum, Adasum, Min, Max, Product")
    if op not in (Average, Sum):
        return Combined(OP_NAMES[op])
    if compression is Compression.none:
        named = comm and training.or_setting(None, comm)
        if named:
            return named
        return Mean() if predivide == 1 else Combined("mean", predivide)
    return Cast("float16") if compression is Compression.fp16 else compression
