"""Keeps one copy of a model's weights per node, which its ranks read and update together."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ..training.gradients import Gradients
from ..transport.base import Schedule
from .weights import WeightBuckets


class NodeWeights(WeightBuckets):
    """Weight buckets that lie once in the memory of each node, in that of the host.

    What a rank writes, all ranks of its node have. So nothing may read weights while slices are
    updated: from `follow`, which returns on no rank before all ranks of its node have called it,
    until `wait` has returned. Between nodes each slice travels to each other node once.

    Ranks that share no memory (see `Communicator.memory_groups`) have a copy each.

    Args: as WeightBuckets.
        module: Which has the parameters: its `load_state_dict` is a collective call from now on.

    Raises:
        ConfigError: The weights are on a GPU, or a node's memory is too short.
    """

    def __init__(self, parameters: Mapping[str, Parameter], gradients: Gradients,
                 comm: Communicator, module: torch.nn.Module) -> None:
        device = next(iter(parameters.values())).device
        if device.type != "cpu":
            raise ConfigError(
                f"rank {comm.rank}: weights='node' for parameters on {device}: each GPU computes "
                f"with a copy in its own memory; leave out weights='node'")
        # The block in which weights may be written, while it runs.
        self._block: Any = None
        self._is_first = any(ranks[0] == comm.rank for ranks in comm.memory_groups)
        super().__init__(parameters, gradients, comm, module)
        reference = weakref.ref(self)
        hooks = [module.register_load_state_dict_pre_hook(
                     functools.partial(_before_loading, reference)),
                 module.register_load_state_dict_post_hook(
                     functools.partial(_after_loading, reference))]
        weakref.finalize(self, _remove, hooks).atexit = False

    def _empty(self, n: int, dtype: "np.dtype[Any]") -> Array:
        return self._comm.run(Call("node array", f"{dtype.name} ({n},)", nbytes=n * dtype.itemsize),
                              lambda collectives: collectives.node_array(n, dtype))

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
        self._comm.run(Call("meet", "the ranks that share weights"), _met)

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
                f"rank {self._comm.rank}: {first_few(written, 5)} were written outside of the "
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
        if self._block is not None:
            yield
            return
        self._block = True
        try:
            self.synchronize()
            if not self._is_first:
                for name, view in self._views.items():
                    self._parameters[name].data = view.clone()
            self._meet()
            yield
        finally:
            self._block = None
            written = {name: self._parameters[name].data for name in self._views}
            self._show()
        with torch.no_grad():
            for name, x in written.items() if self._comm.rank == 0 else ():
                if x.data_ptr() != self._views[name].data_ptr():
                    self._views[name].copy_(x)
        self._hand_out()

    def release(self) -> None:
        """Give each rank weights of its own again.

        Collective: yes. Blocking: yes.
        """
        for name, view in self._views.items():
            self._parameters[name].data = view.clone()
        # No other rank writes them before.
        self._meet()


def _met(collectives: Collectives) -> Schedule[None]:
    yield (collectives.node.barrier(),)


def _before_loading(reference: "weakref.ref[NodeWeights]", *_: object) -> None:
    """Enter a block in which weights may be written, unless the user has."""
    weights = reference()
    if weights is not None and weights._block is None:
        block = weights.writing()
        block.__enter__()
        weights._block = block


def _after_loading(reference: "weakref.ref[NodeWeights]", *_: object) -> None:
    weights = reference()
    if weights is not None and weights._block not in (None, True):
        weights._block.__exit__(None, None, None)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
