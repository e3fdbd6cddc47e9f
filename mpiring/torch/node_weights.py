"""Keeps one copy of a model's weights per node, which its ranks read and update together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import ConfigError, ReplicaError
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..text import first_few
from ..training.averager import Averager
from ..transport.base import Schedule
from .guarded import Uncopied
from .weights import WeightBuckets


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

    def __init__(self, parameters: Mapping[str, Parameter], gradients: Averager,
                 comm: Communicator) -> None:
        device = next(iter(parameters.values())).device
        if device.type != "cpu":
            raise ConfigError(
                f"rank {comm.rank}: weights='node' for parameters on {device}: each GPU computes "
                f"with a copy in its own memory; leave out weights='node'")
        # Whether a block runs in which weights may be written.
        self._is_written = False
        self._is_first = any(ranks[0] == comm.rank for ranks in comm.memory_groups)
        super().__init__(parameters, gradients, comm)

    def _empty(self, n: int, dtype: "np.dtype[Any]") -> Array:
        array = self.comm.run(
            Call("node array", f"{dtype.name} ({n},)", nbytes=n * dtype.itemsize),
            lambda collectives: _node_array(collectives, n, dtype))
        if isinstance(array, ConfigError):
            raise array
        return array

    def _fill(self) -> None:
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

    def follow(self) -> None:
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

    def _allgather(self, collectives: Collectives, vector: Array,
                   bounds: Sequence[int]) -> Schedule[None]:
        return collectives.allgather_once(vector, bounds=bounds)

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
                for name, view in self._views.items():
                    self._parameters[name].data = view.clone()
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

    def __init__(self, module: torch.nn.Module) -> None:
        self.weights: Any = None
        self._block: AbstractContextManager[None] | None = None
        self._hooks = [
            module.register_load_state_dict_pre_hook(Uncopied(self._before)),
            module.register_load_state_dict_post_hook(Uncopied(self._after))]

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
        for hook in self._hooks:
            hook.remove()


def _met(collectives: Collectives) -> Schedule[None]:
    yield (collectives.node.barrier(),)


def _node_array(collectives: Collectives, n: int,
                dtype: "np.dtype[Any]") -> Schedule[Array | ConfigError]:
    """Return a node array, or why there is none: all ranks go on without it."""
    try:
        return (yield from collectives.node_array(n, dtype))
    except ConfigError as error:
        return error
