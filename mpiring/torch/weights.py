"""Keeps a model's weights in buckets, whose slices ranks update, and guards incomplete weights."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import ConfigError, ReplicaError
from ..gpu.interface import await_event
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.collectives import Collectives
from ..text import first_few
from ..training.averager import Averager
from ..transport.base import Schedule
from .modules import UncopiedHook, weak_hook
from .private import is_compiled, parameters_of, set_parameters, version_of
from .tensors import in_shape_of, seen_as_tensor, stream_for

_REMEDY = ("give param_groups the same settings on every rank, and write weights on all ranks, or "
           "in a block `with optimizer.writing_weights():`")


class WeightBuckets:
    """Weights as views into buckets with the same slices as the buckets of their gradients.

    Rank r owns slice r of each bucket. It updates this slice, and `send` copies the slice to all
    ranks. `parameters` are those with averaged gradients; their `data` become views. Collective,
    blocking.
    """

    _allgather: Callable[..., Schedule[None]] = staticmethod(Collectives.allgather)

    def __init__(self, parameters: Mapping[str, Parameter], gradients: Averager,
                 comm: Communicator) -> None:
        self._parameters, self.comm = dict(parameters), comm
        self._gradients, self._model = gradients, gradients.weighing.model
        first = next(iter(parameters.values()))
        self._device, self._stream = gradients.device, stream_for(first)
        self.buckets = [Bucket(index, bucket.plan, self._empty, self._device)
                        for index, bucket in enumerate(gradients.buckets)]
        if self._device is not None:
            # CuPy clears the buckets on a separate stream.
            await_event(self._device.gpu.mark())
        # Description of user writes and of the update, which ranks compare.
        self._description = ""
        self._versions: dict[str, int] = {}
        self._handles: dict[int, Handle[None]] = {}
        self._views: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            for name, view in bucket.views.items():
                p = self._parameters[name]
                # A separate storage, so that torch.save of one parameter saves no other parameters.
                self._views[name] = in_shape_of(p, seen_as_tensor(view.reshape(-1)))
        self._fill()

    def _empty(self, n: int, dtype: "np.dtype[Any]") -> Any:
        """Return the memory of a bucket."""
        return self.comm.empty(n, dtype, device=self._device or "cpu")

    def _fill(self) -> None:
        """Move the weights into the buckets."""
        self._copy_in(self._views)
        self._record_versions()

    def _record_versions(self) -> None:
        """Record that all ranks now have these weights."""
        self._versions = {name: version_of(self._parameters[name]) for name in self._views}

    def written(self) -> list[str]:
        """Return the names of weights that the user has written since the last update.

        Writes that bypass PyTorch's version counters are not detected.
        """
        return [name for name, version in self._versions.items()
                if version_of(self._parameters[name]) != version
                or self._parameters[name].data_ptr() != self._views[name].data_ptr()]

    def follow(self, update: str) -> None:
        """Prepare for an update of slices, whose description ranks compare. Collective.

        Copy the weights of parameters to which the user has given other memory (`p.data = ...`);
        raise ConfigError if they do not fit. When slices are sent, ranks compare which weights
        users have written. The update would keep only one slice of a write that was made on one
        rank.
        """
        written = self.written()
        self._copy_in(written)
        writes = f"after writes outside of writing_weights() to {first_few(written, 3)}; "
        self._description = f"{writes if written else ''}{update}"

    def _copy_in(self, names: Iterable[str]) -> None:
        """Copy weights that are in other memory into the buckets."""
        for name in names:
            p, view = self._parameters[name], self._views[name]
            if p.data_ptr() == view.data_ptr():
                continue
            if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
                raise ConfigError(
                    f"rank {self.comm.rank}: the data of {name} were replaced by {p.dtype} "
                    f"{tuple(p.shape)} on {p.device}, which do not fit its slices; expected "
                    f"{view.dtype} {tuple(view.shape)} on {view.device}: replace the parameter, or "
                    f"write into it: p.data.copy_(...)")
            view.copy_(p.data)
            p.data = view

    def updated(self) -> None:
        """Record that this rank's slices have changed, which invalidates retained graphs."""
        torch.autograd.graph.increment_version(self._parameters.values())
        self._record_versions()

    def send(self, index: int) -> None:
        """Start to copy each rank's slice of a bucket to all ranks. Collective."""
        bucket = self.buckets[index]
        self._send(bucket, bucket.bounds(self.comm.size))

    def _send(self, bucket: Bucket, bounds: Sequence[int]) -> None:
        if not bucket.plan.size:
            return
        vector, plan = bucket.vector, bucket.plan
        detail = filter(None, [f"{plan.dtype.name} ({plan.size},)", self._model, self._description])
        call = Call("weights", " ".join(detail), bucket.label, plan.nbytes, remedy=_REMEDY)
        self._handles[bucket.index] = self.comm.submit(
            call, lambda collectives: self._allgather(collectives, vector, bounds=bounds),
            device=bucket.device, ready=() if self._stream is None else (self._stream.mark(),),
            stream=self._stream)

    def wait_for(self, indices: Iterable[int], *_: object) -> None:
        """Wait until the given buckets are complete, if they were sent; used by hooks."""
        for index in indices:
            handle = self._handles.get(index)
            if handle is not None:
                handle.wait()
                handle = self._handles.pop(index, None)
                if handle is not None:
                    self._gradients.costs.append(handle.flight)

    def synchronize(self) -> None:
        """Wait until all weights are complete."""
        self.wait_for(list(self._handles))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writes in a block; all ranks then get rank 0's weights. Collective, blocking."""
        self.synchronize()
        yield
        self._copy_in(self.written())
        self._broadcast()

    def _broadcast(self) -> None:
        """Give all ranks the weights of rank 0."""
        for bucket in self.buckets:
            self._send(bucket, [0] + [bucket.plan.size] * self.comm.size)
        self.synchronize()
        self._record_versions()

    def release(self) -> None:
        """Leave the weights to the module, and update nothing afterwards. Collective, blocking."""


