"""All ranks of a program that calls Horovod's functions: `init`, `rank`, `size`, process sets.

Horovod's functions have no argument for a communicator, so this file keeps a global one.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import Communicator, MpiringError
from ..provisional import files, launch
from .matching import Matcher, await_all
from .process_sets import NOT_INITIALIZED, ProcessSet, ranks_of
from .settings import HorovodSettings, settings

_log = logging.getLogger("mpiring")


class HorovodWorld:
    """All ranks, in a Communicator and in MPI, and their process sets. Collective, blocking."""

    def __init__(self, comm: Communicator, mpi_comm: Any, settings: HorovodSettings) -> None:
        self.comm, self.settings = comm, settings
        # Results have the same length in each step, so freed memory can be reused.
        launch.keep_freed_memory()
        self._mpi_comm = mpi_comm
        self._sets: list[ProcessSet] = []
        self._numbers, self._timeline = 0, ""
        self.add(global_process_set, range(comm.size))

    def add(self, process_set: ProcessSet, ranks: Sequence[int] | None = None) -> None:
        """Create the communicators of a process set, and number the set. Collective, blocking.

        By default, `ranks` is `process_set.ranks`. Raises ValueError if a set of these ranks
        exists, or `ranks_of` raises it.
        """
        if self._sets:
            self._sets[0].arrive("add_process_set")
        if ranks is None:
            ranks = ranks_of(process_set, self.comm, self._mpi_comm)
        for other in self._sets:
            if other.ranks == list(ranks):
                raise ValueError(f"Attempted to add a duplicate process set: {process_set}; use "
                                 f"{'global_process_set' if other is self._sets[0] else other}")
        color = 0 if self.comm.rank in ranks else None
        comm = self.comm if len(ranks) == self.comm.size else self.comm.split(color)
        private = self.comm.split(color)
        matcher = None if private is None else Matcher(
            private, ranks, self.settings.fusion_bytes, process_set.step_without_batch)
        process_set.open(self._numbers, ranks, comm, matcher)
        self._numbers += 1
        self._sets.append(process_set)

    def remove(self, process_set: ProcessSet) -> bool:
        """End the operations of a set; return False if unknown or global. Collective, blocking."""
        if process_set not in self._sets[1:]:
            return False
        self._sets[0].arrive("remove_process_set")
        process_set.close()
        self._sets.remove(process_set)
        return True

    @property
    def included(self) -> list[ProcessSet]:
        """The sets that include this rank; the global one is the first."""
        return [process_set for process_set in self._sets if process_set.included()]

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Start a trace; see the function `start_timeline`."""
        self._sets[0].arrive("start_timeline")
        self._end_timeline()
        self._timeline = os.path.abspath(path)
        self.comm.start_trace(f"{self._timeline}.ranks")
        for process_set in self.included:
            process_set.matcher.marks_rounds = mark_cycles

    def stop_timeline(self) -> None:
        """End a trace; see the function `stop_timeline`."""
        self._sets[0].arrive("stop_timeline")
        self._end_timeline()

    def _end_timeline(self) -> None:
        """End the trace, if there is one; rank 0 copies its file. All ranks have arrived."""
        trace, path, self._timeline = self.comm.stop_trace(), self._timeline, ""
        if trace and path and self.comm.rank == 0:
            try:
                with files.replacing(Path(path)) as new:
                    new.file.write(Path(trace).read_bytes())
            except OSError as error:
                # Training must not end because of its record.
                _log.warning("rank 0 cannot write the timeline %s: %s; the records of all ranks "
                             "are in %s.ranks", path, error.strerror or error, path)

    def close(self) -> None:
        """Wait for all operations of all sets, and for all ranks. Collective, blocking."""
        # Ranks may end the operations of different sets in different orders.
        await_all([process_set.matcher.end() for process_set in self.included])
        self._end_timeline()
        for process_set in reversed(self._sets):
            process_set.close()
        self.comm.close()

    def abandon(self) -> None:
        """End and forget all sets, because a rank has died and `comm` was abandoned."""
        for process_set in self._sets:
            # This ends the matcher's thread. Communicators raise errors because a rank is missing.
            with contextlib.suppress(MpiringError):
                process_set.close()


global_process_set = ProcessSet([])
_world: HorovodWorld | None = None


def world() -> HorovodWorld:
    """Return the world; raise ValueError before `init` and after `shutdown`."""
    if _world is None:
        raise ValueError(NOT_INITIALIZED)
    return _world


