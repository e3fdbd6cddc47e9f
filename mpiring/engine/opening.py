"""Opens a group of ranks: its MPI communicator, its shared memories, its engine."""

import logging
import math
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config import AGREED, Config
from ..errors import ConfigError, MpiringError, StallError
from ..launch.ending import FirstReport, JobEnder, end_job_on_exceptions
from ..launch.host import usable_processors
from ..launch.start import load_mpi
from ..launch.topology import (
    Topology, compact, neighbors, node_order, ranks_of_nodes, topology)
from ..memory.digest import digest
from ..operations.algorithms import named
from ..record.counter import OperationCounter
from ..record.recorder import Recorder
from ..record.trace_file import TraceFile
from ..transport import waiting
from ..transport.base import Task
from ..transport.layout import NODE_MEMORY_BYTES
from ..transport.node_memory import NodeMemory
from ..transport.windows import mapped
from .background import may_compile
from .engine import Engine, advance_inline, ender, report_all, report_all_peers
from .stalls import print_at_once

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi import MpiTransport

_log = logging.getLogger("mpiring")


class Sharing(NamedTuple):
    """Ranks that share nodes and memories.

    Attributes:
        topology: Position of this rank among the nodes.
        order: All ranks, node after node.
        memory_groups: Groups of ranks that share a memory, in the same order.
        memory: Memory that this rank shares; None if it is alone in its group.
        counter: Counter of the group's operations and its last fast calls.
        neighbors: Result of `launch.topology.neighbors`.
        first_ranks: Numbers of all ranks in the first group.
        patience: Policy by which this rank waits for other ranks of its node.
        compiles: True if every rank may compile code.
    """

    topology: Topology
    order: Sequence[int]
    memory_groups: Sequence[Sequence[int]]
    memory: NodeMemory | None
    counter: OperationCounter
    neighbors: tuple[int, int] | None
    first_ranks: Sequence[int]
    patience: waiting.Patience
    compiles: bool


def open_group(
    mpi_comm: "MPI.Intracomm", config: Config, engine: Engine | None,
) -> tuple["MpiTransport", Sharing, Engine, JobEnder, str, TraceFile | None]:
    """Open a group over the ranks of an MPI communicator.

    Args:
        mpi_comm: MPI communicator to duplicate.
        config: Settings; compared between ranks.
        engine: Engine of the group from which this one is split; None to start one.

    Returns:
        A private duplicate of the communicator, the ranks that share nodes and memories, and the
        engine. Then the function that ends the job on all ranks because of an error, and the
        group's name in reports and traces ("" for the first group). Finally, the group's trace
        file; None if it has begun none.

    Raises:
        ConfigError: It is no intracommunicator, or the settings differ or cannot work here.
        StallError: A rank has not called in time.

    Collective: yes. Blocking: yes.
    """
    mpi = load_mpi()
    if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
        raise ConfigError(f"expected an mpi4py intracommunicator, got {mpi_comm!r}")
    named(config.algorithm)
    from ..transport.mpi import MpiTransport, abort
    recorder = engine.recorder if engine else Recorder(mpi_comm.rank)
    end_job = JobEnder(mpi_comm.rank, mpi_comm.size, abort, report_all,
                       report_all_peers, in_full=config.full_tracebacks)
    # These settings must be equal on all ranks.
    settings = {"trace": bool(config.trace), **{name: getattr(config, name) for name in AGREED}}
    ends_job = mpi_comm.size > 1 and config.abort_on_exception
    if ends_job:
        # Until the engine exists, this group reports errors.
        end_job_on_exceptions(lambda: ender() or end_job)
    agree = mpi_comm.size == 1 or await_all(mpi_comm, config, settings)
    transport = MpiTransport(mpi_comm)
    comm = transport.comm
    try:
        if not agree:
            _refuse_different_settings(comm, settings)
        sharing = _share(comm, config, recorder.rank, engine)
        threaded = comm.size > 1 and _is_threaded(mpi, comm.rank, config)
    except MpiringError:
        transport.free()
        raise
    _choose_reporter(end_job, comm.rank, sharing)
    name, trace = recorder.name(sharing.first_ranks), None
    sharing.counter.group, sharing.counter.ranks = name, sharing.first_ranks
    recorder.counters.add(sharing.counter)
    if config.trace and engine is None:
        recorder.trace = trace = TraceFile(comm, config.trace, sharing.topology.node_rank)
    engine = engine or Engine(config, threaded=threaded, recorder=recorder,
                              end_job=end_job if ends_job else None,
                              patience=sharing.patience)
    return transport, sharing, engine, end_job, name, trace


