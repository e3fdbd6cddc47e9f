"""The Reducer protocol, the plain mean, and the assignment of Reducers to gradients."""

import fnmatch
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Protocol

from ..buckets.bucket import Bucket
from ..errors import ConfigError
from ..operations.collectives import Collectives
from ..transport.base import Schedule
from .compressor import Compressor


class Reducer(Protocol):
    """Replaces a bucket by its mean over ranks.

    If its attribute `on_gpus` is False, mpiring copies gradients from a GPU to host memory before
    it calls `reduce`, and copies their means back.

    If its attribute `queues` is True, its schedule consists of sums and collectives of the bucket,
    the same in each step. On a GPU, `reduce` is then called only for the first steps, and its work
    is queued again in the others, for which no host waits.

    A Reducer that keeps state between steps derives from `compressor.Compressor`. A Reducer may
    also have a method `scatter`, which gives each rank only its slice at lower cost; see
    `scatter_of`.
    """

    def __repr__(self) -> str:
        """Return the name and the settings of the Reducer, which ranks compare."""

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule that replaces `bucket.flat` by its mean over ranks.

        mpiring calls this method once per bucket and step, in the same order on all ranks. The
        result must have the same bits on all ranks. It may be finite only if the contributions of
        all ranks are finite.

        Args:
            collectives: Collectives of the operation, among all ranks.
            bucket: Bucket of gradients.
        """


class Mean:
    """The plain mean, by the fastest allreduce."""

    queues = True

    def __repr__(self) -> str:
        return "Mean()"

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule of an allreduce of the bucket.

        Args:
            collectives: Collective operations of the ranks.
            bucket: Bucket of gradients; `bucket.flat` becomes the mean.
        """
        return collectives.allreduce(bucket.vector, op="mean")

    def scatter(self, collectives: Collectives, bucket: Bucket) -> Schedule[Any]:
        """Return the schedule of a reduce-scatter of the bucket; see `scatter_of`.

        Args:
            collectives: Collective operations of the ranks.
            bucket: Bucket of gradients; this rank's slice of `bucket.flat` becomes the mean.
        """
        return collectives.reduce_scatter(
            bucket.vector, op="mean", bounds=bucket.bounds(collectives.size))


# A Reducer for all gradients, a Reducer for each name or pattern, or None for plain means.
ReducerSpec = Reducer | Mapping[str, Reducer] | None


def reducers_of(names: Iterable[str], spec: ReducerSpec) -> dict[str, Reducer]:
    """Return each gradient's Reducer.

    Args:
        spec: A Reducer for all gradients, None for plain means, or a mapping by name or file
            pattern (`*`, `?`, `[a-c]`). An exact name takes precedence; otherwise, the first
            pattern that matches applies. Gradients without a match get plain means.

    Raises:
        ConfigError: A value is not a Reducer, or a pattern matches no name.
    """
    names, plain = list(names), Mean()
    if not isinstance(spec, Mapping):
        reducer = plain if spec is None else spec
        _refuse_other_than_reducers(reducer)
        return dict.fromkeys(names, reducer)
    known = set(names)
    for pattern, reducer in spec.items():
        _refuse_other_than_reducers(reducer)
        if not isinstance(pattern, str):
            raise ConfigError(f"reducer[{pattern!r}]: expected the name of a parameter, or a "
                              f"pattern, as 'layer1*'")
        if pattern not in known and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"reducer[{pattern!r}]: no parameter has such a name; there are {', '.join(names)}")

    def of(name: str) -> Reducer:
        if name in spec:
            return spec[name]
        return next((reducer for pattern, reducer in spec.items()
                     if fnmatch.fnmatchcase(name, pattern)), plain)

    return {name: of(name) for name in names}


def _refuse_other_than_reducers(reducer: object) -> None:
    if isinstance(reducer, type) or not callable(getattr(reducer, "reduce", None)):
        raise ConfigError(
            f"reducer={reducer!r}: expected a Reducer, such as mpiring.reducers.PowerSGD(rank=2), "
            f"or a mapping from names or patterns to Reducers")


def compressors(reducers: Iterable[Reducer]) -> list[Compressor]:
    """Return the Reducers that compress, each of them once, in the given order."""
    different = {id(reducer): reducer for reducer in reducers}
    return [reducer for reducer in different.values() if isinstance(reducer, Compressor)]


def reduce_of(reducer: Reducer, collectives: Collectives, bucket: Bucket,
              method: str = "reduce") -> Schedule[Any]:
    """Return the schedule of a Reducer's method; raise ConfigError if it returns none."""
    schedule = getattr(reducer, method)(collectives, bucket)
    if not isinstance(schedule, Generator):
        raise ConfigError(
            f"rank {collectives.rank}: {method} of {reducer!r} returns a "
            f"{type(schedule).__name__}; expected a generator, as `yield from "
            f"collectives.allreduce(bucket.flat, op='mean')` makes of a method")
    return schedule


def scatter_of(reducer: Reducer, collectives: Collectives, bucket: Bucket) -> Schedule[Any]:
    """Return the schedule that leaves the mean in this rank's slice of `bucket.flat`.

    This rank's slice is number `rank` of `bucket.bounds(size)`. Its mean is the same as with
    `reduce`, but terms may be added in another order. The other slices are undefined afterwards.
    The schedule uses `reducer.scatter`, or `reducer.reduce` if there is no such method.
    """
    method = "scatter" if hasattr(reducer, "scatter") else "reduce"
    return reduce_of(reducer, collectives, bucket, method)
