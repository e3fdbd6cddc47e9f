"""Keeps a model's weights in buckets, of which ranks update slices, and guards them meanwhile."""

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
from ..gpu.device import await_event
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..text import first_few
from ..training.averager import Averager
from ..transport.base import Schedule
from .modules import Uncopied, weakly
from .private import is_compiled, parameters_of, set_parameters, version_of
from .tensors import gpu_of, in_shape_of, marker_of, seen_as_tensor

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
        written_before: What the user had written when these buckets took the place of others.

    Collective: yes. Blocking: yes.
    """

    _allgather: Callable[..., Schedule[None]] = staticmethod(Collectives.allgather)

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
        self.written_before = list[str]()
        # What the user has written, and by what slices are made, in words; compared across ranks.
        self._made_with = ""
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
        self._adopt(self._views)
        self._note()

    def _note(self) -> None:
        """Note that the weights are those that all ranks have."""
        self._versions = {name: version_of(self._parameters[name]) for name in self._views}
        self.written_before = []

    def written(self) -> list[str]:
        """Return which weights the user has written since the update, as far as PyTorch notes it.

        Collective: no.
        """
        names = [*self.written_before]
        for name, version in self._versions.items():
            p = self._parameters[name]
            if name not in names and (
                    version_of(p) != version or p.data_ptr() != self._views[name].data_ptr()):
                names.append(name)
        return names

    def follow(self, made_with: str) -> None:
        """Prepare for an update of slices.

        Take over weights where the user has given a parameter other memory (`p.data = ...`). What
        the user has written is compared across ranks when slices are sent: of what one rank alone
        has written the update would leave its own slice.

        Args:
            made_with: By what slices are made, in words; compared across ranks.

        Raises:
            ConfigError: They do not fit.

        Collective: yes.
        """
        written = self.written()
        self._adopt(written)
        writes = f"after writes outside of writing_weights() to {first_few(written, 3)}; "
        self._made_with = f"{writes if written else ''}{made_with}"

    def _adopt(self, names: Iterable[str]) -> None:
        """Take over weights that are elsewhere."""
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
        call = Call("weights", f"{bucket.plan.dtype.name} ({bucket.plan.size},) {self._made_with}",
                    bucket.label, bucket.flat.nbytes, remedy=_REMEDY)
        self._handles[bucket.index] = self._submit(
            call,
            lambda collectives: self._allgather(collectives, vector, bounds=bounds),
            device=bucket.device, ready=() if self._mark is None else (self._mark(),))

    def wait_for(self, indices: Iterable[int], *_: object) -> None:
        """Return when all of some buckets is there, as far as they were sent; for hooks.

        Collective: no. Blocking: yes.
        """
        for index in indices:
            self.wait(index)

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
        self.wait_for(list(self._handles))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let weights be written in a block; those of rank 0 become everybody's.

        Collective: yes. Blocking: yes.
        """
        self.synchronize()
        yield
        self._adopt(self.written())
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