def init(comm: Any = None,
         process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start MPI if necessary, and initialize Horovod's functions; a second call has no effect.

    Args:
        comm: mpi4py communicator, or list of ranks of MPI's world; by default, all ranks.
        process_sets: Initial process sets. "dynamic" is accepted, because sets can be added at any
            time.

    Raises:
        ValueError: A process set is a duplicate, or has ranks that do not exist.
        LaunchError: The launcher was asked for several ranks, but this process is alone.

    Collective: yes. Blocking: yes.
    """
    if _world is None:
        begin(_communicator_of(comm), [] if isinstance(process_sets, str) else process_sets or [])


def _communicator_of(comm: Any) -> Any:
    if comm is not None and hasattr(comm, "Get_group"):
        return comm
    everyone = launch.mpi_world(allow_singleton=settings().config.allow_singleton)
    if not comm:
        return everyone
    # All ranks must call Split, including those that are left out.
    part = everyone.Split(
        0 if everyone.rank in comm else launch.load_mpi().UNDEFINED, everyone.rank)
    if everyone.rank not in comm:
        raise ValueError(f"rank {everyone.rank}: init({list(comm)}) leaves this rank out: it has "
                         f"nothing to do with Horovod's functions; end it, or let it call others")
    return part


def begin(mpi_comm: Any, process_sets: Iterable[ProcessSet] = (),
          comm: Communicator | None = None) -> None:
    """Create the world of an MPI communicator; `comm` has the same ranks. Collective, blocking."""
    global _world
    given = settings()
    new = HorovodWorld(comm or Communicator(mpi_comm, config=given.config), mpi_comm, given)
    if new.comm.rank == 0 and given.ignored:
        _log.warning("mpiring ignores %s", "; ".join(given.ignored))
    _world = new
    # Communicators do not wait for named operations when they are closed.
    launch.exits.register(_shutdown_at_exit, uses_communicators=True)
    try:
        for process_set in process_sets:
            new.add(process_set)
    except ValueError as error:
        raise ValueError(f"Horovod could not be initialized: {error}") from error


def shutdown() -> None:
    """Wait for all operations and all ranks, then end; `init` may be called again.

    Collective: yes. Blocking: yes.
    """
    global _world
    if _world is not None:
        ended, _world = _world, None
        launch.exits.unregister(_shutdown_at_exit)
        if not launch.forks.in_fork:
            ended.close()


def _shutdown_at_exit() -> None:
    # The first error was already reported, and MPI may be finalized.
    with contextlib.suppress(MpiringError):
        shutdown()


def abandon() -> None:
    """Forget all ranks and process sets without waiting for them, since a rank has died."""
    global _world
    if _world is not None:
        ended, _world = _world, None
        launch.exits.unregister(_shutdown_at_exit)
        ended.abandon()


def is_initialized() -> bool:
    """Return whether `init` was called, without `shutdown` after it."""
    return _world is not None


def size() -> int:
    """Return the number of ranks."""
    return world().comm.size


def rank() -> int:
    """Return the number of this rank."""
    return world().comm.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return world().comm.local_size


def local_rank() -> int:
    """Return the number of this rank on its node."""
    return world().comm.local_rank


def cross_size() -> int:
    """Return the number of nodes."""
    return world().comm.num_nodes


def cross_rank() -> int:
    """Return the number of this rank's node."""
    return world().comm.node_rank


def is_homogeneous() -> bool:
    """Return whether every node has the same number of ranks."""
    comm = world().comm
    return comm.size == comm.local_size * comm.num_nodes


def mpi_threads_supported() -> bool:
    """Return whether any thread may call MPI."""
    world()
    return launch.thread_level(launch.load_mpi()) == "multiple"


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it.

    Args:
        process_set: The set, or its ranks.

    Raises:
        ValueError: A set of these ranks exists, or the ranks do not exist.

    Collective: yes, among all ranks. Blocking: yes.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    world().add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the operations of a process set; return whether it was registered.

    The global process set cannot be removed; the result is then False.

    Args:
        process_set: The set.

    Collective: yes, among all ranks. Blocking: yes.
    """
    return world().remove(process_set)


def mpi_enabled() -> bool:
    """Return True: all data is sent by MPI, or through node-shared memory."""
    return True


def mpi_built() -> bool:
    """Return True."""
    return True


def gloo_enabled() -> bool:
    """Return False."""
    return False


def gloo_built() -> bool:
    """Return False."""
    return False


def nccl_built() -> int:
    """Return 0, because NCCL is not used; Horovod returns its version."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return whether CuPy is installed, which combines arrays on CUDA GPUs."""
    return importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """Return False."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations of all ranks from now on, until `stop_timeline`.

    Args:
        file_path: File for rank 0's record, in JSON for Chrome's viewer and Perfetto. The folder
            `<file_path>.ranks` has the records of all ranks, for `python -m mpiring trace`.
        mark_cycles: If true, also record when ranks begin to compare their operations.

    Raises:
        ValueError: `init` was not called.

    Collective: yes. Blocking: yes.
    """
    world().start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the record that `start_timeline` has begun.

    Collective: yes. Blocking: yes.
    """
    world().stop_timeline()
