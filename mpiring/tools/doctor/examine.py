"""Starts and tests MPI stage by stage, in a child process that MPI may crash."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np

from ... import Communicator, Config, MpiringError
from ...provisional import child_job, gpu, launch
from . import gather
from .facts import (
    ENDING, EXCHANGING, LOADING, MEASURING, STARTING, TRYING, Gpus, Library, Rank, cma_fails,
    vendor_of)
from .measure import measure_pairs

# GPU memory is shared in blocks of this size.
_BLOCK_BYTES = 2 << 20
# Number of elements. With 1 MiB, any algorithm may be chosen, but the allreduce is fast.
_ALLREDUCE_SIZE = 1 << 18

_LIBRARY = re.compile(r"libmpi(?!_gtl|_cxx|_mpifh|_usempi|_usempif08|fort|cxx|java)[\w-]*\.so")


def examine(descriptor: int, deadline_s: float) -> None:
    """Run all stages that need MPI, and report each one at its start.

    Each stage writes a pickle to the file `descriptor`: its name, and fields of JobFacts by name.
    The parent process kills this process after `deadline_s`.
    """
    # This process must also end if the parent was killed.
    faulthandler.dump_traceback_later(deadline_s + child_job.GRACE_S, exit=True)
    with os.fdopen(descriptor, "wb") as file:
        def report(stage: str, **facts: object) -> None:
            pickle.dump((stage, facts), file)
            file.flush()

        report(LOADING)
        try:
            mpi, level = _load_mpi()
        except (ImportError, RuntimeError) as error:
            report("", library=Library(error=str(error)))
            return
        library = _describe_library(mpi)
        # Start MPI first, as other programs do. MPICH 5.0.2 sends uninitialized memory to Slurm's
        # PMI, which fails if this memory contains a long string.
        report(STARTING, library=library)
        mpi.Init_thread(level)
        _examine_ranks(mpi, library, report)
        mpi.Finalize()
        report("")


def _load_mpi() -> tuple[Any, int]:
    """Load mpi4py.MPI without starting MPI; return it and the thread level that it requests."""
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    name = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    return MPI, getattr(MPI, f"THREAD_{name.upper()}")


def _describe_library(mpi: Any) -> Library:
    """Describe the MPI library, with calls that are allowed before MPI_Init."""
    loaded = gather.loaded_libraries()
    paths = [path for path in loaded if _LIBRARY.match(path.name)]
    text = " ".join(mpi.Get_library_version().split())[:2000]
    return Library(text=text, path=str(paths[0]) if paths else "",
                   standard=".".join(map(str, mpi.Get_version())),
                   pmix=vendor_of(text) == "Open MPI"
                   or any(path.name.startswith("libpmix") for path in loaded))


def _examine_ranks(mpi: Any, library: Library, report: Callable[..., None]) -> None:
    world = mpi.COMM_WORLD.Dup()
    rank = gather.rank(world.rank, library)
    rank = replace(rank, thread_level=launch.thread_level(mpi),
                   gpus=_query_gpu_support(rank.gpus, Path(library.path)))
    report(EXCHANGING, ranks=[rank], size=world.size)
    leaders = _leaders(mpi, world)
    place = launch.topology.topology(world.rank, leaders)
    rank = replace(rank, node=place.node_rank, gpus=with_nccl(
        with_cupy(rank.gpus, place.local_rank)))
    ranks = world.gather(rank) or [rank]
    report(TRYING, ranks=ranks)
    # Otherwise MPI would end the job before the report.
    if not world.bcast(cma_fails(ranks)):
        report(MEASURING, **_try_mpiring(mpi, world, rank))
        report(ENDING, pairs=measure_pairs(mpi, world, leaders))
    world.Free()


def _leaders(mpi: Any, world: Any) -> list[int]:
    """Return the lowest rank on the node of each rank."""
    node = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    leaders: list[int] = world.allgather(node.bcast(world.rank))
    node.Free()
    return leaders


def _try_mpiring(mpi: Any, world: Any, rank: Rank) -> dict[str, Any]:
    """Run an mpiring allreduce, unless the settings of a rank are invalid."""
    if world.allreduce(bool(rank.settings_error), op=mpi.LOR):
        return {}
    error, seconds = "", None
    # The handler need not be removed, because nothing else in this process logs.
    handler = BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    logging.getLogger("mpiring").addHandler(handler)
    try:
        seconds = _allreduce(mpi)
    except MpiringError as raised:
        error = f"{type(raised).__name__}: {raised}"
    warnings = [record.getMessage() for record in handler.buffer]
    of_ranks = world.gather((warnings, error)) or []
    return {"allreduce_s": seconds,
            "warnings": list(dict.fromkeys(line for lines, _ in of_ranks for line in lines)),
            "trial_errors": list(dict.fromkeys(text for _, text in of_ranks if text))}


def _allreduce(mpi: Any) -> float:
    """Return the seconds of the fastest of three allreduces; raise MpiringError for wrong sums."""
    best = float("inf")
    # An abort would also end the processes that report the error.
    config = Config(tuning=False, abort_on_exception=False)
    with Communicator(mpi.COMM_WORLD, config=config) as comm:
        for _ in range(3):
            x = np.full(_ALLREDUCE_SIZE, comm.rank + 1, np.float32)
            began = time.perf_counter()
            comm.allreduce(x)
            best = min(best, time.perf_counter() - began)
            if not (x == comm.size * (comm.size + 1) / 2).all():
                raise MpiringError(f"rank {comm.rank}: an allreduce gave wrong sums; {x[:3]}…")
    return best


def _query_gpu_support(gpus: Gpus, library: Path) -> Gpus:
    """Add MPI's support for GPUs to the facts about a node's GPUs; needs a started MPI."""
    if not gpus.kind:
        return gpus
    query = {"NVIDIA": "MPIX_Query_cuda_support", "AMD": "MPIX_Query_rocm_support"}[gpus.kind]
    aware = None
    with contextlib.suppress(OSError, AttributeError):
        aware = bool(getattr(ctypes.CDLL(str(library)), query)())
    loaded = gather.loaded_libraries()
    homes = [path.parent / "ucx" for path in loaded if path.name.startswith("libuct")]
    transports = tuple(sorted(
        {path.name.partition(".")[0] for home in homes for path in home.glob("libuct_*")
         if re.search("cuda|rocm|gdr", path.name)})) if homes else None
    return replace(gpus, aware=aware, transports=transports,
                   gtl=any(path.name.startswith("libmpi_gtl") for path in loaded))


def with_cupy(gpus: Gpus, local_rank: int) -> Gpus:
    """Add the GPUs that CuPy sees, and whether processes can share their memory.

    GPUs are assigned to the ranks of a node in turn.
    """
    if gpus.kind != "NVIDIA":
        return gpus
    try:
        device: Any = gpu.device_named("cuda", local_rank)
        package = device.gpu.cupy
        count = package.cuda.runtime.getDeviceCount()
        visible = tuple(str(package.cuda.Device(index).pci_bus_id) for index in range(count))
        sharing_error = ""
        try:
            device.gpu.export(device.allocate(_BLOCK_BYTES))
        except OSError as error:
            sharing_error = str(error)
    # The examination continues after any error; CUDA errors are RuntimeErrors.
    except (MpiringError, RuntimeError, ImportError, MemoryError) as error:
        return replace(gpus, problem=" ".join(str(error).split()) or type(error).__name__)
    return replace(gpus, visible=visible, address=visible[local_rank % count],
                   sharing_error=sharing_error)


def with_nccl(gpus: Gpus) -> Gpus:
    """Add the version of NCCL that this process finds."""
    if not gpus.kind:
        return gpus
    try:
        return replace(gpus, nccl=str(gpu.nccl_library()))
    except MpiringError as error:
        return replace(gpus, nccl_problem=str(error))