def await_all(comm: "MPI.Intracomm", config: Config, settings: dict[str, Any]) -> bool:
    """Wait until all ranks open a group, because MPI's own calls would wait forever for a rank.

    Args:
        comm: MPI communicator of the ranks.
        config: Settings, for the timeouts.
        settings: Settings to compare between ranks in the same message.

    Returns:
        Whether all ranks have the same settings.

    Raises:
        StallError: A rank has not called within `stall_timeout_s` or ten minutes, whichever is
            longer.
    """
    from ..transport.mpi import create_communicator, start_maximum
    number = digest([repr(settings).encode()]) >> 1
    # All ranks have the same number if its maximum is its minimum.
    numbers = np.array([number, -number])
    request = create_communicator(comm, lambda: start_maximum(comm, numbers))
    began_s = time.monotonic()
    limit_s = max(config.stall_timeout_s, waiting.OPENING_S) if config.stall_timeout_s else math.inf
    warning_s = config.stall_warning_s or math.inf
    while not create_communicator(comm, request.Test):
        waited_s = time.monotonic() - began_s
        text = (f"rank {comm.rank} of {comm.size} has waited {waited_s:.0f} s in mpiring.init(), "
                f"Communicator() or split(): not all ranks have called it; it waits for "
                f"{limit_s:g} s (the longer of stall_timeout_s and {waiting.OPENING_S:g} s)")
        if waited_s >= limit_s:
            raise StallError(text)
        if waited_s >= warning_s:
            warning_s = math.inf
            # Only two ranks print it: rank 0 alone is not enough, because it may be missing.
            if comm.rank <= 1:
                print_at_once(text)
        # Other ranks may wait for an operation of another group first.
        if not advance_inline():
            time.sleep(min(waited_s / 10, waiting.OPENING_PAUSE_S))
    return bool(numbers[0] == -numbers[1])


def _choose_reporter(end_job: JobEnder, rank: int, sharing: Sharing) -> None:
    """Let one rank of the job report an error that several ranks raise."""
    if sharing.memory is not None:
        end_job.first = _first_report(sharing.memory)
    memories = [next(number for number, group in enumerate(sharing.memory_groups) if each in group)
                for each in (0, rank)]
    end_job.turn = (memories[1] - memories[0]) % len(sharing.memory_groups)


def _first_report(memory: NodeMemory) -> FirstReport:
    # The hook lives as long as the process, but the memory may be freed earlier.
    memory_ref, rank = weakref.ref(memory), memory.rank

    def words() -> Sequence[memoryview] | None:
        memory = memory_ref()
        return None if memory is None else memory.words

    return FirstReport(words, rank)


def _refuse_different_settings(comm: "MPI.Intracomm", settings: dict[str, Any]) -> None:
    for rank, other_settings in enumerate(comm.allgather(settings)):
        if other_settings != settings:
            raise ConfigError(
                f"rank {comm.rank} has {settings} but rank {rank} has {other_settings}; give every "
                f"rank the same Config and the same MPIRING_* variables")


def _share(comm: "MPI.Intracomm", config: Config, first_rank: int,
           engine: Engine | None) -> Sharing:
    """Determine which ranks share a node, and map memory that they share.

    Args:
        comm: MPI communicator of the ranks.
        config: Settings.
        first_rank: Number of this rank in the first group.
        engine: Engine of the first group, which may have more ranks on this node; None for the
            first group.
    """
    from ..transport.mpi import MpiNode, allgather
    node, counter, segments = MpiNode(comm), OperationCounter(), None
    if node.size > 1 and config.shared_memory:
        # Forks make no calls and never write to this memory, so it need not be private in them.
        task = Task(mapped(node, NODE_MEMORY_BYTES, private_in_forks=False))
        task.step()
        segments = task.result
    memory_leader = comm.rank if segments is None else node.ranks[0]
    processors = frozenset(usable_processors())
    leaders, memory_leaders, first_ranks, processor_sets, compiles = allgather(comm, (
        node.ranks[0], memory_leader, first_rank, hash(processors), may_compile(config),
    )).T.tolist()
    node.free()
    # Ranks that are bound to other processors do not compete with this one.
    rivals = [*zip(leaders, processor_sets)].count((leaders[comm.rank], processor_sets[comm.rank]))
    patience = engine.patience if engine else waiting.patience(rivals, len(processors))
    memory = None if segments is None else NodeMemory(
        segments, node.rank, node.ranks, counter, patience)
    order = node_order(leaders)
    groups = ranks_of_nodes(memory_leaders, order)
    return Sharing(
        topology(comm.rank, leaders), order, groups, memory, counter,
        neighbors(comm.rank, groups), compact(first_ranks), patience, all(compiles))


def _is_threaded(mpi: Any, rank: int, config: Config) -> bool:
    """Return whether operations advance in a background thread."""
    multiple: bool = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
    if config.progress == "thread" and not multiple:
        raise ConfigError(
            f"rank {rank}: progress='thread' needs MPI_THREAD_MULTIPLE, which this MPI "
            f"library was not started with; use progress='inline' or 'auto'")
    if config.progress == "auto" and not multiple and rank == 0:
        _log.warning("MPI offers less than MPI_THREAD_MULTIPLE: operations advance only "
                     "inside mpiring's calls, so less communication is hidden")
    return config.progress != "inline" and multiple
