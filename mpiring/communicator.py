"""The public face: a Communicator's ranks, collectives on arrays and objects, and messages."""

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar, cast, overload

import numpy as np
from numpy.typing import DTypeLike

from .arguments import MOST_OF_MPI, whole_number
from .config import Config
from .engine import objects
from .engine.compiling import COMPILED_EARLY, compile_fast_calls
from .engine.fast_calls import BARRIER, NOTHING
from .engine.group import Build, Group
from .engine.handle import Handle
from .engine.messages import Messages
from .engine.persistent import Persistent
from .engine.tuning import Tunable
from .errors import ConfigError
from .gpu.arrays import device_named, vector_of
from .gpu.device import Device, Event
from .launch.start import mpi_world
from .memory.arrays import dtype_name, flat, slice_of
from .memory.reduction import reduction
from .memory.tensors import is_tensor
from .names import (
    COMMUNICATOR, INIT, OPS_BY_OTHER_NAMES, AlgorithmName, OpName, explaining)
from .operations.agreement import Call, allreduce_call, described, op_named, part_of
from .operations.consistency import same_on_all
from .operations.model import Model
from .record.statistics import Statistics
from .transport.base import Schedule, T

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport.survivors import Survivors

# An array of NumPy, PyTorch or CuPy.
A = TypeVar("A")


class Prepared(NamedTuple):
    """A collective on an array.

    Attributes:
        call: What it is.
        build: Returns its schedule.
        vector: The array as a vector.
    """

    call: Call
    build: Build[Any]
    vector: Any


# The communicator that is used if none is given. Kept, since a garbage collector would drop it at
# other times on every rank.
_world: "Communicator | None" = None


@explaining(INIT)
def init(*, config: Config | None = None) -> "Communicator":
    """Start MPI if necessary, and return a new Communicator of all ranks.

    The first communicator that this returns is the default for every argument `comm` in mpiring,
    until it is closed. A program that needs no communicator itself does not have to call `init`:
    the first object that is created without `comm` does.

    Args:
        config: Settings; by default the values of the MPIRING_* variables.

    Raises:
        LaunchError: The launcher started several ranks, but this process is alone in its MPI
            world; or this process is a fork of a rank.
        MissingDependencyError: No MPI library is installed.
        ClosedError: MPI is finalized already.

    Collective: yes. Blocking: yes.
    """
    config = _settings(config)
    comm = Communicator(mpi_world(allow_singleton=config.allow_singleton), config=config)
    if _world is None or _world.closed:
        make_default(comm)
    return comm


def make_default(comm: "Communicator") -> None:
    """Use this communicator from now on wherever none is given."""
    global _world
    _world = comm


def or_world(comm: "Communicator | None") -> "Communicator":
    """Return the communicator that an argument stands for.

    Args:
        comm: The argument. If it is None, the result is the communicator that `init` returned
            first; if there is none, or it is closed, this calls `init`.

    Raises:
        ConfigError: The argument is something else; the message says how to make a communicator.

    Collective: yes. Blocking: yes.
    """
    if comm is None:
        return init() if _world is None or _world.closed else _world
    refuse_other_than_communicators(comm)
    return comm


