"""Keeps an adapter's gradients in buckets, and sends each bucket once it is full."""

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from .buckets import Bucket, TensorSpec, plan
from .collectives.agreement import Call
from .communicator import Communicator
from .handle import Handle
from .errors import GradientError
from .reducers import Mean, Reducer
from .statistics import Statistics


class Gradients:
    """Gradients as views into buckets, reduced in one agreed order while others are computed.

    At first, tensors are fused in the reverse of their order, which is that of
    most backward passes. After the first step the buckets are built anew, once,
    in the order in which rank 0's gradients really became ready.

    Args:
        tensors: The same, in the same order, on every rank.
        comm: The ranks to average over.
        bucket_bytes: Size of a bucket.
        reducer: How a bucket becomes its mean.
        deterministic: Keep the first plan, so that results do not depend on the order
            in which gradients became ready.

    Attributes:
        views: By name; replaced by new views when buckets are built anew.
        statistics: Of the last complete step.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, *,
                 bucket_bytes: int, reducer: Reducer | None, deterministic: bool) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._comm = comm
        self._reducer = reducer or Mean()
        self._bucket_bytes = bucket_bytes
        self._views: dict[str, NDArray[Any]] = {}
        self._home: dict[str, Bucket] = {}
        self._buckets: list[Bucket] = []
        self._retired: list[Bucket] = []
        self._steps = 0
        self._handles: list[Handle[None]] = []
        self._order: list[str] = []
        self._settled = deterministic
        self.views: Mapping[str, NDArray[Any]] = MappingProxyType(self._views)
        self.statistics = Statistics()
        self._build(tensors[::-1])
        comm.prepare()
        self._before = comm.statistics

    def ready(self, name: str) -> None:
        """Mark a gradient as written; send its bucket if it and all earlier ones are full.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        bucket = self._home.get(name)
        if bucket is None:
            close = difflib.get_close_matches(name, self._home, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self._home)}"
            raise GradientError(f"rank {self._comm.rank}: there is no gradient {name!r}; {hint}")
        if name not in bucket.missing:
            raise GradientError(
                f"rank {self._comm.rank}: gradient {name!r} was marked ready twice; call wait() "
                f"after each backward pass, and ready() once per gradient between two waits")
        self._drop_retired()
        bucket.missing.remove(name)
        self._order.append(name)
        while len(self._handles) < len(self._buckets):
            bucket = self._buckets[len(self._handles)]
            if bucket.missing:
                break
            self._handles.append(self._send(bucket))
        self._comm.poke()

    def wait(self) -> None:
        """Return when every gradient is the mean over ranks.

        Raises:
            GradientError: Some gradients were not marked ready; names them.

        Collective: yes. Blocking: yes.
        """
        missing = [name for name, bucket in self._home.items() if name in bucket.missing]
        if missing:
            raise GradientError(
                f"rank {self._comm.rank}: wait() with {len(missing)} of {len(self._home)} "
                f"gradients missing: {', '.join(missing)}; call ready(name) for each, also for "
                f"one that is zero in this step")
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        for bucket in self._buckets:
            bucket.expect_all()
        now = self._comm.statistics
        self.statistics, self._before = now - self._before, now
        if not self._settled:
            self._settle()
        self._order.clear()
        self._steps += 1

    def _send(self, bucket: Bucket) -> Handle[None]:
        detail = (f"{self._reducer!r} of {bucket.flat.dtype.name} {bucket.flat.shape} "
                  f"in step {self._steps}")
        return self._comm.submit(
            Call("reduce", detail, bucket.label),
            lambda collectives: self._reducer.reduce(collectives, bucket))

    def _settle(self) -> None:
        """Build the buckets anew in the order in which rank 0's gradients became ready."""
        self._settled = True
        order = self._comm.broadcast_object(self._order, root=0)
        tensors = [self._tensors[name] for name in order]
        if plan(tensors, self._bucket_bytes) != tuple(bucket.plan for bucket in self._buckets):
            self._retired = self._buckets
            self._build(tensors)
            for old in self._retired:
                for name, view in old.views.items():
                    self._views[name][...] = view
                old.retire()
        self._before = self._comm.statistics

    def _build(self, tensors: Sequence[TensorSpec]) -> None:
        self._buckets = [
            Bucket(index, bucket_plan, self._comm.empty)
            for index, bucket_plan in enumerate(plan(tensors, self._bucket_bytes))]
        for bucket in self._buckets:
            self._views.update(bucket.views)
            self._home.update(dict.fromkeys(bucket.views, bucket))

    def _drop_retired(self) -> None:
        """Give up the first buckets: whoever kept a view of them shall see NaN."""
        for bucket in self._retired:
            bucket.poison()
        self._retired = []
