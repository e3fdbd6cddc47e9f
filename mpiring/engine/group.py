"""Opens and closes a group of ranks, numbers its operations, and hands them to the engine."""

import atexit
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..collectives.native import Turns
from ..config import AGREED, Config
from ..errors import ClosedError, ConfigError, MpiringError
from ..launch import forks
from ..launch.start import JobEnder, end_job_on_exceptions, load_mpi
from ..launch.topology import neighbours, node_order, ranks_of_nodes, topology
from ..memory.scratch import Scratch
from ..operations.agreement import Call, agreed
from ..operations.gpus import GpuOperations
from ..operations.model import Model
from ..operations.operation import Collectives
from ..operations.resources import Resources
from ..operations.select import candidates
from ..operations.windows import Windows, mapped
from ..record.recorder import Flight, Recorder
from ..record.statistics import Statistics
from ..record.trace_file import TraceFile
from ..transport.base import Schedule, T, Task, run_to_end
from ..transport.node_memory import NODE_MEMORY_BYTES, NodeMemory
from ..transport.opened import Opening
from .engine import Engine
from .handle import Handle
from .messages import Messages
from .stalls import StallWatch
from .tuning import tuner_over

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.survivors import Survivors

Build = Callable[[Collectives], Schedule[T]]

_log = logging.getLogger("mpiring")


