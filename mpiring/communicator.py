"""Is the face of the library: ranks, collectives on arrays and objects, handles."""

import atexit
import logging
import pickle
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .collectives import chain, ring
from .collectives.agreement import Call, agreed
from .collectives.native import Turns
from .collectives.select import Collectives, choose
from .config import Config
from .engine import Engine, Handle
from .errors import ClosedError, ConfigError, MissingDependencyError
from .launch import JobEnder, end_job_on_exceptions, refuse_singleton
from .memory.arrays import chunks_of, dtype_name, flat, order_of
from .memory.scratch import Scratch
from .statistics import Statistics
from .topology import topology
from .transport.base import Schedule, T
from .watch import StallWatch

if TYPE_CHECKING:
    from mpi4py import MPI

A = TypeVar("A", bound=NDArray[Any])

_log = logging.getLogger("mpiring")


def init(*, config: Config | None = None) -> "Communicator":
    """Start MPI if nobody has, and return a Communicator over all its ranks.

    Args:
        config: Settings; by default the MPIRING_* variables and the defaults.

    Raises:
        LaunchError: The launcher was asked for several ranks, but this process is alone.
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalised already.

    Collective: yes. Blocking: yes.
    """
    config = config or Config()
    world = _load_mpi().COMM_WORLD
    if not config.allow_singleton:
        refuse_singleton(world.Get_size())
    return Communicator(world, config=config)


def _load_mpi() -> Any:
    """Return the module mpi4py.MPI, with MPI started."""
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