class NodeWeights(WeightBuckets):
    """Weight buckets that lie once in the memory of each node, in that of the host.

    What a rank writes, all ranks of its node have. So nothing may read weights while slices are
    updated: from `follow`, which returns on no rank before all ranks of its node have called it,
    until `wait` has returned. Between nodes each slice travels to each other node once.

    Ranks that share no memory (see `Communicator.memory_groups`) have a copy each.

    Args: as WeightBuckets.

    Raises:
        ConfigError: The weights are on a GPU, or a node's memory is too short; on all ranks.
    """

    _allgather = staticmethod(Collectives.allgather_once)
    # Whether a block runs in which weights may be written.
    _is_written = False

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
        # A bucket is cleared by all ranks of the node.
        self._meet()
        if self._is_first:
            for name, view in self._views.items():
                view.copy_(self._parameters[name].data)
        self._meet()
        self._show()

    def _show(self) -> None:
        for name, view in self._views.items():
            self._parameters[name].data = view
        self._note()

    def _meet(self) -> None:
        """Return when all ranks of this node have called."""
        self.comm.run(Call("meet", "the ranks that share weights"), _met)

    def follow(self, made_with: str) -> None:
        """Return when all ranks of this node have ended reading, so that slices may be updated.

        That gradients have arrived does not suffice: between backward and step a rank may still
        look at its weights.

        Raises:
            ReplicaError: This rank has written weights by itself, as far as PyTorch notes it.

        Collective: yes. Blocking: yes.
        """
        written = self.written()
        if written:
            raise ReplicaError(
                f"rank {self.comm.rank}: {first_few(written, 5)} were written outside of the "
                f"optimizer; with weights='node' they lie once in the memory of the node, so that "
                f"what each rank does is done several times, or while others read; write them in "
                f"a block `with optimizer.writing_weights():`, on all ranks")
        self._meet()
        self._made_with = made_with

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let weights be written in a block; those of rank 0 become everybody's.

        In the block every rank but the first one of each node has copies of its own: all may run
        the same code, and read what they write.

        Collective: yes. Blocking: yes.
        """
        if self._is_written:
            yield
            return
        self._is_written = True
        try:
            self.synchronize()
            if not self._is_first:
                self.leave()
            self._meet()
            yield
        finally:
            self._is_written = False
            written = {name: self._parameters[name].data for name in self._views}
            self._show()
        with torch.no_grad():
            for name, x in written.items() if self.comm.rank == 0 else ():
                if x.data_ptr() != self._views[name].data_ptr():
                    self._views[name].copy_(x)
        self._hand_out()

    @property
    def is_in_use(self) -> bool:
        """Whether any parameter of this rank still has its weights in this memory."""
        return any(view.numel() and self._parameters[name].data_ptr() == view.data_ptr()
                   for name, view in self._views.items())

    def leave(self) -> None:
        """Give this rank weights of its own.

        Collective: no.
        """
        for name, view in self._views.items():
            self._parameters[name].data = view.clone()

    def release(self) -> None:
        """Give each rank weights of its own again.

        Collective: yes. Blocking: yes.
        """
        self.leave()
        # No other rank writes them before.
        self._meet()


class LoadHooks:
    """Makes each load of a module a block in which its weights, once per node, may be written.

    From now on until `remove`, whatever becomes of the optimizer: as long as ranks share weights,
    all must agree on who writes them. Copies of the module have no such hooks.

    Args:
        module: Its `load_state_dict` is a collective call from now on.

    Attributes:
        weights: The NodeWeights of the module at present.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights: Any = None
        self._block: AbstractContextManager[None] | None = None
        self._hooks = ExitStack()
        for hook in (module.register_load_state_dict_pre_hook(Uncopied(self._before)),
                     module.register_load_state_dict_post_hook(Uncopied(self._after))):
            self._hooks.enter_context(hook)

    def _before(self, *_: object) -> None:
        weights = self.weights
        if self._block is not None or weights is None or not weights.is_in_use:
            return
        if weights.comm.closed:
            # Nobody can agree any more.
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
        """Leave loading to the module, on this rank alone."""
        self._hooks.close()


def _met(collectives: Collectives) -> Schedule[None]:
    yield (collectives.node.barrier(),)


def _node_array(collectives: Collectives, n: int,
                dtype: "np.dtype[Any]") -> Schedule[Array | ConfigError]:
    """Return a node array, or why there is none: all ranks go on without it."""
    try:
        return (yield from collectives.node_array(n, dtype))
    except ConfigError as error:
        return error


def _waiting(read: Callable[..., Any]) -> Any:
    """Return a method of `dict` for `Guarded`, which waits first."""
    def read_complete(parameters: "Guarded", *args: Any) -> Any:
        parameters.wait()
        return read(parameters, *args)

    return read_complete


class Guarded(dict[str, Any]):
    """The parameters of a module by name, which wait before they are read.

    PyTorch reads them here; see `private.parameters_of`.

    Args:
        parameters: As they were.
        wait: Called each time.
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
    """Guards the weights of a module while they are under way.

    Each module in it that has parameters of its own waits for the buckets that hold these: before
    its forward pass, since some keep references to their parameters (LSTM), and when one is looked
    up, since modules use those of others (MultiheadAttention).

    Args:
        module: The module.
        weights: Its weights.
        buckets: By parameter, the index of its bucket.

    Attributes:
        unguarded: The buckets of what nobody would wait for: compiled modules have no such hooks.
        remove: Leaves the module as it was.
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
                wait = Uncopied(weakly(weights.wait_for, sorted(indices)))
                set_parameters(part, Guarded(parameters_of(part), wait))
                restored.callback(_unguard, part)
                restored.enter_context(part.register_forward_pre_hook(wait, prepend=True))
        # Once: others may guard the module afterwards.
        self.remove = weakref.finalize(self, restored.close)
        self.remove.atexit = False


def _unguard(part: nn.Module) -> None:
    set_parameters(part, dict(parameters_of(part)))


def without_waiting(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield what `named_parameters` does; they may be incomplete, to look at their values."""
    seen = set()
    for prefix, part in module.named_modules():
        parameters = parameters_of(part)
        # Those of TorchScript are no dict.
        items = dict.items if isinstance(parameters, dict) else type(parameters).items
        for name, p in items(parameters):
            if p is not None and p not in seen:
                seen.add(p)
                yield f"{prefix}.{name}" if prefix else name, p
