"""Local training of PyTorch modules with rare synchronization."""

from typing import Any

import torch
from torch import nn

from ..buckets.bucket import refuse_changed
from ..communicator import Communicator
from ..errors import ConfigError
from ..gpu.arrays import vector_of
from ..gpu.interface import await_event
from ..memory.tensors import array_of
from ..optim import outer
from ..optim.fragments import LocalWeights
from ..text import first_few
from .data_parallel import DataParallel
from .modules import Buffers, broadcast_model
from .tensors import gpu_of, stream_for, seen_as_tensor, selector_of, spec_of
from .threads import share_cores


class ParameterWeights(LocalWeights):
    """The parameters of a module or DataParallel, and the global weights. Collective, blocking.

    All ranks get the parameters and buffers of rank 0. Raises ConfigError if the module cannot be
    trained on several ranks. Raises BufferMismatchError, which names the first difference, if
    modules differ between ranks.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model = model
        self._module = module = model.module if isinstance(model, DataParallel) else model
        trained = broadcast_model(module, comm)
        if module is model:
            share_cores(comm)
        self._comm, self._buffers = comm, Buffers(module, comm)
        self.tensors = [spec_of(name, p) for name, p in trained.items()]
        first = next(iter(trained.values()))
        self.device, self.selected = gpu_of(first), selector_of(first)
        self.stream = stream_for(first)
        location = first.device
        if self.device is not None and not self.device.gpu.programmable:
            # The outer optimizer has no kernels for this GPU.
            self.device, self.stream, location = None, None, torch.device("cpu")
        self._global = {name: p.detach().to(location, copy=True,
                                            memory_format=torch.contiguous_format)
                        for name, p in trained.items()}
        if self.stream is not None:
            await_event(self.stream.mark())

    def local(self, name: str) -> torch.Tensor:
        # With a Sharded optimizer, this waits until the weights are complete.
        return self._module.get_parameter(name).detach()

    def vector(self, name: str) -> Any:
        x = self._global[name]
        return array_of(x) if self.device is None else vector_of(x)

    def subtract(self, name: str, out: Any, factor: float) -> None:
        view = seen_as_tensor(out)
        torch.sub(self._global[name], self.local(name).to(view.device), out=view)
        if factor != 1:
            view.mul_(factor)

    def mix(self, name: str, alpha: float) -> None:
        local = self.local(name)
        if alpha:
            local.lerp_(self._global[name].to(local.device), 1 - alpha)
        else:
            local.copy_(self._global[name])

    def is_finite(self, name: str) -> bool:
        return bool(self.local(name).isfinite().all())

    def refuse_others(self) -> None:
        """Raise ConfigError if other parameters are trained, or if ranks share the weights."""
        if isinstance(self._model, DataParallel) and self._model.shares_weights:
            raise ConfigError(
                f"rank {self._comm.rank}: a Sharded optimizer with weights='node' keeps one copy "
                f"of the weights, but synchronizing writes into those of each rank; leave out "
                f"weights='node'")
        others = [name for name, p in self._module.named_parameters()
                  if p.requires_grad and name not in self._global]
        if others:
            raise ConfigError(
                f"rank {self._comm.rank}: {first_few(others, 5)} were frozen, or not there, when "
                f"this was made, and are trained now; thaw them before, or synchronize() and make "
                f"another one")
        refuse_changed(self._comm.rank, self.tensors, [
            spec_of(name, p) for name, p in self._module.named_parameters()
            if name in self._global])

    def complete(self) -> None:
        """Copy rank 0's buffers to all ranks. Collective, blocking."""
        self._buffers.copy()


class LocalSGD(outer.PeriodicAveraging):
    """Averages the parameters of all ranks after every few steps of their local optimizers.

        outer = LocalSGD(model, comm, every=8)
        for x, y in batches:
            ...
            optimizer.step()
            outer.step()
        outer.synchronize()

    Rank 0 broadcasts its parameters at the start. Any inner optimizer can be used; its state
    remains local to the rank. Buffers (BatchNorm statistics) are copied from rank 0 at the start
    and with every synchronization. Frozen parameters are broadcast at the start only.

    Args:
        model: Module to train, the same on all ranks. It may also be a DataParallel over a group of
            ranks, from `comm.split(...)`: each group averages in every step, and the groups rarely.
        comm: Communicator whose ranks train together; by default, all ranks.
        every: Number of inner steps between two averages, from 1. `sync_every`, the name in
            torchft, is also accepted.
        start: Number of first steps after each of which models are averaged ("post-local SGD").
        reducer: Reducer that averages the differences from the last mean; see `mpiring.reducers`.
        sharded: If true, each rank updates only its slices of the global parameters, and gathers
            the other slices.
        bucket_bytes: Size in bytes of the messages into which tensors are fused, approximately.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, or the model cannot be trained.
        BufferMismatchError: The models differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
    Source: Stich, ICLR 2019, arXiv 1805.09767.
    """

    kind = ParameterWeights


class DiLoCo(outer.StreamingDiLoCo):
    """Takes outer steps with Nesterov momentum on the changes from local steps.

        outer = DiLoCo(model, comm, every=64, fragments=4, delay=8, reducer=Int8())
        for x, y in batches:
            ...
            optimizer.step()
            outer.step()
        outer.synchronize()

    An outer step averages d = global - local parameters. Then v ← μ v + d and
    global ← global - η (d + μ v). Rank 0 broadcasts its parameters at the start. Any inner
    optimizer can be used (AdamW in the paper); its state remains local to the rank. Buffers
    (BatchNorm statistics) are copied from rank 0 at the start and with the last fragment. Frozen
    parameters are broadcast at the start only.

    The names of arguments in torchft, `sync_every`, `fragment_sync_delay` and
    `fragment_update_alpha`, are also accepted.

    Args:
        model: Module to train, the same on all ranks. It may also be a DataParallel over a group of
            ranks, from `comm.split(...)`: each group averages in every step, and the groups rarely.
        comm: Communicator whose ranks train together; by default, all ranks.
        every: Number of inner steps between two synchronizations of a fragment, from 1.
        lr: Outer learning rate η; a number, or a function of the number of earlier outer steps.
        momentum: Outer momentum μ; a number, or a function of the number of earlier outer steps.
        fragments: Number of parts of the model, of similar size in bytes, that are synchronized in
            turn, evenly spread over `every` steps (Streaming DiLoCo).
        delay: Number of inner steps during which a fragment is sent in the background; below
            `every`.
        alpha: Share α of the local parameters when a fragment arrives: local ← α local +
            (1 - α) global. By default 0, or 0.5 with a delay.
        reducer: Reducer that averages d; see `mpiring.reducers`. Each fragment has a copy of it.
        sharded: If true, each rank updates only its slices of the global parameters, and gathers
            the other slices.
        bucket_bytes: Size in bytes of the messages into which tensors are fused, approximately.

    Raises:
        ConfigError: An argument is wrong or differs between ranks, or the model cannot be trained.
        BufferMismatchError: The models differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
    Source: Douillard et al., 2023, arXiv 2311.08105, and 2025, arXiv 2501.18512.
    """

    kind = ParameterWeights
