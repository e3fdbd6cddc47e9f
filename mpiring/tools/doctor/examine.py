"""Starts MPI stage by stage and tries it, in a child process that may die of it."""

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

from ...communicator import Communicator
from ...config import Config
from ...errors import MpiringError
from ...launch import child_job
from ...launch.start import thread_level
from ...launch.topology import topology
from . import gather
from .facts import (
    ENDING, EXCHANGING, LOADING, MEASURING, STARTING, TRYING, Gpus, Library, Rank,
    is_closed, vendor_of)
from .measure import measured

# Processes share whole blocks of this size of GPU memory.
_BLOCK_BYTES = 2 << 20
# Long enough for any algorithm to be chosen, too short to be noticed.
_TRIED_SIZE = 1 << 18

_LIBRARY = re.compile(r"libmpi(?!_gtl|_cxx|_mpifh|_usempi|_usempif08|fort|cxx|java)[\w-]*\.so")


def examine(descriptor: int, deadline_s: float) -> None:
    """Do all that needs MPI, and report stage by stage, so that a reader sees where it died.

    Args:
        descriptor: File descriptor to which each stage writes a pickle: its name, and Job's
            fields by name.
        deadline_s: Seconds after which this process ends, wherever it is.
    """
    # The process that started this one kills it earlier, unless it was killed itself.
    faulthandler.dump_traceback_later(deadline_s + child_job.GRACE_S, exit=True)
    with os.fdopen(descriptor, "wb") as file:
        def report(stage: str, **facts: object) -> None:
            pickle.dump((stage, facts), file)
            file.flush()

        report(LOADING)
        try:
            mpi, level = _loaded()
        except (ImportError, RuntimeError) as error:
            report("", library=Library(error=str(error)))
            return
        library = _library(mpi)
        # Nothing else before MPI is started, so that it finds the same as in any program. MPICH
        # 5.0.2 sends unused memory to Slurm's PMI, which fails if that held much text.
        report(STARTING, library=library)
        mpi.Init_thread(level)
        _with_mpi(mpi, library, report)
        mpi.Finalize()
        report("")


def _loaded() -> tuple[Any, int]:
    """Load mpi4py without starting MPI; return it, and the thread level that it would ask for."""
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    name = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    return MPI, getattr(MPI, f"THREAD_{name.upper()}")


def _library(mpi: Any) -> Library:
    """Describe the library; these calls are allowed before MPI_Init."""
    loaded = gather.loaded_libraries()
    paths = [path for path in loaded if _LIBRARY.match(path.name)]
    text = " ".join(mpi.Get_library_version().split())[:2000]
    return Library(text=text, path=str(paths[0]) if paths else "",
                   standard=".".join(map(str, mpi.Get_version())),
                   pmix=vendor_of(text) == "Open MPI"
                   or any(path.name.startswith("libpmix") for path in loaded))


def _with_mpi(mpi: Any, library: Library, report: Callable[..., None]) -> None:
    world = mpi.COMM_WORLD.Dup()
    rank = gather.rank(world.rank, library)
    rank = replace(rank, thread_level=thread_level(mpi),
                   gpus=_asked(rank.gpus, Path(library.path)))
    report(EXCHANGING, ranks=[rank], size=world.size)
    leaders = _leaders(mpi, world)
    place = topology(world.rank, leaders)
    rank = replace(rank, node=place.node_rank, gpus=usable(rank.gpus, place.local_rank))
    ranks = world.gather(rank) or [rank]
    report(TRYING, ranks=ranks)
    # MPI would end the job, and the report with it.
    if not world.bcast(is_closed(ranks)):
        report(MEASURING, **_tried(mpi, world, rank))
        report(ENDING, pairs=measured(mpi, world, leaders))
    world.Free()


def _leaders(mpi: Any, world: Any) -> list[int]:
    """Return for every rank the lowest one that shares its node's memory."""
    node = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    leaders: list[int] = world.allgather(node.bcast(world.rank))
    node.Free()
    return leaders


def _tried(mpi: Any, world: Any, rank: Rank) -> dict[str, Any]:
    """Run an allreduce as mpiring does it, unless it would refuse a rank's settings."""
    if world.allreduce(bool(rank.settings_error), op=mpi.LOR):
        return {}
    error, seconds = "", None
    # It stays: nothing else logs in this process.
    handler = BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    logging.getLogger("mpiring").addHandler(handler)
    try:
        seconds = _allreduce(mpi)
    except MpiringError as raised:
        error = f"{type(raised).__name__}: {raised}"
    warnings = [record.getMessage() for record in handler.buffer]
    everywhere = world.gather((warnings, error)) or []
    return {"tried_s": seconds,
            "warnings": list(dict.fromkeys(line for lines, _ in everywhere for line in lines)),
            "trial_errors": list(dict.fromkeys(text for _, text in everywhere if text))}


def _allreduce(mpi: Any) -> float:
    """Return the seconds of an allreduce, the fastest of three.

    Raises:
        MpiringError: It does not work, or its sums are wrong.
    """
    best = float("inf")
    # Aborting would also end the processes that report the error.
    config = Config(tuning=False, abort_on_exception=False)
    with Communicator(mpi.COMM_WORLD, config=config) as comm:
        for _ in range(3):
            x = np.full(_TRIED_SIZE, comm.rank + 1, np.float32)
            began = time.perf_counter()
            comm.allreduce(x)
            best = min(best, time.perf_counter() - began)
            if not (x == comm.size * (comm.size + 1) / 2).all():
                raise MpiringError(f"rank {comm.rank}: an allreduce gave wrong sums; {x[:3]}…")
    return best


def _asked(gpus: Gpus, library: Path) -> Gpus:
    """Add what a started MPI knows about GPUs to what is known of the node's."""
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


def usable(gpus: Gpus, turn: int) -> Gpus:
    """Add to a node's GPUs what CuPy sees of them, and whether memory can be shared.

    Args:
        gpus: GPUs of the node.
        turn: Number of this rank among those of its node, which take GPUs in turn.
    """
    if gpus.kind != "NVIDIA":
        return gpus
    try:
        from ...gpu import cuda
        package = cuda.cupy()
        count = package.cuda.runtime.getDeviceCount()
        seen = tuple(str(package.cuda.Device(index).pci_bus_id) for index in range(count))
        device = cuda.device(turn % count)
        unshared = ""
        try:
            device.gpu.export(device.allocate(_BLOCK_BYTES))
        except OSError as error:
            unshared = str(error)
    # A look must not end the examination: CUDA's own errors are RuntimeErrors.
    except (MpiringError, RuntimeError, ImportError, MemoryError) as error:
        return replace(gpus, problem=" ".join(str(error).split()) or type(error).__name__)
    return replace(gpus, seen=seen, address=seen[turn % count], unshared=unshared)
