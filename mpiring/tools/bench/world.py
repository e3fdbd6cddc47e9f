"""Opens the communicators of a benchmark: one of MPI, and one of mpiring."""

import os
import re
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import Communicator, Config, MpiringError
from ...provisional import launch
from ..busy import busy_warning, processor_use
from ..results import machine
from ..table import Environment

_WARM_BYTES = 1 << 20


class World:
    """The ranks that measure together.

    All ranks call its methods, and the functions that take it, together; these block. MPI's own
    calls use a duplicate of the world, which carries no messages of mpiring.

    Attributes:
        mpi: The module mpi4py.MPI.
        raw: The duplicate, an mpi4py communicator.
        comm: mpiring's communicator over the same ranks.
        thread_level: "multiple", "serialized", "funneled" or "single".
    """

    def __init__(self) -> None:
        self.mpi = launch.load_mpi()
        world = launch.mpi_world(allow_singleton=False)
        self.raw: Any = world.Dup()
        self.rank, self.size = int(world.Get_rank()), int(world.Get_size())
        self.thread_level = launch.thread_level(self.mpi)
        # The choice of "auto", but without its warning: a benchmark sets levels on purpose.
        config = Config() if self.thread_level == "multiple" else Config(progress="inline")
        self.comm = Communicator(world, config=config)
        # Compile before anything is measured.
        self.comm.prepare()
        self.barrier = self.raw.Barrier

    def slowest(self, values: list[float]) -> list[float]:
        """Return the largest values over all ranks, element by element."""
        array = np.array(values, np.float64)
        self.raw.Allreduce(self.mpi.IN_PLACE, array, op=self.mpi.MAX)
        return [float(value) for value in array]

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.slowest([float(flag)])[0] > 0

    def call_on_all(self, action: Callable[[], object]) -> None:
        """Call a function on all ranks; if it fails on any rank, raise an error on all of them.

        This MpiringError is that of the lowest rank that failed, with its number.
        """
        failure = None
        try:
            action()
        except MpiringError as error:
            failure = error
        for rank, problem in enumerate(self.raw.allgather(failure)):
            if problem is not None:
                raise type(problem)(f"rank {rank}: {problem}") from failure

    def busy_warning(self) -> str:
        """Return a warning if ranks do not get a core each; otherwise ""."""
        self.barrier()
        return busy_warning(self.raw.allgather(processor_use()),
                            "These times are too long, and do not compare contenders fairly.")

    def warm_up(self) -> None:
        """Send first messages, so that the memory they allocate counts for no contender."""
        short, long = np.ones(self.size), np.ones(self.size * _WARM_BYTES // 8)
        self.comm.iallreduce(short).wait()
        self.comm.allreduce(short)
        self.raw.Alltoall(long, np.empty_like(long))

    def environment(self) -> Environment:
        """Return the machine, the software and the placement of the ranks."""
        place = {"rank": self.rank, "host": socket.gethostname(), "node": self.comm.node_rank,
                 # The cores that this process may use; only Linux knows them.
                 "cores": (sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                           else None)}
        # Name and version of the library, from the first line of its description.
        library = self.mpi.Get_library_version().splitlines()[0].partition(",")[0]
        return {
            **machine(),
            "mpi_library": " ".join(re.sub(
                r"\(R\)|Library|Version:|for Linux\* OS|\bv(?=\d)|\0", "", library).split()),
            "thread_level": self.thread_level,
            "ranks": self.size,
            "nodes": self.comm.num_nodes,
            "placement": self.raw.allgather(place),
        }

    def close(self) -> None:
        """Close both communicators."""
        self.comm.close()
        self.raw.Free()