class Communicator:
    """The ranks of one MPI communicator, and the collectives among them.

    Every rank must call the same collectives in the same order. Different calls raise
    BufferMismatchError; a call that a rank never makes raises StallError. Collectives may be called
    by several threads, if these agree on the order: ranks cannot tell identical calls of two
    threads apart. Threads that do not wait for each other need a communicator each: `split(0)`.

    Args:
        mpi_comm: An mpi4py intracommunicator; duplicated, so that mpiring's messages never meet
            yours.
        config: Settings; by default the MPIRING_* variables and the defaults.

    Attributes:
        rank, size: This rank, and the number of ranks.
        local_rank, local_size: The same within this node.
        node_rank, num_nodes: This node, and the number of nodes.
        memory_groups: The ranks that share a memory, for each memory: those of a node, or a
            single rank where there is no shared memory (see the setting `shared_memory`).
        config: The settings.
        threaded: Whether operations advance in the background.
        recorder: The last operations of this rank; `recorder.end_step()` marks the end of a
            training step in the trace, as `DataParallel` does.

    Raises:
        ConfigError: Not an intracommunicator, or the ranks' settings differ.

    Collective: yes. Blocking: yes.
    """

    @explaining(INIT)
    def __init__(self, mpi_comm: "MPI.Intracomm", *, config: Config | None = None) -> None:
        self._join(Group(mpi_comm, _settings(config)))

    def _join(self, group: Group) -> None:
        self._group, self._fast_calls = group, group.fast_calls
        self.config, self.recorder = group.config, group.recorder
        self.threaded = group.threaded
        self.rank, self.size = group.rank, group.size
        nodes = group.sharing.topology
        self.local_rank, self.local_size = nodes.local_rank, nodes.local_size
        self.node_rank, self.num_nodes = nodes.node_rank, nodes.num_nodes
        weakref.finalize(self, group.drop).atexit = False

    if not TYPE_CHECKING:
        # For type checkers there would be no unknown name.
        def __getattr__(self, name: str) -> Any:
            if name in COMMUNICATOR:
                raise AttributeError(f"a Communicator has no {name}; use {COMMUNICATOR[name]}")
            raise AttributeError(f"a Communicator has no {name}", name=name, obj=self)

    @property
    def memory_groups(self) -> list[list[int]]:
        """The ranks that share a memory, for each memory: see above."""
        return [list(ranks) for ranks in self._group.sharing.memory_groups]

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}{', closed' * self.closed}>"

    # Arrays

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, *,
              device: str | Device = "cpu") -> Any:
        """Return a new array in memory that suits collectives best; its content is undefined.

        Where possible it is shared with the other ranks of this node: collectives on it, or on
        contiguous parts of it, copy nothing.

        Args:
            shape: The same on all ranks.
            dtype: As in `allreduce`.
            device: "cpu" for a NumPy array; "cuda:1" for a CuPy array on GPU 1 of those that the
                process sees; "cuda" to deal these out to the ranks of the node in turn.

        Raises:
            ConfigError: There is no such shape, dtype or device.
            MissingDependencyError: CuPy is not installed.

        Collective: yes. Blocking: yes.
        """
        try:
            like = np.broadcast_to(np.empty((), dtype), shape)
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"rank {self.rank}: empty({shape!r:.200}, {dtype!r}): {exc}; expected a whole "
                f"number from 0, or a tuple of them, and a dtype of NumPy's") from exc
        name = f"{dtype_name(like.dtype)} {like.shape}"
        if str(device) != "cpu":
            gpu = device_named(device, self.local_rank)
            call = Call("empty", f"{name} on a GPU", nbytes=like.nbytes)
            vector: Any = self.run(call, lambda collectives: collectives.empty(
                like.shape, like.dtype), device=gpu)
            return gpu.gpu.array(vector, like.shape)
        if like.nbytes == 0:
            self._group.check_open()
            return np.empty(like.shape, like.dtype)
        return self._group.run(
            Call("empty", name, nbytes=like.nbytes),
            lambda collectives: collectives.empty(like.shape, like.dtype))

    def allreduce(self, x: A, *, op: "OpName | MPI.Op" = "sum",
                  algorithm: AlgorithmName = "auto") -> A:
        """Combine `x` over all ranks, in place, and return it.

        Args:
            x: Any shape, contiguous, writeable; bool, integer, floating (also bfloat16 of
                ml_dtypes) or complex. A NumPy array, a PyTorch tensor, a CuPy array, or any with
                `__cuda_array_interface__`. All ranks' in host memory, or all on GPUs. Bits are
                equal on all ranks afterwards.
            op: "sum", "mean" (floating, complex), "max", "min" (not complex; NaN propagates;
                on bool: or, and), "prod", or, bit by bit, "band", "bor" or "bxor" (integers,
                bool). Or an op of mpi4py's, such as MPI.SUM; the logical ones on bool only.
            algorithm: "auto", "ring", "direct", "shared" (in a node's memory), "hierarchical"
                (in the memory of several nodes, then between them), or "native" (MPI's own).
                Sums in 16 bits are made in float32 and rounded once ("hierarchical": once per
                node and once more; "ring": at every hop).

        Raises:
            ConfigError: The array, op or algorithm cannot work.
            BufferMismatchError: The ranks called different things.
            StallError: Some ranks did not arrive in time.

        Collective: yes. Blocking: yes.
        """
        if type(x) is np.ndarray and algorithm == "auto" and self._fast_calls.again(
                "allreduce", x, op):
            return x
        if type(op) is str and op in OPS_BY_OTHER_NAMES:
            return self.allreduce(x, op=OPS_BY_OTHER_NAMES[op], algorithm=algorithm)
        prepared = self._allreduce(x, op, algorithm)
        if algorithm == "auto":
            self._group.tune_once()
        self._run(prepared, "allreduce", x, op, notes=algorithm == "auto")
        return x

    def _run(self, prepared: Prepared, kind: str, x: Any, op_or_root: Any = None, *,
             notes: bool = True) -> Any:
        """Run a collective that is no fast call yet; the next one like it may be."""
        result = self._group.run(prepared.call, prepared.build)
        if notes and type(x) is np.ndarray:
            self._fast_calls.note(kind, prepared.call, x, op_or_root)
        return result

    def iallreduce(self, x: A, *, op: "OpName | MPI.Op" = "sum",
                   algorithm: AlgorithmName = "auto") -> Handle[A]:
        """Begin to combine `x` over all ranks, and return a handle at once.

        The operation advances in the background; leave `x` alone until `wait()` returns it.
        Many may be under way, and be waited for in any order.

        Args: see `allreduce`.

        Collective: yes. Blocking: no.
        """
        may_be_fast = type(x) is np.ndarray and algorithm == "auto"
        if may_be_fast and (started := self._fast_calls.iallreduce(x, op)) is not None:
            return started
        if type(op) is str and op in OPS_BY_OTHER_NAMES:
            return self.iallreduce(x, op=OPS_BY_OTHER_NAMES[op], algorithm=algorithm)
        call, build, _ = self._allreduce(x, op, algorithm)
        handle = self.submit(call, lambda collectives: _returning(x, build(collectives)))
        if may_be_fast:
            self._fast_calls.note("allreduce", call, x, op)
        return handle

    def reduce_scatter(self, x: A, *, op: "OpName | MPI.Op" = "sum") -> A:
        """Combine `x` over all ranks, but leave each rank only its own chunk of the result.

        Args:
            x: As in `allreduce`. Overwritten; only this rank's chunk is valid afterwards.
            op: As in `allreduce`.

        Returns:
            Chunk `rank` of `x`, a view with one dimension: elements `rank * n // size` to
            `(rank + 1) * n // size` in the order of its memory.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        if type(x) is np.ndarray and self._fast_calls.again("reduce_scatter", x, op):
            return cast(A, slice_of(flat(x), self.rank, self.size))
        if type(op) is str and op in OPS_BY_OTHER_NAMES:
            return self.reduce_scatter(x, op=OPS_BY_OTHER_NAMES[op])
        prepared = self._reduce_scatter(x, op)
        chunk = self._run(prepared, "reduce_scatter", x, op)
        return cast(A, part_of(x, prepared.vector, chunk))

    def allgather(self, x: A) -> A:
        """Copy every rank's chunk of `x` to all ranks, in place, and return `x`.

        The counterpart of `reduce_scatter`: rank r contributes elements
        `r * n // size` to `(r + 1) * n // size` in the order of memory.

        Args:
            x: Any shape and dtype as in `allreduce`.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        if type(x) is not np.ndarray or not self._fast_calls.again("allgather", x):
            self._run(self._allgather(x), "allgather", x)
        return x

    def broadcast(self, x: A, *, root: int = 0) -> A:
        """Copy `x` of rank `root` to all ranks, in place, and return it.

        Args:
            x: Any shape and dtype as in `allreduce`; may be read-only on `root`.
            root: The rank whose data is copied.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        # 1 == 1.0 == True
        is_fast = (type(x) is np.ndarray and type(root) is int
                   and self._fast_calls.again("broadcast", x, root))
        if not is_fast:
            self._run(self._broadcast(x, root), "broadcast", x, root)
        return x

    def barrier(self) -> None:
        """Return after every rank has called.

        Collective: yes. Blocking: yes.
        """
        if not self._fast_calls.barrier():
            self._run(Prepared(BARRIER, lambda collectives: collectives.barrier(), NOTHING),
                      "barrier", NOTHING)

    def persistent_allreduce(self, x: A, *, op: "OpName | MPI.Op" = "sum") -> Persistent[A]:
        """Return an operation that combines `x` over all ranks, in place, each time it is called.

        Arguments are checked, and the algorithm is chosen, once. `op()` is an `allreduce` that
        returns `x`; `op.start()` and `op.wait()` let the program compute in between.

        Args: as `allreduce`. The array's memory must stay where it is.

        Raises: as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        prepared = self._allreduce(_of_its_own(x), op, "auto")
        name = self._checked(op, prepared)
        self._group.tune_once()
        return self._persistent(prepared, lambda: self._allreduce(x, op, "auto"), x, x,
                                "allreduce", name)

    def persistent_reduce_scatter(self, x: A, *,
                                  op: "OpName | MPI.Op" = "sum") -> Persistent[A]:
        """Return an operation that is a `reduce_scatter` of `x` each time; see there.

        Collective: yes. Blocking: yes.
        """
        prepared = self._reduce_scatter(_of_its_own(x), op)
        name = self._checked(op, prepared)
        chunk = part_of(x, prepared.vector, slice_of(prepared.vector, self.rank, self.size))
        return self._persistent(prepared, lambda: self._reduce_scatter(x, op), x, cast(A, chunk),
                                "reduce_scatter", name)

    def persistent_allgather(self, x: A) -> Persistent[A]:
        """Return an operation that is an `allgather` of `x` each time; see there.

        Collective: yes. Blocking: yes.
        """
        return self._persistent(
            self._allgather(_of_its_own(x)), lambda: self._allgather(x), x, x, "allgather")

    def persistent_broadcast(self, x: A, *, root: int = 0) -> Persistent[A]:
        """Return an operation that is a `broadcast` of `x` each time; see there.

        Collective: yes. Blocking: yes.
        """
        return self._persistent(
            self._broadcast(_of_its_own(x), root), lambda: self._broadcast(x, root), x, x,
            "broadcast", operator.index(root))

    def _checked(self, op: Any, prepared: Prepared) -> str:
        """Return the name of an op that suits the dtype; else raise ConfigError."""
        dtype = prepared.vector.dtype
        return reduction(op_named(op, dtype), dtype, self.size).op

    def _persistent(self, prepared: Prepared, again: Callable[[], Prepared], x: Any, result: A,
                    kind: str, op_or_root: Any = None) -> Persistent[A]:
        call, build, vector = prepared
        number = self._group.next_persistent()
        call = replace(call, detail=f"{call.detail}, persistent operation {number}")
        if type(vector) is not np.ndarray:
            # On a GPU: of what is queued when it is started.
            return Persistent(self._group, call, lambda: again().build, result, self,
                              vector=None, kind=kind, op_or_root=op_or_root)
        return Persistent(
            self._group, call, _looked_at(x, build, self.rank) if is_tensor(x) else lambda: build,
            result, self, vector=vector, kind=kind, op_or_root=op_or_root)

    def _allreduce(self, x: Any, op: Any, algorithm: str) -> Prepared:
        vector = flat(x) if type(x) is np.ndarray else vector_of(x)
        op = op_named(op, vector.dtype)
        return Prepared(allreduce_call(op, x, vector, algorithm), self._where(
            vector, lambda collectives: collectives.allreduce(
                vector, op=op, algorithm=algorithm)), vector)

    def _reduce_scatter(self, x: Any, op: Any) -> Prepared:
        vector = vector_of(x)
        op = op_named(op, vector.dtype)
        return self._prepared("reduce_scatter", f"{op} of {described(x, vector)}", vector,
                              lambda collectives: collectives.reduce_scatter(vector, op=op))

    def _allgather(self, x: Any) -> Prepared:
        vector = vector_of(x)
        return self._prepared("allgather", described(x, vector), vector,
                              lambda collectives: collectives.allgather(vector))

    def _broadcast(self, x: Any, root: int) -> Prepared:
        root = whole_number(f"rank {self.rank}: root", root, 0, self.size - 1)
        vector = vector_of(x, writeable=self.rank != root)
        return self._prepared("broadcast", f"of {described(x, vector)} from root {root}", vector,
                              lambda collectives: collectives.broadcast(vector, root))

    def _prepared(self, kind: str, detail: str, vector: Any, build: Build[Any]) -> Prepared:
        call = Call(kind, detail, nbytes=vector.nbytes)
        return Prepared(call, self._where(vector, build), vector)

    def _where(self, vector: Any, build: Build[Any]) -> Build[Any]:
        """Return `build` for the memory, of the host or a GPU, that holds a vector."""
        return build if type(vector) is np.ndarray else self._group.gpus.where(vector, build)

    # Objects

    def broadcast_object(self, obj: T, *, root: int = 0) -> T:
        """Return the object that rank `root` passed, on every rank.

        Args:
            obj: Anything that pickles; ignored on ranks other than `root`.
            root: The rank whose object is copied.

        Raises:
            ConfigError: It does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        return objects.broadcast(self._group, obj, self._root(root))

    def allgather_object(self, obj: T, *, label: str = "allgather_object") -> list[T]:
        """Return the objects that all ranks passed, in rank order.

        Args:
            obj: Anything that pickles; types and sizes may differ.
            label: Name of the call in comparisons between ranks and in reports.

        Raises:
            ConfigError: A rank's does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        return objects.allgather(self._group, obj, label)

    def _root(self, root: int) -> int:
        return whole_number(f"rank {self.rank}: root", root, 0, self.size - 1)

    # Operations

    def tune(self, *, fresh: bool = False) -> Model:
        """Measure what each algorithm costs here; "auto" goes by the result from now on.

        Runs before the first blocking allreduce between nodes, and in `DataParallel`, unless the
        setting `tuning` forbids it; takes less than half a second on usual networks.

        Args:
            fresh: Measure even if an earlier job on such a cluster has.

        Raises:
            ConfigError: Ranks pass different values; on all.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self, "tune") as same:
            same["fresh"] = bool(fresh)
        return self._group.tune(fresh=fresh)

    @property
    def tunable(self) -> Tunable:
        """What a DataParallel tunes of these ranks' operations."""
        return self._group

    def prepare(self, dtypes: Iterable[DTypeLike] = ()) -> None:
        """Tune now, and compile sums, if that is still to come, rather than amid other work.

        Where numba is installed, sums and means on a node become faster by it; what it has
        compiled, for some seconds per dtype, is kept for later jobs (see the setting
        `tuning_folder`).

        Args:
            dtypes: Of arrays that are to be combined, beside float32, float64 and int64, such as
                float16; the same on all ranks.

        Raises:
            ConfigError: Collectives cannot send a dtype, or ranks pass different ones; on all.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self, "prepare") as same:
            try:
                names = same["dtypes"] = [*COMPILED_EARLY, *map(dtype_name, dtypes)]
            except TypeError as exc:
                raise ConfigError(f"rank {self.rank}: dtypes={dtypes!r:.200}: {exc}; expected a "
                                  f"list of NumPy's") from exc
        self._group.tune_once()
        compile_fast_calls(self._group, names)

    def submit(self, call: Call, build: Build[T], *, device: Device | None = None,
               ready: Sequence[Event] = ()) -> Handle[T]:
        """Begin an operation of your own, made of mpiring's schedules.

        Args:
            call: What it is; compared across ranks and shown in reports.
            build: Returns its schedule, given the collectives bound to its channel.
            device: The GPU on whose vectors the schedule works; by default it works on arrays
                in host memory.
            ready: Events of that GPU after which the vectors may be used.

        Collective: yes. Blocking: no. (The first time with a GPU: yes.)
        """
        return self._group.submit(call, self._built(build, device, ready))

    def run(self, call: Call, build: Build[T], *, device: Device | None = None,
            ready: Sequence[Event] = (), patient: float | bool = False) -> T:
        """Run an operation of your own, ahead of those in the background; return its result.

        Args:
            call, build, device, ready: As for `submit`.
            patient: Wait longer than `stall_timeout_s` for ranks whose background threads answer:
                for so many seconds; True for a day. Reports of stalls are printed.

        Collective: yes. Blocking: yes.
        """
        return self._group.run(call, self._built(build, device, ready), patient=patient)

    def _built(self, build: Build[T], device: Device | None, ready: Sequence[Event]) -> Build[T]:
        return build if device is None else self._group.gpus.on(device, ready, build)

    def messages(self) -> Messages:
        """Return single messages between these ranks, beside the collectives.

        Collective: yes, the first time. Blocking: yes.
        """
        return self._group.messages()

    @property
    def statistics(self) -> Statistics:
        """Costs of this communicator's operations so far.

        Subtract two of them for a period of time. Those split from this one count for themselves.
        """
        return self._group.statistics

    def poke(self) -> None:
        """Make some progress, where no background thread does.

        Collective: no. Blocking: no.
        """
        self._group.poke()

    def dump_flight(self, *, last: int = 32, file: TextIO | None = None) -> None:
        """Print this rank's last operations, also those that are not complete.

        With the setting `trace`, the last thousand are also written to a file in its folder. May
        be called at any time, also from a signal's handler.

        Args:
            last: How many to print, from 0.
            file: Standard error by default.

        Collective: no. Blocking: no.
        """
        self.recorder.dump(whole_number("last", last, 0), file or sys.stderr)

    def start_trace(self, folder: str) -> None:
        """Write from now on what every rank does; a trace that is being written ends.

        Args:
            folder: As the setting `trace`, which begins earlier.

        Collective: yes. Blocking: yes.
        """
        self._group.start_trace(folder)

    def stop_trace(self) -> str:
        """End the trace, and return the name of this rank's file; "" where there is no trace.

        Collective: yes. Blocking: yes.
        """
        return self._group.stop_trace()

    # Life

    @overload
    def split(self, color: None, *, key: int = 0) -> None: ...

    @overload
    def split(self, color: int, *, key: int = 0) -> "Communicator": ...

    @overload
    def split(self, color: int | None, *, key: int = 0) -> "Communicator | None": ...

    def split(self, color: int | None, *, key: int = 0) -> "Communicator | None":
        """Wait for the operations under way; return a communicator of the ranks of one color.

        Args:
            color: A whole number from 0, True or False, or None to join no communicator.
            key: A whole number that orders the ranks; ties keep their present order.

        Returns:
            The new communicator, or None where `color` is None.

        Raises:
            ConfigError: The color or the key is not such a number.

        Collective: yes. Blocking: yes.
        """
        if color is not None:
            color = whole_number(f"rank {self.rank}: color", int(color) if isinstance(
                color, bool | np.bool_) else color, 0, MOST_OF_MPI)
        key = whole_number(f"rank {self.rank}: key", key, -MOST_OF_MPI, MOST_OF_MPI)
        group = self._group.split(color, key)
        if group is None:
            return None
        part = Communicator.__new__(Communicator)
        part._join(group)
        return part

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or a rank has died."""
        return self._group.closed

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        Communicators are closed when the program ends. One that is garbage-collected before
        gives back its thread, but keeps some 2 MiB per rank and a communicator of MPI's, of which
        MPICH has 2,048; a ResourceWarning (`python -W default`) names the line that made it.

        Raises:
            StallError: A rank has not closed for a day, or its background thread has not answered
                for `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        self._group.close()

    def survivors(self) -> "Survivors":
        """Return these ranks as those that may survive deaths; for `mpiring.elastic`.

        Collective: no. Blocking: no.
        """
        return self._group.survivors()

    def abandon(self, error: BaseException) -> None:
        """Close without waiting for operations or other ranks, because a rank has died.

        Args:
            error: What every later call raises, also on communicators split from this one.

        Collective: no. Blocking: no.
        """
        self._group.abandon(error)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks do not close: let it end the job.
        if error is None:
            self.close()


def refuse_other_than_communicators(comm: object) -> None:
    """Raise ConfigError, which says how to make one, unless an argument is a Communicator."""
    # Anything with its methods will do; an mpi4py communicator does not have them.
    if not hasattr(comm, "allgather_object"):
        raise ConfigError(
            f"comm is a {type(comm).__name__}; pass mpiring.init(), or "
            f"mpiring.Communicator(comm) for a communicator of mpi4py's")


def _settings(config: Config | None) -> Config:
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: pass mpiring.Config(...)")
    return config


def _returning(value: T, schedule: Schedule[Any]) -> Schedule[T]:
    yield from schedule
    return value


def _of_its_own(x: Any) -> Any:
    """Return a view of a NumPy array: what becomes of its shape and flags does not matter then."""
    return x.view() if isinstance(x, np.ndarray) else x


def _looked_at(x: Any, build: Build[Any], rank: int) -> Callable[[], Build[Any]]:
    """Return a function that returns `build` while a tensor's memory is where it was.

    Args:
        x: In host memory.
        build: Returns a schedule on its memory.
        rank: For messages.
    """
    address, n = x.data_ptr(), x.numel()

    def again() -> Build[Any]:
        if x.data_ptr() != address or x.numel() != n:
            raise ConfigError(f"rank {rank}: the tensor of this persistent operation has got "
                              f"another memory; make a new operation for it")
        return build

    return again
