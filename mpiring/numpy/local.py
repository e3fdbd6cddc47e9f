"""Local training of NumPy and CuPy models, which are synchronized rarely."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..buckets.bucket import refuse_changed
from ..communicator import Communicator
from ..gpu.arrays import vector_of
from ..gpu.device import await_event
from ..memory.arrays import Array, is_finite
from ..optim import outer
from ..optim.fragments import LocalWeights
from ..optim.parts import wide
from .data_parallel import DataParallel, share, spec_of


class ArrayWeights(LocalWeights):
    """The arrays of a model, and the global weights; see LocalWeights.

    Args:
        model: Arrays by name, or a DataParallel of them.
        comm: Ranks to synchronize. They all have rank 0's arrays afterwards.

    Raises the same errors as DataParallel.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: Mapping[str, Array] | DataParallel,
                 comm: Communicator) -> None:
        # A reference: arrays that are replaced in the mapping count from then on.
        self._arrays: Mapping[str, Any] = (
            model.params if isinstance(model, DataParallel) else model)
        self.tensors, self.device = share(self._arrays, comm)
        self._comm = comm
        self._global = {name: x.copy(order="C") for name, x in self._arrays.items()}
        if self.device is not None:
            await_event(self.device.gpu.mark())

    def vector(self, name: str) -> Any:
        """Return global weights as a vector."""
        return vector_of(self._global[name])

    def local(self, name: str) -> Any:
        """Return local weights."""
        return self._arrays[name]

    def subtract(self, name: str, out: Any, factor: float) -> None:
        """Write factor × (global - local)."""
        with np.errstate(all="ignore"):
            np.subtract(self._global[name], self._arrays[name], out=out)
            if factor != 1:
                out *= factor

    def mix(self, name: str, alpha: float) -> None:
        """Set local weights to alpha × local + (1 - alpha) × global."""
        local, target = self._arrays[name], self._global[name]
        if alpha:
            target = target.astype(wide(local.dtype))
            target += alpha * (local.astype(target.dtype) - target)
        local[...] = target

    def is_finite(self, name: str) -> bool:
        """Return whether local weights are finite."""
        if self.device is not None:
            return self.device.gpu.is_finite(self._arrays[name])
        return is_finite(self._arrays[name].reshape(-1))

    def refuse_others(self) -> None:
        """Raise ConfigError if there are other arrays than at first."""
        refuse_changed(self._comm.rank, self.tensors, [
            spec_of(name, x, self._comm.rank) for name, x in self._arrays.items()])


class LocalSGD(outer.PeriodicAveraging):
    """LocalSGD of arrays by name, or of a DataParallel.

    See mpiring.optim.outer.PeriodicAveraging.
    """

    kind = ArrayWeights


class DiLoCo(outer.StreamingDiLoCo):
    """DiLoCo of arrays by name, or of a DataParallel; see mpiring.optim.outer.StreamingDiLoCo."""

    kind = ArrayWeights