class Communicator:
    """The ranks of one MPI communicator, and the collectives among them.

    Every rank must call the same collectives in the same order, from one thread
    at a time. Different calls raise BufferMismatchError; a call that some rank
    never makes raises StallError.

    Args:
        mpi_comm: An mpi4py intracommunicator; duplicated, so that mpiring's
            messages never meet yours.
        config: Settings; by default the MPIRING_* variables and the defaults.

    Attributes:
        rank, size: This rank, and how many there are.
        local_rank, local_size: The same within this node.
        node_rank, num_nodes: This node, and how many there are.
        config: The settings.

    Raises:
        ConfigError: Not an intracommunicator, or the ranks' settings differ.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm", *, config: Config | None = None) -> None:
        self._open(mpi_comm, config or Config(), None)

    def _open(self, mpi_comm: "MPI.Intracomm", config: Config, engine: Engine | None) -> None:
        mpi = _load_mpi()
        if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
            raise ConfigError(f"expected an mpi4py intracommunicator, got {mpi_comm!r}")
        from .transport.mpi import Mailbox, MpiTransport, abort, before_finalize, node_leaders
        self.config = config
        self._transport = MpiTransport(mpi_comm)
        self.rank, self.size = self._transport.rank, self._transport.size
        place = topology(self.rank, node_leaders(self._transport.comm))
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.node_rank, self.num_nodes = place.node_rank, place.num_nodes
        self._is_finalized: Callable[[], bool] = mpi.Is_finalized
        self._closed = False
        self._sequence = 0
        self._turns = Turns()
        self._scratch = Scratch(keep=config.operations_in_flight + 1)
        self._end_job = JobEnder(self.rank, self.size, abort)
        self._refuse_different_settings()
        if engine is None:
            threaded = self.size > 1 and self._take_thread(mpi)
            engine = Engine(config, threaded=threaded, end_job=self._end_job)
            before_finalize(engine.stop)
            if self.size > 1 and config.abort_on_exception:
                end_job_on_exceptions(self._end_job)
        self._engine = engine
        self._watch = StallWatch(self.rank, self.size, Mailbox(self._transport), config)
        self._engine.watch(self._watch)
        atexit.register(self._close_at_exit)

    def _refuse_different_settings(self) -> None:
        mine = {"algorithm": self.config.algorithm,
                "operations_in_flight": self.config.operations_in_flight}
        for rank, theirs in enumerate(self._transport.comm.allgather(mine)):
            if theirs != mine:
                raise ConfigError(
                    f"rank {self.rank} has {mine} but rank {rank} has {theirs}; give every rank "
                    f"the same Config and the same MPIRING_* variables")

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

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}{', closed' * self._closed}>"

    # Arrays

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an uninitialised array in the memory that suits collectives best.

        Collective: yes. Blocking: yes.
        """
        self._check_open()
        dtype_name(dtype)
        return np.empty(shape, dtype)

    def allreduce(self, x: A, *, op: str = "sum", algorithm: str = "auto") -> A:
        """Combine `x` over all ranks, in place, and return it.

        Args:
            x: Any shape, contiguous, writeable; bool, integer, floating (bfloat16 of
                ml_dtypes included) or complex. Bits are equal on all ranks afterwards.
            op: "sum", "mean" (floating, complex), "max", "min" (not complex; NaN
                propagates; on bool: or, and) or "prod".
            algorithm: "auto", "ring" (ours), or "native" (MPI's own).

        Raises:
            ConfigError: The array, op or algorithm cannot work.
            BufferMismatchError: The ranks called different things.
            StallError: Some ranks did not arrive in time.

        Collective: yes. Blocking: yes.
        """
        return self._run(*self._allreduce(x, op, algorithm))

    def iallreduce(self, x: A, *, op: str = "sum", algorithm: str = "auto") -> Handle[A]:
        """Begin to combine `x` over all ranks, and return a handle at once.

        The operation advances in the background. `x` must be left alone until
        `wait()` returns it. Many may be under way; they can be waited for in any order.

        Args: see `allreduce`.

        Collective: yes. Blocking: no.
        """
        return self.submit(*self._allreduce(x, op, algorithm))

    def _allreduce(
        self, x: A, op: str, algorithm: str,
    ) -> tuple[Call, Callable[[Collectives], Schedule[A]]]:
        vector = flat(x)
        choose(vector, op, algorithm)
        call = Call("allreduce", f"{op} of {_described(x)}, algorithm {algorithm}")
        return call, lambda collectives: _returning(
            x, collectives.allreduce(vector, op=op, algorithm=algorithm))

    def reduce_scatter(self, x: NDArray[Any], *, op: str = "sum") -> NDArray[Any]:
        """Combine `x` over all ranks, but leave each rank only its own chunk of the result.

        Args:
            x: As in `allreduce`. Overwritten; only this rank's chunk is meaningful afterwards.
            op: As in `allreduce`.

        Returns:
            Chunk `rank` of the flattened `x`, a view: elements
            `rank * n // size` to `(rank + 1) * n // size`.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        vector = flat(x)
        return self._run(
            Call("reduce_scatter", f"{op} of {_described(x)}"),
            lambda collectives: collectives.reduce_scatter(vector, op=op))

    def allgather(self, x: A) -> A:
        """Copy every rank's chunk of `x` to all ranks, in place, and return `x`.

        The counterpart of `reduce_scatter`: rank r contributes elements
        `r * n // size` to `(r + 1) * n // size` of the flattened `x`.

        Args:
            x: Any shape and dtype as in `allreduce`.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        vector = flat(x)
        return self._run(
            Call("allgather", _described(x)),
            lambda collectives: _returning(
                x, ring.allgather(collectives.net, chunks_of(vector, self.size))))

    def broadcast(self, x: A, *, root: int = 0) -> A:
        """Copy `x` of rank `root` to all ranks, in place, and return it.

        Args:
            x: Any shape and dtype as in `allreduce`; may be read-only on `root`.
            root: The rank whose data is copied.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        self._check_root(root)
        vector = flat(x, writeable=self.rank != root)
        return self._run(
            Call("broadcast", f"of {_described(x)} from root {root}"),
            lambda collectives: _returning(x, chain.broadcast(collectives.net, vector, root)))

    def barrier(self) -> None:
        """Return after every rank has called.

        Collective: yes. Blocking: yes.
        """
        self._run(Call("barrier"), lambda collectives: chain.barrier(collectives.net))

    # Objects

    def broadcast_object(self, obj: T, *, root: int = 0) -> T:
        """Return the object that rank `root` passed, on every rank.

        Args:
            obj: Anything that pickles; ignored on ranks other than `root`.
            root: The rank whose object is copied.

        Collective: yes. Blocking: yes.
        """
        self._check_root(root)
        mine = _pickled(obj) if self.rank == root else np.empty(0, np.uint8)
        payload = self._run(
            Call("broadcast_object", f"from root {root}"),
            lambda collectives: chain.broadcast_bytes(collectives.net, mine, root))
        return obj if self.rank == root else pickle.loads(payload.data)

    def allgather_object(self, obj: T) -> list[T]:
        """Return the objects that all ranks passed, in rank order.

        Args:
            obj: Anything that pickles; types and sizes may differ.

        Collective: yes. Blocking: yes.
        """
        mine = _pickled(obj)
        payloads = self._run(
            Call("allgather_object"),
            lambda collectives: ring.allgather_bytes(collectives.net, mine))
        return [pickle.loads(payload.data) for payload in payloads]

    # Operations

    def submit(self, call: Call, build: Callable[[Collectives], Schedule[T]]) -> Handle[T]:
        """Begin an operation of your own, made of mpiring's schedules.

        Args:
            call: What it is; compared across ranks and shown in reports.
            build: Returns its schedule, given the collectives bound to its channel.

        Collective: yes. Blocking: no.
        """
        handle = self._made(call, build)
        return handle if handle.done else self._engine.submit(handle)

    def _run(self, call: Call, build: Callable[[Collectives], Schedule[T]]) -> T:
        handle = self._made(call, build)
        return handle.wait() if handle.done else self._engine.run(handle)

    def _made(self, call: Call, build: Callable[[Collectives], Schedule[T]],
              patient: bool = False) -> Handle[T]:
        """Give an operation its number and its handle; alone, run it to its end."""
        self._check_open()
        sequence = self._sequence
        net = self._transport.channel(sequence)
        schedule = build(Collectives(
            net, self._scratch, self._transport, self._turns, sequence, self.config.algorithm))
        self._sequence += 1
        if self.size > 1:
            schedule = agreed(net, call, sequence, schedule)
        handle = Handle(self._engine, call, sequence, schedule)
        if self.size > 1:
            self._watch.enter(handle, patient=patient)
        else:
            handle.start()
        return handle

    @property
    def statistics(self) -> Statistics:
        """What communication has cost so far; subtract two to see a stretch of time.

        The seconds are shared with the communicators that were split from this one.
        """
        engine = self._engine
        return Statistics(engine.operations, self._transport.bytes_sent,
                          engine.communication_s, engine.exposed_s)

    def poke(self) -> None:
        """Make some progress, where no background thread makes it.

        Collective: no. Blocking: no.
        """
        self._engine.poke()

    # Life

    def split(self, color: int | None, *, key: int = 0) -> "Communicator | None":
        """Return a communicator of the ranks that pass the same color.

        Args:
            color: Any number from 0, or None to join no communicator.
            key: Orders the ranks; ties keep their present order.

        Returns:
            The new communicator, or None where `color` is None.

        Collective: yes. Blocking: yes.
        """
        mpi = _load_mpi()
        # After the barrier every rank is known to be here, so MPI's call cannot stall.
        self._run(Call("split"), lambda collectives: chain.barrier(collectives.net))
        part = self._transport.comm.Split(mpi.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        child = Communicator.__new__(Communicator)
        child._open(cast("MPI.Intracomm", part), self.config, self._engine)
        part.Free()
        return child

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        Collective: yes. Blocking: yes.
        """
        if self._closed:
            return
        self._check_open()
        if self.size > 1:
            for handle in tuple(self._watch.unfinished()):
                handle.wait()
            # Other ranks may compute for hours before they close, too.
            self._engine.run(self._made(
                Call("close"), lambda collectives: chain.barrier(collectives.net), patient=True))
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._engine.unwatch(self._watch)
        self._transport.free()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks do not close: let it end the job.
        if error is None:
            self.close()

    def _close_at_exit(self) -> None:
        """Close a communicator whose program forgot to, or has left early."""
        if self._is_finalized():
            return
        try:
            self.close()
        except BaseException as error:
            self._end_job(error)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"rank {self.rank}: this communicator is closed; call close() last, "
                f"or make a new one with mpiring.init()")
        if self._is_finalized():
            raise ClosedError(
                f"rank {self.rank}: MPI is finalised; close() communicators before MPI.Finalize()")

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(
                f"rank {self.rank}: root={root} is no rank; expected 0 to {self.size - 1}")


def _described(x: NDArray[Any]) -> str:
    order = "" if order_of(x) == "C" else " in Fortran order"
    return f"{dtype_name(x.dtype)} {x.shape}{order}"


def _returning(value: T, schedule: Schedule[Any]) -> Schedule[T]:
    yield from schedule
    return value


def _pickled(obj: object) -> NDArray[Any]:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
