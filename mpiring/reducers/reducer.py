"""Defines what a Reducer is: the seam between what is sent and when."""

from typing import Protocol

from ..buckets.bucket import Bucket
from ..operations.operation import Collectives
from ..transport.base import Schedule


class Reducer(Protocol):
    """Leaves the mean over ranks in a bucket.

    What has a memory from step to step builds on `compressor.Compressor`.
    """

    def __repr__(self) -> str:
        """Name it with its settings; compared across ranks."""

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule that replaces `bucket.flat` by its mean over ranks.

        Called once per bucket and step, in the same order on all ranks; the
        result must have the same bits on all of them, and be finite only if all ranks'
        contributions are.
        """


class Mean:
    """The plain mean, by the fastest allreduce."""

    def __repr__(self) -> str:
        return "Mean()"

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule of an allreduce of the bucket."""
        return collectives.allreduce(bucket.vector, op="mean")
