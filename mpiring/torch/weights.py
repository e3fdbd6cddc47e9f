"""Keeps a model's weights in buckets, slices of which the ranks update and hand to the others."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import ConfigError
from ..gpu.device import await_event
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..text import first_few
from ..training.averager import Averager
from ..transport.base import Schedule
from .averaging import in_shape_of
from .devices import gpu_of, marker_of
from .tensors import seen_as_tensor

_REMEDY = ("give param_groups the same settings on every rank, and write weights on all ranks, or "
           "in a block `with optimizer.writing_weights():`")


class WeightBuckets:
    """Weights as views into buckets that are cut as those of their gradients are.

    Rank r has the say over slice r of each: it updates this slice, and `send` copies it to the
    others.

    Args:
        parameters: By name: those whose gradients are averaged. Their `data` become the views.
        gradients: What averages them.
        comm: The ranks.

    Attributes:
        comm: As given.
        buckets: In the order of the gradients'.
        made_with: By what the slices that are sent are made, in words; compared across ranks.
        written_before: What the user had written when these buckets took the place of others.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, parameters: Mapping[str, Parameter], gradients: Averager,
                 comm: Communicator) -> None:
        self._parameters, self.comm = dict(parameters), comm
        self._submit = gradients.tally.submit
        first = next(iter(parameters.values()))
        self._device = gpu_of(first)
        self._mark = marker_of(first)
        self.buckets = [Bucket(index, bucket.plan, self._empty, self._device)
                        for index, bucket in enumerate(gradients.buckets)]
        if self._device is not None:
            # CuPy clears them, on a stream of its own.
            await_event(self._device.gpu.mark())
        self.made_with, self.written_before = "", list[str]()
        # What the user has written, in words; compared, too.
        self._written = ""
        self._versions: dict[str, int] = {}
        self._handles: dict[int, Handle[None]] = {}
        self._views: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            for name, view in bucket.views.items():
                p = self._parameters[name]
                # A storage of its own, so that torch.save of one writes no others.
                self._views[name] = in_shape_of(p, seen_as_tensor(view.reshape(-1)))
        self._fill()

    def _empty(self, n: int, dtype: "np.dtype[Any]") -> Any:
        """Return the memory of a bucket."""
        return self.comm.empty(n, dtype, device=self._device or "cpu")

    def _fill(self) -> None:
        """Move the weights into the buckets."""
        for name in self._views:
            self._adopt(name)
        self._note()

    def _note(self) -> None:
        """Note that the weights are those that all ranks have."""
        self._versions = {name: self._parameters[name]._version for name in self._views}
        self.written_before = []

    def written(self) -> list[str]:
        """Return which weights the user has written since the update, as far as PyTorch notes it.

        Collective: no.
        """
        found = [*self.written_before]
        for name, version in self._versions.items():
            p = self._parameters[name]
            if name not in found and (
                    p._version != version or p.data_ptr() != self._views[name].data_ptr()):
                found.append(name)
        return found

    def own(self, index: int) -> slice:
        """Return which elements of a bucket are this rank's."""
        bounds, rank = self.buckets[index].bounds(self.comm.size), self.comm.rank
        return slice(bounds[rank], bounds[rank + 1])

    def follow(self) -> None:
        """Prepare for an update of slices.

        Take over weights where the user has given a parameter other memory (`p.data = ...`). What
        the user has written is compared across ranks when slices are sent: of what one rank alone
        has written the update would leave its own slice.

        Raises:
            ConfigError: They do not fit.

        Collective: yes.
        """
        written = self.written()
        self._adopt_moved(written)
        self._written = (
            f" after writes outside of writing_weights() to {first_few(written, 3)};"
            if written else "")

    def _adopt_moved(self, names: Sequence[str]) -> None:
        for name in names:
            if self._parameters[name].data_ptr() != self._views[name].data_ptr():
                self._adopt(name)

    def _adopt(self, name: str) -> None:
        p, view = self._parameters[name], self._views[name]
        if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
            raise ConfigError(
                f"rank {self.comm.rank}: the data of {name} were replaced by {p.dtype} "
                f"{tuple(p.shape)} on {p.device}, which do not fit its slices; expected "
                f"{view.dtype} {tuple(view.shape)} on {view.device}: replace the parameter, or "
                f"write into it: p.data.copy_(...)")
        view.copy_(p.data)
        p.data = view

    def updated(self) -> None:
        """Note that this rank's slices have changed: graphs that were kept do not hold any more.

        Collective: no.
        """
        torch.autograd.graph.increment_version(self._parameters.values())
        self._note()

    def send(self, index: int) -> None:
        """Begin to copy each rank's slice of a bucket to all.

        Collective: yes. Blocking: no.
        """
        bucket = self.buckets[index]
        self._send(bucket, bucket.bounds(self.comm.size))

    def _send(self, bucket: Bucket, bounds: Sequence[int]) -> None:
        if not bucket.plan.size:
            return
        vector = bucket.vector
        call = Call("weights", f"{bucket.plan.dtype.name} ({bucket.plan.size},){self._written} "
                    f"{self.made_with}",
                    bucket.label, bucket.flat.nbytes, remedy=_REMEDY)
        self._handles[bucket.index] = self._submit(
            call,
            lambda collectives: self._allgather(collectives, vector, bounds),
            device=bucket.device, ready=() if self._mark is None else (self._mark(),))

    def _allgather(self, collectives: Collectives, vector: Any,
                   bounds: Sequence[int]) -> Schedule[None]:
        return collectives.allgather(vector, bounds=bounds)

    def wait(self, index: int) -> None:
        """Return when all of a bucket is there, if it was sent.

        Collective: no. Blocking: yes.
        """
        handle = self._handles.get(index)
        if handle is not None:
            handle.wait()
            self._handles.pop(index, None)

    def synchronize(self) -> None:
        """Return when all weights are complete.

        Collective: no. Blocking: yes.
        """
        for index in list(self._handles):
            self.wait(index)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let weights be written in a block; those of rank 0 become everybody's.

        Collective: yes. Blocking: yes.
        """
        self.synchronize()
        yield
        self._adopt_moved(self.written())
        self._hand_out()

    def _hand_out(self) -> None:
        """Give all ranks the weights of rank 0."""
        for bucket in self.buckets:
            self._send(bucket, [0] + [bucket.plan.size] * self.comm.size)
        self.synchronize()
        self._note()

    def release(self) -> None:
        """Leave the weights to the module: nothing is updated here any more.

        Collective: yes. Blocking: yes.
        """


def flat(bucket: Bucket, elements: slice) -> Any:
    """Return elements of a bucket as a tensor of the same memory."""
    return seen_as_tensor(bucket.flat[elements])
