"""Opens and closes a group of ranks, numbers its operations, and hands them to the engine."""

import atexit
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .collectives import chain
from .collectives.agreement import Call, agreed
from .collectives.native import Turns
from .collectives.select import Collectives
from .config import Config
from .engine import Engine, Handle
from .errors import ClosedError, ConfigError, MissingDependencyError
from .launch import JobEnder, end_job_on_exceptions
from .memory.scratch import Scratch
from .statistics import Statistics
from .topology import topology
from .transport.base import Schedule, T
from .watch import StallWatch

if TYPE_CHECKING:
    from mpi4py import MPI

Build = Callable[[Collectives], Schedule[T]]

_log = logging.getLogger("mpiring")


def load_mpi() -> Any:
    """Return the module mpi4py.MPI, with MPI started.

    Raises:
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalised already.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise MissingDependencyError(
            f"mpi4py cannot load an MPI library ({exc}); load your cluster's MPI module, "
            f"or install one: pip install 'mpiring[mpich]'") from exc
    if MPI.Is_finalized():
        raise ClosedError("MPI is finalised; make communicators before MPI.Finalize()")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


class Group:
    """The ranks of a private duplicate of an MPI communicator, and their operations.

    Args:
        mpi_comm: The communicator to duplicate.
        config: Settings.
        engine: The engine of the group that this one was split from; a new one by default.

    Raises: as Communicator.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm", config: Config,
                 engine: Engine | None = None) -> None:
        mpi = load_mpi()
        if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
            raise ConfigError(f"expected an mpi4py intracommunicator, got {mpi_comm!r}")
        from .transport.mpi import Mailbox, MpiTransport, abort, before_finalize, node_leaders
        self.config = config
        self._transport = MpiTransport(mpi_comm)
        self.rank, self.size = self._transport.rank, self._transport.size
        self.place = topology(self.rank, node_leaders(self._transport.comm))
        self.closed = False
        self._is_finalized: Callable[[], bool] = mpi.Is_finalized
        self._sequence = 0
        self._turns = Turns()
        self._scratch = Scratch(keep=config.operations_in_flight + 1)
        self._end_job = JobEnder(self.rank, self.size, abort)
        if self.size > 1 and config.abort_on_exception:
            end_job_on_exceptions(self._end_job)
        self._refuse_different_settings()
        self._engine = engine or self._start_engine(mpi)
        self._watch = StallWatch(self.rank, self.size, Mailbox(self._transport), config)
        self._lane = self._engine.join(self._watch)
        self._disconnect = before_finalize(lambda: self._engine.leave(self._lane))
        atexit.register(self._close_at_exit)

    def _refuse_different_settings(self) -> None:
        mine = {"algorithm": self.config.algorithm,
                "operations_in_flight": self.config.operations_in_flight}
        for rank, theirs in enumerate(self._transport.comm.allgather(mine)):
            if theirs != mine:
                raise ConfigError(
                    f"rank {self.rank} has {mine} but rank {rank} has {theirs}; give every rank "
                    f"the same Config and the same MPIRING_* variables")

    def _start_engine(self, mpi: Any) -> Engine:
        threaded = self.size > 1 and self._take_thread(mpi)
        end_job = self._end_job if self.config.abort_on_exception else _do_nothing
        return Engine(self.config, threaded=threaded, end_job=end_job)

    def _take_thread(self, mpi: Any) -> bool:
        """Decide whether operations advance in a background thread."""
        multiple: bool = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        wish = self.config.progress
        if wish == "thread" and not multiple:
            raise ConfigError(
                f"rank {self.rank}: progress='thread' needs MPI_THREAD_MULTIPLE, which this MPI "
                f"library was not started with; use progress='inline' or 'auto'")
        if wish == "auto" and not multiple and self.rank == 0:
            _log.warning("MPI offers less than MPI_THREAD_MULTIPLE: operations advance only "
                         "inside mpiring's calls, so less communication is hidden")
        return wish != "inline" and multiple

    def submit(self, call: Call, build: Build[T]) -> Handle[T]:
        """Begin an operation in the background.

        Args:
            call: What it is; compared across ranks and shown in reports.
            build: Returns its schedule, given the collectives bound to its channel.

        Collective: yes. Blocking: no.
        """
        handle = self._made(call, build)
        return handle if handle.done else self._engine.submit(handle)

    def run(self, call: Call, build: Build[T], *, patient: bool = False) -> T:
        """Run an operation, ahead of those in the background, and return its result.

        Args:
            call, build: As for `submit`.
            patient: Other ranks may take any time to arrive.

        Collective: yes. Blocking: yes.
        """
        handle = self._made(call, build, patient)
        return handle.wait() if handle.done else self._engine.run(handle)

    def _made(self, call: Call, build: Build[T], patient: bool = False) -> Handle[T]:
        """Give an operation its number and its handle; alone, run it to its end."""
        self.check_open()
        sequence = self._sequence
        net = self._transport.channel(sequence)
        schedule = build(Collectives(
            net, self._scratch, self._transport, self._turns, sequence, self.config.algorithm))
        self._sequence += 1
        if self.size > 1:
            schedule = agreed(net, call, sequence, schedule)
        handle = Handle(self._lane, call, sequence, schedule)
        if self.size > 1:
            self._watch.enter(handle, patient=patient)
        else:
            handle.start()
            handle.done = True
        return handle

    def poke(self) -> None:
        """Make some progress, where no background thread makes it."""
        self._engine.poke()

    @property
    def statistics(self) -> Statistics:
        """What communication has cost so far."""
        engine = self._engine
        return Statistics(engine.operations, self._transport.bytes_sent,
                          engine.communication_s, engine.exposed_s)

    def split(self, color: int | None, key: int) -> "Group | None":
        """Return a group of the ranks that pass the same color; None where that is None.

        Collective: yes. Blocking: yes.
        """
        mpi = load_mpi()
        # After the barrier every rank is known to be here, so MPI's call cannot stall.
        self.run(Call("split"), lambda collectives: chain.barrier(collectives.net))
        part = self._transport.comm.Split(mpi.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        child = Group(cast("MPI.Intracomm", part), self.config, self._engine)
        part.Free()
        return child

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        Collective: yes. Blocking: yes.
        """
        if self.closed:
            return
        self.check_open()
        if self.size > 1:
            for handle in self._watch.unfinished():
                handle.wait()
            # Other ranks may compute for hours before they close, too.
            self.run(Call("close"), lambda collectives: chain.barrier(collectives.net),
                     patient=True)
        self.closed = True
        atexit.unregister(self._close_at_exit)
        self._disconnect()
        self._transport.free()

    def _close_at_exit(self) -> None:
        """Close a group whose program forgot to, or has left early."""
        if self._is_finalized():
            return
        try:
            self.close()
        except BaseException as error:
            self._end_job(error)

    def check_open(self) -> None:
        """Raise ClosedError unless the group is open and MPI is running."""
        if self.closed:
            raise ClosedError(
                f"rank {self.rank}: this communicator is closed; call close() last, "
                f"or make a new one with mpiring.init()")
        if self._is_finalized():
            raise ClosedError(
                f"rank {self.rank}: MPI is finalised; close() communicators before MPI.Finalize()")


def _do_nothing(error: BaseException) -> None:
    """Leave an error of the background thread to the next call."""
