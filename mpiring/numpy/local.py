"""Local training of NumPy and CuPy models, which are synchronized rarely."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..buckets.bucket import refuse_changed
from ..communicator import Communicator
from ..gpu.arrays import vector_of
from ..gpu.interface import await_event
from ..memory.arrays import Array, is_finite
from ..optim import outer
from ..optim.fragments import LocalWeights
from ..optim.parts import wide_dtype
from .data_parallel import DataParallel, share, spec_of


class ArrayWeights(LocalWeights):
    """The arrays of a model or DataParallel, and the global weights. Collective, blocking.

    All ranks get rank 0's arrays. Raises the same errors as DataParallel.
    """

    def __init__(self, model: Mapping[str, Array] | DataParallel,
                 comm: Communicator) -> None:
        # A reference, so that arrays replaced in the mapping take effect.
        self._arrays: Mapping[str, Any] = (
            model.params if isinstance(model, DataParallel) else model)
        self.tensors, self.device = share(self._arrays, comm)
        self._comm = comm
        self._global = {name: x.copy(order="C") for name, x in self._arrays.items()}
        if self.device is not None:
            await_event(self.device.gpu.mark())

    def vector(self, name: str) -> Any:
        return vector_of(self._global[name])

    def local(self, name: str) -> Any:
        return self._arrays[name]

    def subtract(self, name: str, out: Any, factor: float) -> None:
        with np.errstate(all="ignore"):
            np.subtract(self._global[name], self._arrays[name], out=out)
            if factor != 1:
                out *= factor

    def mix(self, name: str, alpha: float) -> None:
        local, target = self._arrays[name], self._global[name]
        if alpha:
            target = target.astype(wide_dtype(local.dtype))
            target += alpha * (local.astype(target.dtype) - target)
        local[...] = target

    def is_finite(self, name: str) -> bool:
        if self.device is not None:
            return self.device.gpu.is_finite(self._arrays[name])
        return is_finite(self._arrays[name].reshape(-1))

    def refuse_others(self) -> None:
        refuse_changed(self._comm.rank, self.tensors, [
            spec_of(name, x, self._comm.rank) for name, x in self._arrays.items()])


class LocalSGD(outer.PeriodicAveraging):
    """Averages the arrays of all ranks after every few steps of their local optimizers.

        outer = LocalSGD(params, comm, every=8)
        for x, y in batches:
            ...
            optimizer.step()
            outer.step()
        outer.synchronize()

    Rank 0 broadcasts its arrays at the start. Any inner optimizer will do; its state remains local
    to the rank.

    Args:
        model: Arrays by name, the same on all ranks. It may also be a DataParallel over a group of
            ranks, from `comm.split(...)`: the group averages in every step, the groups rarely.
        comm: Communicator whose ranks train together; by default, all ranks.
        every: Number of inner steps between two averages, at least 1. `sync_every`, the name in
            torchft, is also accepted.
        start: Number of initial steps during which models are averaged after each step
            ("post-local SGD").
        reducer: Reducer that averages the differences from the last mean; see `mpiring.reducers`.
            Each fragment has a copy of it.
        sharded: If true, each rank updates only its slices of the global parameters, and gathers
            the other slices.
        bucket_bytes: Size in bytes of the messages into which arrays are fused, approximately.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, or the model cannot be trained.
        BufferMismatchError: The models differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
    Source: Stich, ICLR 2019, arXiv 1805.09767.
    """

    kind = ArrayWeights


class DiLoCo(outer.StreamingDiLoCo):
    """Takes outer steps with Nesterov momentum on the changes that local steps have made.

        outer = DiLoCo(params, comm, every=64, fragments=4, delay=8, reducer=Int8())
        for x, y in batches:
            ...
            optimizer.step()
            outer.step()
        outer.synchronize()

    An outer step averages d = global - local arrays. Then v ← μ v + d and
    global ← global - η (d + μ v). Rank 0 broadcasts its arrays at the start. Any inner optimizer
    will do (AdamW in the paper); its state remains local to the rank.

    The names of arguments in torchft, `sync_every`, `fragment_sync_delay` and
    `fragment_update_alpha`, are also accepted.

    Args:
        model: Arrays by name, the same on all ranks. It may also be a DataParallel over a group of
            ranks, from `comm.split(...)`: the group averages in every step, the groups rarely.
        comm: Communicator whose ranks train together; by default, all ranks.
        every: Number of inner steps between two synchronizations of a fragment, at least 1.
        lr: Outer learning rate η; a number, or a function of the number of earlier outer steps.
        momentum: Outer momentum μ; a number, or a function of the number of earlier outer steps.
        fragments: Number of parts of the model, of similar size in bytes, that are synchronized in
            turn, evenly spread over `every` steps (Streaming DiLoCo).
        delay: Number of inner steps during which a fragment is sent in the background; below
            `every`.
        alpha: Share α of the local arrays when a fragment arrives: local ← α local +
            (1 - α) global. By default 0, or 0.5 with a delay.
        reducer: Reducer that averages d; see `mpiring.reducers`. Each fragment has a copy of it.
        sharded: If true, each rank updates only its slices of the global parameters, and gathers
            the other slices.
        bucket_bytes: Size in bytes of the messages into which arrays are fused, approximately.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, or the model cannot be trained.
        BufferMismatchError: The models differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
    Source: Douillard et al., 2023, arXiv 2311.08105, and 2025, arXiv 2501.18512.
    """

    kind = ArrayWeights
