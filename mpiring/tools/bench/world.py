"""Opens the ranks of a benchmark: MPI itself, on a communicator of its own, beside mpiring's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...communicator import Communicator
from ...config import Config
from ...errors import MpiringError
from ...launch.start import load_mpi, mpi_world

_WARM_BYTES = 1 << 20


class World:
    """The ranks that measure together.

    MPI is used on a duplicate of the world, where mpiring's messages never are.

    Attributes:
        mpi: The module mpi4py.MPI.
        raw: The duplicate, an mpi4py communicator.
        comm: mpiring's communicator over the same ranks.
        rank, size: As in MPI.
        thread_level: "multiple", "serialized", "funneled" or "single".

    Collective: yes. Blocking: yes.
    """

    def __init__(self) -> None:
        self.mpi = load_mpi()
        world = mpi_world(allow_singleton=False)
        self.raw: Any = world.Dup()
        self.rank, self.size = int(world.Get_rank()), int(world.Get_size())
        levels = {self.mpi.THREAD_SINGLE: "single", self.mpi.THREAD_FUNNELED: "funneled",
                  self.mpi.THREAD_SERIALIZED: "serialized", self.mpi.THREAD_MULTIPLE: "multiple"}
        self.thread_level = levels[self.mpi.Query_thread()]
        # What "auto" comes to anyway, but without its warning: here it is the subject.
        config = Config() if self.thread_level == "multiple" else Config(progress="inline")
        self.comm = Communicator(world, config=config)
        self.barrier = self.raw.Barrier

    def slowest(self, values: list[float]) -> list[float]:
        """Return for each place the largest of the ranks' values.

        Collective: yes. Blocking: yes.
        """
        array = np.array(values, np.float64)
        self.raw.Allreduce(self.mpi.IN_PLACE, array, op=self.mpi.MAX)
        return [float(value) for value in array]

    def anywhere(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank.

        Collective: yes. Blocking: yes.
        """
        return self.slowest([float(flag)])[0] > 0

    def everywhere(self, action: Callable[[], object]) -> None:
        """Do what each rank can do alone; raise on all ranks what it raises on any.

        Raises:
            MpiringError: The first such rank's, which it names.

        Collective: yes. Blocking: yes.
        """
        mine = None
        try:
            action()
        except MpiringError as error:
            mine = error
        for rank, problem in enumerate(self.raw.allgather(mine)):
            if problem is not None:
                raise type(problem)(f"rank {rank}: {problem}") from mine

    def warm_up(self) -> None:
        """Take the memory that a process's first messages cost, whichever contender sends them.

        Collective: yes. Blocking: yes.
        """
        few, many = np.ones(self.size), np.ones(self.size * _WARM_BYTES // 8)
        self.comm.iallreduce(few).wait()
        self.comm.allreduce(few)
        self.raw.Alltoall(many, np.empty_like(many))

    def close(self) -> None:
        """Close both communicators.

        Collective: yes. Blocking: yes.
        """
        self.comm.close()
        self.raw.Free()
