"""Averages a bucket as it is: what all other Reducers are compared with."""

from ..buckets.bucket import Bucket
from ..operations.operation import Collectives
from ..transport.base import Schedule


class Mean:
    """The plain mean, by the fastest allreduce."""

    def __repr__(self) -> str:
        return "Mean()"

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule of an allreduce of the bucket."""
        return collectives.allreduce(bucket.vector, op="mean")
