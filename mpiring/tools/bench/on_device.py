"""Contenders on GPUs: mpiring, copies around MPI's allreduce, NCCL, and the limits."""

from argparse import Namespace
from typing import Any

import numpy as np

from ... import ConfigError
from ...gpus import cupy_for
from ...provisional import gpu
from . import peers
from .contenders import (
    DEVICE_COPY, NAIVE, NAIVE_PINNED, PINNED_COPIES, Call, Contender, mpiring_contenders,
    refuse_unknown,
)
from .timing import finish
from .world import World


class GpuArrays:
    """Arrays on this rank's GPU, and the contenders for them.

    Raises:
        MissingDependencyError: There is no CuPy, or no GPU.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._cupy = cupy_for(world.comm)
        self.device = gpu.device_named("cuda", world.comm.local_rank)

    def array(self, buffer: str, length: int, dtype: np.dtype[Any]) -> Any:
        """Return an array: private, or shared with the node's ranks if `buffer` is "empty"."""
        if buffer == "empty":
            return self._world.comm.empty(length, dtype, device=self.device)
        memory = self.device.allocate(length * dtype.itemsize).view(dtype)
        return self.device.gpu.array(memory, (length,))

    def stopwatch(self, action: Call) -> float:
        """Return the seconds of an action, between two events on the current stream."""
        began, ended = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        began.record()
        action()
        ended.record()
        ended.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(began, ended)) / 1e3

    def contenders(self, options: Namespace) -> list[Contender]:
        """Return the requested contenders, and always "auto", the naive method and the limits.

        It raises ConfigError if NCCL was requested, but cannot run here.
        """
        world, kinds = self._world, options.contenders
        contenders = [naive(world)]
        if kinds is None or "mpi" in kinds:
            contenders.append(naive_pinned(world))
        contenders += mpiring_contenders(world, kinds, options.algorithms)
        if kinds is None or "nccl" in kinds:
            contenders += _nccl(world, asked=kinds is not None)
        return [*contenders, device_copy(), pinned_copies(world.size)]


def naive(world: World) -> Contender:
    """Return the naive method: copy the array to the host, call MPI_Allreduce, and copy it back."""
    def call(x: Any) -> Call:
        refuse_unknown(x.dtype)

        def run() -> None:
            host = x.get()
            world.raw.Allreduce(world.mpi.IN_PLACE, host, op=world.mpi.SUM)
            x.set(host)
        return run

    return Contender(NAIVE, call)


def naive_pinned(world: World) -> Contender:
    """Return the naive method with a pinned buffer, which is reused."""
    def call(x: Any) -> Call:
        refuse_unknown(x.dtype)
        vector = gpu.vector_of(x)
        device = vector.device.gpu
        stream, host = device.stream(), device.pinned(vector.nbytes).view(vector.dtype)

        def run() -> None:
            stream.wait(device.mark())
            stream.download(vector, host)
            finish(stream.record())
            world.raw.Allreduce(world.mpi.IN_PLACE, host, op=world.mpi.SUM)
            stream.upload(host, vector)
            finish(stream.record())
        return run

    return Contender(NAIVE_PINNED, call)


def device_copy() -> Contender:
    """Return the limit of sums in GPU memory: each rank copies its array within that memory.

    A copy reads n bytes and writes n bytes per rank, as an allreduce must.
    """
    def call(x: Any) -> Call:
        vector = gpu.vector_of(x)
        stream, other = vector.device.gpu.stream(), _like(vector)

        def run() -> None:
            stream.combine("sum", [vector], 1, [other])
            finish(stream.record())
        return run

    return Contender(DEVICE_COPY, call, sums=False)


def pinned_copies(p: int) -> Contender:
    """Return the limit for p ranks that exchange data through the host and sum on the GPU.

    Each rank downloads n bytes: (p-1)/p n for other ranks to sum, and the n/p that it has summed.
    It uploads 2 (p-1)/p n bytes: p-1 slices of n/p to sum, and p-1 slices that other ranks have
    summed. Both directions run at the same time; with 2 ranks, each direction has n bytes.
    """
    def call(x: Any) -> Call:
        vector = gpu.vector_of(x)
        device = vector.device.gpu
        down, up, other = device.stream(), device.stream(), _like(vector)
        hosts = [device.pinned(vector.nbytes).view(vector.dtype) for _ in range(2)]
        upload_size = 2 * (p - 1) * vector.size // p

        def run() -> None:
            down.download(vector, hosts[0])
            for start in range(0, upload_size, vector.size):
                piece = slice(0, min(vector.size, upload_size - start))
                up.upload(hosts[1][piece], other[piece])
            finish(down.record())
            finish(up.record())
        return run

    return Contender(PINNED_COPIES, call, sums=False)


def _nccl(world: World, *, asked: bool) -> list[Contender]:
    """Return NCCL, called through PyTorch, if it can run with one GPU for each rank."""
    problem = "there is no PyTorch" if peers.missing(*peers.TORCH) else ""
    gpu = None
    if not problem:
        import torch
        import torch.distributed as dist
        if torch.cuda.is_available() and dist.is_nccl_available():
            index = world.comm.local_rank % torch.cuda.device_count()
            gpu = world.comm.node_rank, str(torch.cuda.get_device_properties(index).uuid)
        else:
            problem = "PyTorch has no NCCL, or finds no GPU"
    gpus = world.raw.allgather(gpu)
    if not problem and len(set(gpus)) < world.size:
        problem = f"{world.size} ranks have {len(set(gpus))} GPUs; NCCL takes one rank on each"

    def refuse() -> None:
        if problem:
            raise ConfigError(f"the contender 'nccl' cannot run: {problem}")

    if asked:
        world.call_on_all(refuse)
    elif world.any_rank(bool(problem)):
        return []
    torch.cuda.set_device(index)
    store = peers.store_of_rank_0(world, peers.interface_for(world))
    group = dist.ProcessGroupNCCL(store, world.rank, world.size)

    def call(x: Any) -> Call:
        tensors = [peers.tensor_of(x)]

        def run() -> None:
            group.allreduce(tensors).wait()
            torch.cuda.current_stream().synchronize()
        return run

    return [Contender("NCCL", call)]


def _like(x: Any) -> Any:
    return x.device.allocate(x.nbytes).view(x.dtype)