class Group:
    """The ranks of a private duplicate of an MPI communicator, and their operations.

    Args:
        mpi_comm: The communicator to duplicate.
        config: Settings.
        engine: The engine of the group that this one was split from; a new one by default.

    Attributes:
        nodes: The ranks that share a memory, for each memory.

    Raises: as Communicator.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm", config: Config,
                 engine: Engine | None = None) -> None:
        mpi = load_mpi()
        if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
            raise ConfigError(f"expected an mpi4py intracommunicator, got {mpi_comm!r}")
        from ..transport.mpi import Mailbox, MpiTransport, abort, before_finalize
        self.config = config
        self._transport = MpiTransport(mpi_comm)
        self.rank, self.size = self._transport.rank, self._transport.size
        self.recorder = engine.recorder if engine else Recorder(self.rank)
        self._end_job = JobEnder(self.rank, self.size, abort, self.recorder.report)
        if self.size > 1 and config.abort_on_exception:
            end_job_on_exceptions(self._end_job)
        try:
            self._refuse_different_settings()
            self._open_node_memory()
        except MpiringError:
            self._transport.free()
            raise
        self._name = self.recorder.name(self._transport.comm.allgather(self.recorder.rank))
        self._trace = None
        if config.trace and engine is None:
            self.recorder.trace = self._trace = TraceFile(
                self._transport.comm, config.trace, self.place.node_rank)
        self.closed = False
        self._is_finalized: Callable[[], bool] = mpi.Is_finalized
        self._sequence = 0
        self._equip()
        self._is_tuned = len(self.nodes) == 1 or not config.tuning or config.algorithm != "auto"
        self._engine = engine or self._start_engine(mpi)
        self._watch = StallWatch(
            self.rank, self.size, Mailbox(self._transport), config, self.recorder)
        self._lane = self._engine.join(self._watch)
        self._messages: Messages | None = None
        self._disconnect = before_finalize(self._leave_engine)
        self._opening = Opening()
        atexit.register(self._close_at_exit)

    def _equip(self) -> None:
        """Begin with empty pools: no memory of earlier operations is kept."""
        windows = Windows()
        self.gpus = GpuOperations(windows, self.run, self.config)
        self._resources = Resources(
            self._transport, Turns(), Scratch(keep=self.config.operations_in_flight), windows,
            self._order, self.nodes, self.config.algorithm)

    def _open_node_memory(self) -> None:
        """Find out who shares this node, and open the memory in which those ranks meet."""
        from ..transport.mpi import MpiNode
        comm = self._transport.comm
        node = MpiNode(comm)
        leaders = comm.allgather(node.ranks[0])
        self.place, self._order = topology(self.rank, leaders), node_order(leaders)
        segments = None
        if node.size > 1 and self.config.shared_memory:
            segments = run_to_end(mapped(node, NODE_MEMORY_BYTES))
        self._memory = None if segments is None else NodeMemory(segments, node.rank, node.ranks)
        # Without common memory, each rank is a node of its own.
        leader = self.rank if segments is None else node.ranks[0]
        self.nodes = ranks_of_nodes(comm.allgather(leader), self._order)
        self._neighbours = neighbours(self.rank, self.nodes)
        node.free()

    def _refuse_different_settings(self) -> None:
        mine = {"trace": bool(self.config.trace),
                **{name: getattr(self.config, name) for name in AGREED}}
        for rank, theirs in enumerate(self._transport.comm.allgather(mine)):
            if theirs != mine:
                raise ConfigError(
                    f"rank {self.rank} has {mine} but rank {rank} has {theirs}; give every rank "
                    f"the same Config and the same MPIRING_* variables")

    def _start_engine(self, mpi: Any) -> Engine:
        threaded = self.size > 1 and self._take_thread(mpi)
        end_job = self._end_job if self.config.abort_on_exception else _do_nothing
        return Engine(self.config, threaded=threaded, end_job=end_job, recorder=self.recorder)

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

    def tune(self, *, fresh: bool = False) -> Model:
        """Find out what each algorithm costs here; from then on "auto" takes the fastest.

        Args:
            fresh: Measure, even if an earlier job has.

        Collective: yes. Blocking: yes.
        """
        tuner = tuner_over(
            self._tuning, rank=self.rank, cluster=self._cluster,
            candidates=candidates(self.size, len(self._resources.nodes)),
            folder=self.config.tuning_folder)
        self._resources = replace(self._resources, model=tuner.find(fresh=fresh))
        self._is_tuned = True
        return self._resources.model  # type: ignore[return-value]

    def tune_once(self) -> None:
        """Tune before the first allreduce whose algorithm depends on it.

        Collective: yes. Blocking: yes, the first time.
        """
        if not self._is_tuned:
            self.tune()

    @property
    def _cluster(self) -> str:
        """What the speed of collectives depends on."""
        shape = [len(ranks) for ranks in self._resources.nodes]
        library = " ".join(load_mpi().Get_library_version().split()[:4])
        return (f"{library}, ranks per node {shape}, "
                f"{'thread' if self._engine.threaded else 'inline'} progress")

    def _tuning(self, step: str, build: Build[T]) -> T:
        return self.run(Call("tune", f"(before the first allreduce between nodes): {step}"), build)

    def submit(self, call: Call, build: Build[T]) -> Handle[T]:
        """Begin an operation in the background.

        Args:
            call: What it is; compared across ranks and shown in reports.
            build: Returns its schedule, given the collectives bound to its channel.

        Collective: yes. Blocking: no.
        """
        flight, schedule = self._called(call, build)
        try:
            self._sequence += 1
            handle = Handle(self._lane, flight, Task(schedule))
            if self.size > 1:
                self._watch.enter(handle)
            elif handle.step() and handle.finished:
                handle.done = True
                return handle
            # One rank alone may wait, too: for its GPU.
            return self._engine.submit(handle)
        except BaseException as error:
            self._engine.keep(error)
            raise

    def run(self, call: Call, build: Build[T], *, patient: bool = False) -> T:
        """Run an operation, ahead of those in the background, and return its result.

        Args:
            call, build: As for `submit`.
            patient: Other ranks may take any time to arrive.

        Collective: yes. Blocking: yes.
        """
        flight, schedule = self._called(call, build)
        task = Task(schedule)
        try:
            self._sequence += 1
            if self.size > 1 and not self._engine.run_at_once(task, flight, self._lane):
                handle = Handle(self._lane, flight, task)
                self._watch.enter(handle, patient=patient)
                self._engine.run(handle)
        except BaseException as error:
            self._engine.keep(error, task)
            raise
        while not task.done:
            task.step()
        return task.result  # type: ignore[return-value]

    def _called(self, call: Call, build: Build[T]) -> tuple[Flight, Schedule[T]]:
        """Compose the schedule of the next operation, and note that it was called.

        Its number is not used up yet: what the user got wrong shows here. Afterwards, even
        a signal whose handler raises must not take an operation from one rank unnoticed.
        """
        self.check_open()
        sequence, memory = self._sequence, self._memory
        node = None if memory is None else memory.node(sequence, call.header, call.digest)
        collectives = Collectives(self._resources, node, sequence)
        try:
            schedule = build(collectives)
            if self.size == 1:
                return Flight(call, sequence), schedule
            flight = Flight(call, sequence, self._name, collectives.algorithm)
            self.recorder.add(flight)
            self._watch.last = flight
            return flight, agreed(
                lambda: collectives.net, node, self._neighbours, call, schedule)
        except BaseException:
            # It came to nothing: later operations must not wait for its turn.
            self._resources.turns.forget(sequence)
            raise

    def poke(self) -> None:
        """Make some progress, where no background thread makes it."""
        self._engine.poke()

    @property
    def statistics(self) -> Statistics:
        """What this group's operations have cost so far."""
        lane = self._lane
        return Statistics(lane.operations, self._transport.bytes_sent,
                          lane.communication_s, lane.exposed_s)

    def split(self, color: int | None, key: int) -> "Group | None":
        """Return a group of the ranks that pass the same color; None where that is None.

        Waits for all operations.

        Collective: yes. Blocking: yes.
        """
        from ..transport.mpi import made
        self.check_open()
        mpi = load_mpi()
        # Their native collectives and MPI's split must come in one order on all ranks.
        self._wait_for_all()
        # After the barrier every rank is known to be here, so MPI's call cannot stall.
        self.run(Call("split"), lambda collectives: collectives.barrier())
        comm = self._transport.comm
        part = made(comm, lambda: comm.Split(mpi.UNDEFINED if color is None else color, key))
        return None if color is None else self._child(cast("MPI.Intracomm", part), self.config)

    def _child(self, part: "MPI.Intracomm", config: Config) -> "Group":
        """Return a group of some ranks, which shares this one's engine; frees `part`."""
        try:
            return Group(part, config, self._engine)
        finally:
            part.Free()

    def subgroup(self, ranks: Sequence[int], tag: int, config: Config) -> "Group":
        """Return a group of some ranks, which shares this one's engine.

        Args:
            ranks: Of this group, this rank among them, in their new order.
            tag: Tells groups apart that overlapping ranks make at once.
            config: Its settings.

        Collective: yes, among those ranks. Blocking: yes.
        """
        from ..transport.mpi import made
        self.check_open()
        comm = self._transport.comm
        everybody = comm.Get_group()
        members = everybody.Incl(ranks)
        part = made(comm, lambda: comm.Create_group(members, tag % self._transport.tag_limit))
        for used in (members, everybody):
            used.Free()
        return self._child(part, config)

    def messages(self) -> Messages:
        """Return single messages among these ranks, beside the collectives.

        Collective: yes, the first time. Blocking: yes.
        """
        if self._messages is None:
            self.check_open()
            from ..transport.mpi import Mailbox, MpiTransport
            transport = MpiTransport(self._transport.comm)
            self._messages = Messages(transport, Mailbox(transport), self._engine, self.config)
        return self._messages

    def beside(self) -> "Group":
        """Return another group of the same ranks, whose operations have an order of their own.

        Collective: yes. Blocking: yes. Needs `messages()`, on whose communicator nothing
        else is collective: some rank may be amid an operation of this group.
        """
        return Group(self.messages().comm, self.config, self._engine)

    def set_stall_timeout(self, seconds: float) -> None:
        """Change `stall_timeout_s` for this group."""
        self.config = self._watch.config = replace(self.config, stall_timeout_s=seconds)
        if self._messages is not None:
            self._messages.config = self.config

    @property
    def threaded(self) -> bool:
        """Whether operations advance in the background."""
        return self._engine.threaded

    def _leave_engine(self) -> None:
        if forks.is_fork():
            # Its copies of locks may be held for ever, by threads that it has not.
            return
        if self._messages is not None:
            self._messages.leave()
        self._engine.leave(self._lane)
        if self._trace is not None:
            self._trace.close(together=False)

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        In a fork of this process it does nothing.

        Collective: yes. Blocking: yes.
        """
        if self.closed or forks.is_fork():
            return
        self.check_open()
        if self.size > 1:
            self._wait_for_all()
            # Other ranks may compute for hours before they close, too.
            self.run(Call("close"), lambda collectives: collectives.barrier(),
                     patient=True)
        self.closed = True
        if self._trace is not None:
            self._trace.close(together=True)
        self._forget()
        if self._messages is not None:
            self._messages.free()
        self._transport.free()

    def survivors(self) -> "Survivors":
        """Return what lets these ranks go on when one of them dies."""
        from ..transport.survivors import Survivors
        return Survivors(self._transport.comm)

    def abandon(self, error: BaseException) -> None:
        """Close, because a rank has died, without waiting for operations or for anybody.

        Groups that were split from this one can be used no more either: calls raise `error`.
        """
        if not self.closed and not forks.is_fork():
            self.closed = True
            self.survivors().leave(self._engine.give_up(error))
            self._forget()

    def drop(self) -> None:
        """Note that the user has lost it without closing it; for the garbage collector.

        That is local: thread and memory are given back, once nothing is under way. What other
        ranks need to close it stays until the end of the program.
        """
        if (self.closed or self._engine.given_up or self._is_finalized()
                or forks.is_fork()):
            return
        self._equip()
        self._lane.dropped = True
        self._opening.drop(f"rank {self.rank}: a communicator of {self.size} ranks")

    def _forget(self) -> None:
        atexit.unregister(self._close_at_exit)
        self._opening.close()
        self._disconnect()

    def _wait_for_all(self) -> None:
        """Wait for the operations in the background."""
        for handle in self._watch.unfinished():
            handle.wait()

    def _close_at_exit(self) -> None:
        """Close a group whose program forgot to, or has left early."""
        if self._is_finalized() or self._engine.given_up or forks.is_fork():
            return
        self._engine.take_back(self._lane)
        try:
            self.close()
        except BaseException as error:
            self._end_job(error)

    def check_open(self) -> None:
        """Raise ClosedError unless the group is open, and MPI is running in this process."""
        forks.refuse_calls(self.rank)
        if self.closed:
            raise ClosedError(
                f"rank {self.rank}: this communicator is closed; call close() last, "
                f"or make a new one with mpiring.init()")
        if self._is_finalized():
            raise ClosedError(
                f"rank {self.rank}: MPI is finalised; close() communicators before MPI.Finalize()")


def _do_nothing(error: BaseException) -> None:
    """Leave an error of the background thread to the next call."""
