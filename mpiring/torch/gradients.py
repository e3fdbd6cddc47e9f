"""Puts gradients into buckets, and averages them over ranks."""

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import GradientError
from ..training.averager import Averager
from ..training.fused import Fusion, Placement
from ..training.weighing import Weighing
from .sparse import SparseGradients
from .tensors import gpu_of, in_shape_of, stream_for, seen_as_tensor, selector_of, spec_of
from .threads import fill_only_node


class GradientBuckets:
    """The gradients of parameters, in buckets that are averaged when they are full.

    In a step, `put` each gradient once, complete; then `wait`. Collective, blocking.

    Args:
        parameters: Parameters by name, in the same order on every rank; at least one, all on one
            device. Those named in `sparse` have sparse gradients.
        before: Averager of the gradients that this one replaces.

    Attributes:
        dense: Parameters with dense gradients, by name.
        views: Gradient of each of them in its bucket, in the shape of the parameter.
        averager: Averager of the dense gradients, with the statistics of all gradients.
        sends_early: Whether buckets are sent during backward, as soon as they are full.
        select_gpu: Function that returns a context in which the parameters' GPU is current.
    """

    def __init__(self, parameters: Mapping[str, Parameter], sparse: set[Parameter],
                 comm: Communicator, weighing: Weighing, fusion: Fusion, *,
                 before: Averager | None = None) -> None:
        self._parameters, self._comm, self._weighing = dict(parameters), comm, weighing
        self.dense = {name: p for name, p in parameters.items() if p not in sparse}
        specs = [spec_of(name, p) for name, p in self.dense.items()]
        # All parameters are on one device.
        first = next(iter(parameters.values()))
        self.select_gpu, gpu = selector_of(first), gpu_of(first)
        self.sends_early = not fill_only_node(comm) or gpu is not None
        with self.select_gpu():
            self.averager = Averager(
                specs, comm, fusion, Placement(gpu, stream_for(first)),
                weighing=weighing, before=before, overlap=self.sends_early)
        self._sparse = SparseGradients(
            {name: p for name, p in parameters.items() if p in sparse}, comm, self.averager)
        self.views = {name: in_shape_of(p, seen_as_tensor(self.averager.views[name].reshape(-1)))
                      for name, p in self.dense.items()}

    @property
    def missing(self) -> list[str]:
        """The names of the gradients that are not complete in this step."""
        return [*self.averager.missing, *self._sparse.missing]

    def put(self, name: str, *, complete: bool) -> None:
        """Put a gradient into its bucket, after a pass has added to it; a full bucket is sent.

        A `complete` gradient is weighed, since no other pass of this step adds to it. A parameter
        without a gradient contributes zeros.

        Raises GradientError if the gradient cannot be averaged, or was complete before.
        """
        p = self._parameters[name]
        if p.grad is not None and p.grad.requires_grad:
            raise GradientError(
                f"rank {self._comm.rank}: the gradient of {name} is itself part of a graph "
                f"(create_graph=True), which averaging would tear; call backward on the bare "
                f"module, or use torch.autograd.grad for the inner derivative")
        if name in self.dense:
            self._write(name, p, self._weighing.factor if complete else 1.0)
        elif complete:
            self._sparse.ready(name, self._weighing.factor)
            return
        if not complete:
            return
        if name not in self.averager.home[name].missing:
            raise GradientError(
                f"rank {self._comm.rank}: the gradient of {name} was completed twice in one "
                f"step: a layer used in several segments of checkpoint(…, use_reentrant=True) "
                f"needs use_reentrant=False; and after an exception in backward no step can "
                f"follow: other ranks may have gone on; start again from a checkpoint")
        with self.select_gpu():
            self.averager.ready(name)

    def _write(self, name: str, p: Parameter, weight: float) -> None:
        """Replace a gradient by its view, multiplied by a weight, or write zeros to the view."""
        view, gradient = self.views[name], p.grad
        if gradient is None or weight == 0:
            view.zero_()
            p.grad = None if gradient is None else view
        elif gradient is not view:
            if gradient.layout is not torch.strided:
                raise GradientError(
                    f"rank {self._comm.rank}: the gradient of {name} is {gradient.layout}; only "
                    f"those of Embedding and EmbeddingBag may be sparse")
            if weight == 1:
                view.copy_(gradient)
            else:
                torch.mul(gradient, weight, out=view)
            p.grad = view
        elif weight != 1:
            view.mul_(weight)

    def wait(self) -> None:
        """Return when `views`, and all sparse gradients, are means. Collective, blocking."""
        # Sparse gradients come first, since they also determine whether Reducers count the step.
        self._sparse.wait()
        with self.select_gpu():
            self.averager.wait(self._sparse.nonfinite, finite=self._sparse.finite)

    def close(self) -> None:
        """Free the buckets; the gradients of the parameters remain unchanged."""
        self.averager.close()
        # The memory of the gradients is freed, although an owner may still have this object.
        self.views = {}