def flat(bucket: Bucket, elements: slice) -> Any:
    """Return elements of a bucket as a tensor that shares their memory."""
    return seen_as_tensor(bucket.flat[elements])


class NodeWeights(WeightBuckets):
    """Weight buckets with one copy per node, in host memory.

    Writes of one rank are visible to all ranks of its node. No rank may therefore read weights
    while slices are updated: after `follow`, until `wait_for` has returned. `follow` returns when
    all ranks of the node have called it. Each slice is sent to each other node once. Ranks that
    share no memory (see `Communicator.memory_groups`) have private copies. All ranks raise
    ConfigError if the weights are on a GPU, or a node's memory is too small.
    """

    _allgather = staticmethod(Collectives.allgather_once)
    # Whether a block is running in which weights may be written.
    _is_writing = False

    def _empty(self, n: int, dtype: "np.dtype[Any]") -> Array:
        device = next(iter(self._parameters.values())).device
        if device.type != "cpu":
            raise ConfigError(
                f"rank {self.comm.rank}: weights='node' for parameters on {device}: each GPU "
                f"computes with a copy in its own memory; leave out weights='node'")
        array = self.comm.run(
            Call("node array", f"{dtype.name} ({n},)", nbytes=n * dtype.itemsize),
            lambda collectives: _node_array(collectives, n, dtype))
        if isinstance(array, ConfigError):
            raise array
        return array

    def _fill(self) -> None:
        self._is_first = any(ranks[0] == self.comm.rank for ranks in self.comm.memory_groups)
        # Wait until all ranks of the node have cleared the buckets.
        self._node_barrier()
        if self._is_first:
            for name, view in self._views.items():
                view.copy_(self._parameters[name].data)
        self._node_barrier()
        self._use_views()

    def _use_views(self) -> None:
        for name, view in self._views.items():
            self._parameters[name].data = view
        self._record_versions()

    def _node_barrier(self) -> None:
        """Return when all ranks of this node have called this method."""
        self.comm.run(Call("meet", "the ranks that share weights", self._model), _barrier)

    def follow(self, update: str) -> None:
        """Return when all ranks of this node have finished reading, and slices may be updated.

        Arrival of the gradients is not sufficient, because a rank may read its weights between
        backward and step. Raises ReplicaError if this rank has written weights outside of
        `writing`, as far as PyTorch's version counters show. Collective, blocking.
        """
        written = self.written()
        if written:
            raise ReplicaError(
                f"rank {self.comm.rank}: {first_few(written, 5)} were written outside of the "
                f"optimizer; with weights='node' they lie once in the memory of the node, so that "
                f"what each rank does is done several times, or while others read; write them in "
                f"a block `with optimizer.writing_weights():`, on all ranks")
        self._node_barrier()
        self._description = update

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writes in a block, in which all ranks except the first of each node have copies.

        All ranks may therefore run the same code, and read the values that they have written.
        Collective, blocking.
        """
        if self._is_writing:
            yield
            return
        self._is_writing = True
        try:
            self.synchronize()
            if not self._is_first:
                self.leave()
            self._node_barrier()
            yield
        finally:
            self._is_writing = False
            written = {name: self._parameters[name].data for name in self._views}
            self._use_views()
        with torch.no_grad():
            for name, x in written.items() if self.comm.rank == 0 else ():
                if x.data_ptr() != self._views[name].data_ptr():
                    self._views[name].copy_(x)
        self._broadcast()

    @property
    def is_in_use(self) -> bool:
        """Whether any parameter of this rank still has its weights in this memory."""
        return any(view.numel() and self._parameters[name].data_ptr() == view.data_ptr()
                   for name, view in self._views.items())

    def leave(self) -> None:
        """Give this rank private weights."""
        for name, view in self._views.items():
            self._parameters[name].data = view.clone()

    def release(self) -> None:
        """Give each rank private weights again. Collective, blocking."""
        self.leave()
        # No rank may write the shared weights before all ranks have copied them.
        self._node_barrier()


class LoadHooks:
    """Allows `load_state_dict` of a module, now collective, to write weights that ranks share.

    The hooks remain until `remove`, even without the optimizer, because ranks that share weights
    must agree on the rank that writes them. Copies of the module do not have these hooks. `weights`
    are the current NodeWeights of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights: Any = None
        self._block: AbstractContextManager[None] | None = None
        self._hooks = ExitStack()
        for hook in (module.register_load_state_dict_pre_hook(UncopiedHook(self._before)),
                     module.register_load_state_dict_post_hook(UncopiedHook(self._after))):
            self._hooks.enter_context(hook)

    def _before(self, *_: object) -> None:
        weights = self.weights
        if self._block is not None or weights is None or not weights.is_in_use:
            return
        if weights.comm.closed:
            # Ranks can no longer agree on a writer.
            weights.leave()
            self.weights = None
            return
        self._block = weights.writing()
        self._block.__enter__()

    def _after(self, *_: object) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks on this rank only."""
        self._hooks.close()


def _barrier(collectives: Collectives) -> Schedule[None]:
    yield (collectives.node.barrier(),)


def _node_array(collectives: Collectives, n: int,
                dtype: "np.dtype[Any]") -> Schedule[Array | ConfigError]:
    """Return a node array, or the error that prevented it.

    An error that is raised by a schedule would end the communicator.
    """
    try:
        return (yield from collectives.node_array(n, dtype))
    except ConfigError as error:
        return error


def _waiting(read: Callable[..., Any]) -> Any:
    """Return a method for `GuardedParameters` that waits, then calls a method of `dict`."""
    def read_complete(parameters: "GuardedParameters", *args: Any) -> Any:
        parameters.wait()
        return read(parameters, *args)

    return read_complete


class GuardedParameters(dict[str, Any]):
    """A mapping of a module's parameters by name that waits before each read.

    PyTorch reads parameters from this mapping; see `private.parameters_of`.
    """

    def __init__(self, parameters: Mapping[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.wait = wait

    __getitem__ = _waiting(dict.__getitem__)
    get = _waiting(dict.get)
    items = _waiting(dict.items)
    values = _waiting(dict.values)

    def __reduce__(self) -> Any:
        self.wait()
        return dict, (dict(super().items()),)


class Guard:
    """Delays reads of a module's weights while the weights are in flight.

    Each submodule waits for the buckets of its parameters before its forward pass, since some
    modules keep references to their parameters (LSTM). It also waits when a parameter is looked up,
    since some modules use parameters of other modules (MultiheadAttention).

    `buckets` has the index of the bucket of each parameter. `unguarded` has the indices of the
    buckets without a guard, because compiled modules have no hooks. `remove` removes the guard.
    """

    def __init__(self, module: nn.Module, weights: WeightBuckets,
                 buckets: Mapping[Parameter, int]) -> None:
        self.unguarded: set[int] = set()
        restored = ExitStack()
        compiled = {part for root in module.modules() if is_compiled(root)
                    for part in root.modules()}
        for part in module.modules():
            indices = {buckets[p] for p in part.parameters(recurse=False) if p in buckets}
            if part in compiled:
                self.unguarded |= indices
            elif indices:
                wait = UncopiedHook(weak_hook(weights.wait_for, sorted(indices)))
                set_parameters(part, GuardedParameters(parameters_of(part), wait))
                restored.callback(_unguard, part)
                restored.enter_context(part.register_forward_pre_hook(wait, prepend=True))
        # Removed only once, because another guard may have replaced this one.
        self.remove = weakref.finalize(self, restored.close)
        self.remove.atexit = False


def _unguard(part: nn.Module) -> None:
    set_parameters(part, dict(parameters_of(part)))


def without_waiting(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield the same as `named_parameters`, without waiting; the values may be incomplete."""
    seen = set()
    for prefix, part in module.named_modules():
        parameters = parameters_of(part)
        # In TorchScript, the parameters are not a dict.
        items = dict.items if isinstance(parameters, dict) else type(parameters).items
        for name, p in items(parameters):
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                yield f"{prefix}.{name}" if prefix else name, p
