"""Runs the operations of a group of ranks: numbers them, and passes them to the engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..collectives.native import Turns
from ..collectives.operation import Tuning
from ..config import Config
from ..errors import ClosedError
from ..gpu.device import Device
from ..gpu.interface import Event, UserStream, settled
from ..jit import cache
from ..launch import exits, forks, silence
from ..launch.cache import folder_of
from ..launch.start import load_mpi
from ..memory.arrays import chunks_of
from ..memory.scratch import Scratch
from ..operations.agreement import Call, agreed
from ..operations.algorithms import Case, candidates, choose
from ..operations.model import Model
from ..operations.on_device import GpuOperations
from ..operations.collectives import Build, Collectives
from ..operations.resources import Resources
from ..record.flight import Flight
from ..record.statistics import Statistics
from ..record.trace_file import TraceFile
from ..transport import waiting
from ..transport.base import Node, Schedule, T, Task
from ..transport.layout import GATE_CLOSED, GATE_TRACED
from ..transport.windows import Windows
from .engine import Engine, has_communicated
from .fast_calls import FastCalls
from .handle import Handle
from .messages import Messages
from .opening import open_group
from .prepared import Prepared
from .queued import QueuedHandle, QueuedOperation
from .stalls import StallWatch
from .tuning import Tuner

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.survivors import Survivors

# A program that never waits in its first allreduces must call `tune` or `prepare` to be tuned.
_MAX_QUESTIONS = 10
# Maximum number of collectives that are kept, because a program may use any number of shapes.
_MAX_PREPARED = 512


class Group(forks.OfRank):
    """The operations of the ranks of a private duplicate of an MPI communicator.

    Args:
        engine: Engine of the group from which this one is split; None to start one.

    Attributes:
        queue: Queue of the operations, which the engine advances.
        windows: Arrays in node-shared memory.
        gpus: GPUs that operations have used.
        reducers: Reducers that have averaged gradients of these ranks, for `statistics`.
        closed: True after `close`, or after a rank has died.

    Raises:
        ConfigError, StallError, TransportError: As for Communicator.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm", config: Config,
                 engine: Engine | None = None) -> None:
        (self._transport, self.sharing, self.engine, self._end_job, self.name,
         self._trace) = open_group(mpi_comm, config, engine)
        self.config, self.recorder = config, self.engine.recorder
        cache.configure(folder_of(config.tuning_folder), enabled=config.machine_code,
                        warns=self.recorder.rank == 0)
        from ..transport.mpi import Mailbox, before_finalize
        self.rank, self.size = self._transport.rank, self._transport.size
        self.closed = False
        self.reducers: set[str] = set()
        self._is_finalized: Callable[[], bool] = load_mpi().Is_finalized
        self._counter = self.sharing.counter
        self._create_resources()
        self._is_tuned = (len(self.sharing.memory_groups) == 1 or not config.tuning
                          or config.algorithm != "auto")
        self._questions = _MAX_QUESTIONS
        self._mailbox = Mailbox(self._transport)
        self._watch = StallWatch(self.rank, self.size, self._mailbox, config, self.engine.report,
                                 self._counter)
        self.queue = self.engine.join(self._watch)
        if self.recorder.trace is not None:
            self._counter.close(GATE_TRACED)
        is_fast = config.rounds != "off" and len(self.sharing.memory_groups) == 1
        self.fast_calls = FastCalls(self, self.sharing.memory if is_fast else None)
        # The latest collectives, by what distinguishes them.
        self.prepared: dict[Any, Prepared] = {}
        self._messages: Messages | None = None
        self._disconnect = before_finalize(self._leave_engine)
        silence.watch()
        exits.register(self._close_at_exit)

    def _create_resources(self) -> None:
        """Create empty pools, which releases the memory of earlier operations."""
        self.windows = windows = Windows()
        self.gpus = GpuOperations(windows, self.run, self.config)
        self.engine.guard(self._counter, self.gpus)
        self._resources = Resources(
            self._transport, Turns(), Scratch(keep=self.config.operations_in_flight), windows,
            self.sharing.order, self.sharing.memory_groups, self.config.algorithm,
            tuning=Tuning(compiles=self.sharing.compiles))

    def tune(self, *, fresh: bool = False) -> Model:
        """Measure the cost of each algorithm; from then on "auto" uses the fastest.

        If `fresh`, measure even if an earlier job has. Collective and blocking.
        """
        tuner = Tuner(
            self._run_tuning, rank=self.rank, cluster=self.cluster,
            candidates=candidates(self.size, len(self._resources.nodes)),
            folder=self.config.tuning_folder)
        model = tuner.find(fresh=fresh)
        self._resources = replace(self._resources, model=model)
        self._is_tuned = True
        return model

    @property
    def cluster(self) -> str:
        """Description of the cluster's properties that determine the speed of operations."""
        shape = [len(ranks) for ranks in self._resources.nodes]
        library = " ".join(load_mpi().Get_library_version().split()[:4])
        return (f"{library}, ranks per node {shape}, "
                f"{'thread' if self.engine.threaded else 'inline'} progress")

    def algorithm_for(self, nbytes: int, dtype: np.dtype[Any], requested: str, gpu: str) -> str:
        """Return the algorithm for a mean of vectors, given the one `requested`; see Case."""
        resources = self._resources
        requested = resources.algorithm if requested == "auto" else requested
        return choose(Case(nbytes, dtype, "mean", self.size, len(resources.nodes),
                           resources.tuning, gpu), requested, resources.model).name

    @property
    def operations_in_flight(self) -> int:
        """Number of background operations that advance at a time."""
        return int(self.queue.max_in_flight)

    @operations_in_flight.setter
    def operations_in_flight(self, count: int) -> None:
        """Change the number, also while operations are in flight."""
        self.queue.max_in_flight = count

    def tune_once(self) -> None:
        """Tune, unless these ranks are tuned or need not be; collective, blocks the first time."""
        if not self._is_tuned:
            self.tune()

    def tune_before(self, call: Call, *, waits: bool) -> None:
        """Tune before an allreduce for which all ranks wait, if it is one of the first.

        A rank must not wait in `iallreduce`, so ranks first ask each other whether all may wait.
        Collective; blocking if `waits`.
        """
        if self._is_tuned or not self._questions:
            return
        self._questions -= 1
        may_tune = np.array([waits])
        question = replace(call, detail=f"{call.detail} (do all ranks wait?)", nbytes=1)

        def build(collectives: Collectives) -> Schedule[None]:
            return collectives.allreduce(may_tune, op="min", algorithm="ring")

        if not waits:
            self.submit(question, build)
            return
        self.run(question, build)
        if may_tune[0]:
            self.tune()

    def _run_tuning(self, step: str, build: Build[T]) -> T:
        call = Call("tune", f"(before the first allreduce between nodes): {step}", prepares=True)
        return self.run(call, build)

    def submit(self, call: Call, build: Build[T]) -> Handle[T]:
        """Begin an operation in the background; collective.

        The call is compared across ranks and shown in reports. The function `build` returns the
        schedule, given the collectives of its channel.
        """
        # Operations of several threads must queue in the order of their numbers.
        with self._counter:
            flight, schedule = self._prepare(call, build)
            try:
                self._counter.sequence += 1
                handle = Handle(self.queue, flight, Task(schedule))
                if self.size > 1:
                    self._watch.enter(handle)
                elif handle.step() and handle.task.done:
                    handle.complete = True
                    return handle
                # Even a single rank may have to wait for its GPU.
                return self.engine.submit(handle)
            except BaseException as error:
                self.engine.fail(error)
                raise

    def run(self, call: Call, build: Build[T], *, patient: float | bool = False,
            costs: list[Flight] | None = None) -> T:
        """Run an operation ahead of those in the background, and return its result; see `submit`.

        Args:
            costs: List to which the record of the operation is appended.
            patient: Seconds for which this rank waits, even beyond `stall_timeout_s`, while the
                background threads of other ranks answer. True means a day.

        Collective: yes. Blocking: yes.
        """
        task: Task[T] | None = None
        try:
            with self._counter:
                flight, schedule = self._prepare(call, build)
                task = Task(schedule)
                self._counter.sequence += 1
            if costs is not None:
                costs.append(flight)
            if self.size > 1 and not self._run_at_once(task, flight):
                handle = Handle(self.queue, flight, task, patient=patient)
                self._watch.enter(handle)
                self.engine.run(handle)
        except BaseException as error:
            if task is not None:
                self.engine.fail(error, task)
            raise
        while not task.done:
            task.step()
        return settled(task.result)  # type: ignore[no-any-return]

    @property
    def turns(self) -> Turns:
        """The order of operations that must begin in the order of their calls."""
        return self._resources.turns

    def queued_operation(self, device: Device, build: Build[Any],
                         ready: Callable[[], Sequence[Event]],
                         stream: UserStream | None) -> QueuedOperation | None:
        """Return an operation on which ranks have agreed, if it can be queued on a GPU."""
        context = self.gpus.context_of(device)
        # A single rank combines nothing, which would tell of NaN and Inf.
        return None if context.queue is None or self.size == 1 else QueuedOperation(
            self, context, build, ready, stream or device.gpu)

    def record_queued(self, handle: QueuedHandle[Any]) -> None:
        """Record and watch an operation that is queued on a GPU."""
        self._record(handle.flight)
        self.recorder.ended(handle.flight, time.monotonic())
        self.queue.operations += 1
        if self.size > 1:
            self._watch.enter(handle)

    def adopt(self, handle: Handle[Any]) -> None:
        """Advance and watch an operation that was begun without the engine."""
        try:
            self._record(handle.flight)
            self._watch.enter(handle)
            self.engine.adopt(handle)
        except BaseException as error:
            self.engine.fail(error)
            raise

    def keep(self, key: Any, prepared: Prepared) -> None:
        """Keep a collective for later calls; forget all others if there are too many."""
        if len(self.prepared) >= _MAX_PREPARED:
            self.prepared.clear()
        self.prepared[key] = prepared

    def _record(self, flight: Flight) -> None:
        self.recorder.add(flight)
        self._watch.last = flight

    def collectives(self, node: Node | None = None, sequence: int = 0) -> Collectives:
        """Return the collectives of an operation; see Collectives."""
        return Collectives(self._resources, node, sequence)

    def _run_at_once(self, task: Task[Any], flight: Flight) -> bool:
        """Start an operation, and spin briefly; return whether it is complete."""
        engine, queue, recorder = self.engine, self.queue, self.recorder
        if engine.failure is not None:
            engine.raise_failure()
        flight.started_s = began_s = time.monotonic()
        spins = engine.patience.spins
        with engine.lock:
            for attempt in range(spins + engine.patience.yields):
                if not task.step() and attempt >= spins:
                    waiting.give_way()
                if task.done:
                    break
            now_s = time.monotonic()
            seconds = now_s - began_s
            queue.at_once_s += seconds
            flight.exposed_s = seconds
            if task.done:
                flight.ended_s = now_s
                queue.operations += 1
                if not queue.in_flight:
                    queue.communication_s += seconds
            if recorder.trace is not None:
                recorder.trace.waited(flight, began_s, now_s)
                if task.done:
                    recorder.trace.operation(flight)
        return task.done

    def _prepare(self, call: Call, build: Build[T]) -> tuple[Flight, Schedule[T]]:
        """Make the schedule of the next operation, and record the call.

        This does not use up the operation's number, because mistakes in the call raise here. Once
        the number is used, not even an exception in a signal handler may drop the operation on one
        rank. The caller holds the counter's lock until it has used the number.
        """
        self.check_open()
        if self.fast_calls.started:
            self.fast_calls.hand_over()
        sequence, sharing = self._counter.sequence, self.sharing
        node = None if sharing.memory is None else sharing.memory.node(
            sequence, call.header, call.digest)
        collectives = self.collectives(node, sequence)
        try:
            schedule = build(collectives)
            flight = Flight(call, sequence, self.name, collectives.algorithm,
                            sent=collectives.sent)
            if self.size == 1:
                return flight, schedule
            self._record(flight)
            return flight, agreed(
                lambda: collectives.net, node, sharing.neighbors, call, schedule,
                collectives.ready)
        except BaseException:
            # The operation is canceled: later operations must not wait for its turn.
            self._resources.turns.forget(sequence)
            raise

    def poke(self) -> None:
        """Make some progress, unless a background thread does."""
        if forks.in_fork:
            forks.refuse_calls(self.rank)
        if not self.engine.threaded:
            self.engine.advance()

    @property
    def statistics(self) -> Statistics:
        """Costs of this group's operations so far."""
        fast_s = self._counter.fast_s
        # A single rank has costs only if it waits for its GPU.
        operations = self.queue.operations + self._counter.fast_calls if self.size > 1 else 0
        return Statistics(operations, self._transport.bytes_sent,
                          self.queue.communication_s + fast_s, self.queue.exposed_s + fast_s,
                          reducers=tuple(sorted(self.reducers)))

    def split(self, color: int | None, key: int) -> "Group | None":
        """Wait for all operations; return a group of the ranks that pass the same color.

        Return None if the color is None. Collective and blocking.
        """
        from ..transport.mpi import create_communicator
        self.check_open()
        mpi = load_mpi()
        # Native collectives and MPI's split must be called in the same order on all ranks.
        self._wait_for_all()
        # MPI's call cannot stall once every rank has arrived.
        self.run(Call("split", prepares=True), lambda collectives: collectives.barrier())
        comm = self._transport.comm
        part = create_communicator(
            comm, lambda: comm.Split(mpi.UNDEFINED if color is None else color, key))
        return None if color is None else self._make_child(cast("MPI.Intracomm", part), self.config)

    def _make_child(self, part: "MPI.Intracomm", config: Config) -> "Group":
        """Return a group over `part` that uses this group's engine; free `part`."""
        try:
            return Group(part, config, self.engine)
        finally:
            part.Free()

    def subgroup(self, ranks: Sequence[int], tag: int, config: Config) -> "Group":
        """Return a group of some ranks that uses this group's engine.

        The ranks are in their new order, and include this rank. The tag differs between groups with
        common ranks that are made concurrently.

        Collective: yes, among those ranks. Blocking: yes.
        """
        from ..transport.mpi import create_communicator
        self.check_open()
        comm = self._transport.comm
        all_ranks = comm.Get_group()
        members = all_ranks.Incl(ranks)
        part = create_communicator(
            comm, lambda: comm.Create_group(members, tag % self._transport.tag_limit))
        for mpi_group in (members, all_ranks):
            mpi_group.Free()
        return self._make_child(part, config)

    def messages(self) -> Messages:
        """Return the Messages between these ranks; collective and blocking the first time."""
        if self._messages is None:
            # MPI's call cannot stall once every rank has arrived.
            self.run(Call("messages", prepares=True), lambda collectives: collectives.barrier())
            from ..transport.mpi import Mailbox, MpiTransport
            transport = MpiTransport(self._transport.comm)
            self._messages = Messages(transport, Mailbox(transport), self.engine, self.config)
        return self._messages

    def duplicate(self) -> "Group":
        """Return another group of the same ranks, whose operations have a separate order.

        It duplicates the communicator of `messages()`, on which no other calls are collective.
        Other ranks may still be in an operation of this group. Collective and blocking.
        """
        return Group(self.messages().comm, self.config, self.engine)

    def set_stall_timeout(self, seconds: float) -> None:
        """Change `stall_timeout_s` for this group."""
        self.config = self._watch.config = replace(self.config, stall_timeout_s=seconds)
        if self._messages is not None:
            self._messages.watch.config = self.config

    @property
    def threaded(self) -> bool:
        """Whether operations advance in the background."""
        return self.engine.threaded

    def start_trace(self, folder: str) -> None:
        """Start a trace of this rank, including groups that were split from this one.

        For the folder, see the setting `trace`. Collective and blocking.
        """
        self.stop_trace()
        # Clocks are compared by plain MPI messages, which would wait forever for a missing rank.
        self.run(Call("start trace", prepares=True), lambda collectives: collectives.barrier())
        self._trace = self.recorder.trace = TraceFile(
            self._transport.comm, folder, self.sharing.topology.node_rank)
        for counter in tuple(self.recorder.counters):
            counter.close(GATE_TRACED)

    def stop_trace(self) -> str:
        """End the trace that this group began; return the name of its file, "" for none.

        Collective: yes. Blocking: yes.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return ""
        self.run(Call("stop trace", prepares=True), lambda collectives: collectives.barrier())
        self.recorder.trace = None
        for counter in tuple(self.recorder.counters):
            counter.open(GATE_TRACED)
        trace.close(together=True)
        return trace.path

    def _leave_engine(self) -> None:
        self._counter.close(GATE_CLOSED)
        if forks.in_fork:
            # A fork may have copied a lock that is held by a thread that exists only in the parent.
            return
        if self._messages is not None:
            self._messages.leave()
        self.engine.leave(self.queue)
        if self._trace is not None:
            self._trace.close(together=False)

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        In a fork of this process it does nothing. Collective and blocking.
        """
        if self.closed or forks.in_fork:
            return
        self.check_open()
        if self.size > 1:
            self._wait_for_all()
            # Other ranks may compute for hours before they also close.
            self._close_together()
            if self.gpus.close():
                # No rank may free memory that another rank has open.
                self.run(Call("close GPU memory", prepares=True),
                         lambda collectives: collectives.barrier())
        self.closed = True
        if self._trace is not None:
            self._trace.close(together=True)
        self._unregister()
        if self._messages is not None:
            self._messages.free()
        self._mailbox.close()
        self._transport.free()
        self._create_resources()

    def _close_together(self) -> None:
        """Wait until all ranks close, and note whether any of them has communicated."""
        communicated = np.zeros(self.size, np.bool_)
        communicated[self.rank] = has_communicated()
        self.run(Call("close", prepares=True), lambda collectives: collectives.allgather_chunks(
            chunks_of(communicated, self.size)), patient=True)
        silence.note(self.rank, self.size, communicated=bool(communicated.any()))

    def survivors(self) -> "Survivors":
        """Return the object by which these ranks can continue after one of them has died."""
        from ..transport.survivors import Survivors
        return Survivors(self._transport.comm)

    def abandon(self, error: BaseException) -> None:
        """Close without waiting for operations or other ranks, because a rank has died.

        Groups split from this one also become unusable: their calls raise `error`.
        """
        if not self.closed and not forks.in_fork:
            self.closed = True
            self.gpus.release(lambda: not self._watch.unfinished())
            self.survivors().leave(self.engine.give_up(error))
            self._unregister()

    def drop(self) -> None:
        """Release the thread and the memory of an unclosed group that was garbage-collected.

        Resources that other ranks need for closing the group are kept until the program ends.
        """
        self._counter.close(GATE_CLOSED)
        if self._cannot_close:
            return
        if any(handle.is_queued for handle in self._watch.unfinished()):
            # GPUs still use these resources.
            self._used = self.gpus, self._resources
        self._create_resources()
        for queue in (self.queue, *([self._messages.queue] if self._messages else ())):
            queue.dropped = True
        self._transport.drop()

    def _unregister(self) -> None:
        exits.unregister(self._close_at_exit)
        self._disconnect()

    def _wait_for_all(self) -> None:
        """Wait for the operations in the background."""
        self.fast_calls.hand_over()
        for handle in self._watch.unfinished():
            handle.wait()
            while not (handle.is_over or handle.test()):
                self.engine.advance()

    def _close_at_exit(self) -> None:
        """Close a group that the program has not closed."""
        if self._cannot_close:
            return
        self.engine.take_back(self.queue, *([self._messages.queue] if self._messages else ()))
        # If closing fails, the record of a dropped group is saved.
        self._counter.open(GATE_CLOSED)
        try:
            self.close()
        except BaseException as error:
            # One rank reports, also if other ranks get the error from the program.
            (self.engine.end_job or self._end_job)(error)

    @property
    def _cannot_close(self) -> bool:
        return self.closed or self.engine.given_up or forks.in_fork or self._is_finalized()

    def check_open(self) -> None:
        """Raise ClosedError unless the group is open, and MPI is running in this process."""
        if forks.in_fork:
            forks.refuse_calls(self.rank)
        if self.closed:
            raise ClosedError(
                f"rank {self.rank}: this communicator is closed; call close() last, "
                f"or make a new one with mpiring.init()")
        if self._is_finalized():
            raise ClosedError(
                f"rank {self.rank}: MPI is finalized; close() communicators before MPI.Finalize()")
