"""Keeps a model's weights in buckets, slices of which the ranks update and hand to the others."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import ConfigError
from ..operations.agreement import Call
from ..training.gradients import Gradients
from .averaging import in_shape_of
from .devices import gpu_of, marker_of
from .tensors import seen_as_tensor


class WeightBuckets:
    """Weights as views into buckets that are cut as those of their gradients are.

    Rank r has the say over slice r of each: it updates this slice, and `send` copies it to the
    others.

    Args:
        parameters: By name: those whose gradients are averaged. Their `data` become the views.
        gradients: What averages them.
        comm: The ranks.

    Attributes:
        buckets: In the order of the gradients'.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, parameters: Mapping[str, Parameter], gradients: Gradients,
                 comm: Communicator) -> None:
        self._parameters, self._comm = dict(parameters), comm
        self._submit = gradients.tally.submit
        first = next(iter(parameters.values()))
        device = gpu_of(first)
        self._mark = marker_of(first)
        empty = functools.partial(comm.empty, device=device or "cpu")
        self.buckets = [Bucket(index, bucket.plan, empty, device)
                        for index, bucket in enumerate(gradients.buckets)]
        self._calls = [Call("weights", f"{bucket.flat.dtype.name} {bucket.flat.shape}",
                            bucket.label, bucket.flat.nbytes) for bucket in self.buckets]
        self._handles: dict[int, Handle[None]] = {}
        self._views: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            for name, view in bucket.views.items():
                p = self._parameters[name]
                # A storage of its own, so that torch.save of one writes no others.
                self._views[name] = in_shape_of(p, seen_as_tensor(view.reshape(-1)))
                self._adopt(name)

    def own(self, index: int) -> slice:
        """Return which elements of a bucket are this rank's."""
        bounds, rank = self.buckets[index].bounds(self._comm.size), self._comm.rank
        return slice(bounds[rank], bounds[rank + 1])

    def follow(self) -> None:
        """Take over weights where the user has given a parameter other memory (`p.data = ...`).

        Raises:
            ConfigError: They do not fit.

        Collective: no.
        """
        for name, view in self._views.items():
            if self._parameters[name].data_ptr() != view.data_ptr() and view.numel():
                self._adopt(name)

    def _adopt(self, name: str) -> None:
        p, view = self._parameters[name], self._views[name]
        if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
            raise ConfigError(
                f"rank {self._comm.rank}: the data of {name} were replaced by {p.dtype} "
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

    def send(self, index: int) -> None:
        """Begin to copy each rank's slice of a bucket to all.

        Collective: yes. Blocking: no.
        """
        bucket = self.buckets[index]
        if not bucket.flat.size:
            return
        bounds, vector = bucket.bounds(self._comm.size), bucket.vector
        self._handles[index] = self._submit(
            self._calls[index], lambda collectives: collectives.allgather(vector, bounds=bounds),
            device=bucket.device, ready=() if self._mark is None else (self._mark(),))

    def wait(self, index: int) -> None:
        """Return when all of a bucket is there, if it was sent.

        Collective: no. Blocking: yes.
        """
        handle = self._handles.get(index)
        if handle is not None:
            handle.wait()
            del self._handles[index]

    def synchronize(self) -> None:
        """Return when all weights are complete.

        Collective: no. Blocking: yes.
        """
        for index in list(self._handles):
            self.wait(index)


def flat(bucket: Bucket, elements: slice) -> Any:
    """Return elements of a bucket as a tensor of the same memory."""
    return seen_as_tensor(bucket.flat[elements])
