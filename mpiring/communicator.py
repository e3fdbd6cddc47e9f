"""The public class Communicator: ranks, collectives on arrays and objects, and messages."""

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias, TypeVar, Union, cast, overload

import numpy as np
from numpy.typing import DTypeLike

from .arguments import MAX_INT32, whole_number
from .config import Config, config_or_default
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
from .launch.forks import OfRank
from .memory.arrays import dtype_name, flat, slice_of
from .memory.reduction import reduction
from .memory.tensors import is_tensor, note_write
from .names import (
    COMMUNICATOR, INIT, OP_ALIASES, AlgorithmName, OpName, explaining)
from .operations.agreement import Call, allreduce_call, described, op_named, part_of
from .operations.consistency import same_on_all
from .operations.model import Model
from .operations.collectives import returning
from .record.statistics import Statistics
from .transport.base import T

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport.survivors import Survivors

# An array of NumPy, PyTorch or CuPy.
A = TypeVar("A")
# The documentation shows both members. The mpi4py type is a string: importing it starts MPI.
Op: TypeAlias = Union[OpName, "MPI.Op"]


class Prepared(NamedTuple):
    """A collective on an array, checked and ready to run; `build` returns its schedule."""

    call: Call
    build: Build[Any]
    vector: Any


class Communicator(OfRank):
    """The ranks of one MPI communicator, and the collectives among them.

    Every rank must call the same collectives in the same order. Different calls raise
    BufferMismatchError; a call that a rank never makes raises StallError. Several threads may call
    collectives if they agree on the order, since ranks cannot distinguish identical calls from two
    threads. Threads that do not wait for each other need one communicator each: `split(0)`.

    Args:
        mpi_comm: mpi4py intracommunicator. It is duplicated, so that messages of mpiring never
            match messages of the program.
        config: Settings; by default the values of the MPIRING_* variables.

    Attributes:
        rank, size: Number of this rank, and number of ranks.
        local_rank, local_size: Number of this rank on its node, and number of ranks on the node.
        node_rank, num_nodes: Number of this node, and number of nodes.
        memory_groups: List of ranks for each shared memory: all ranks of a node, or one rank if the
            setting `shared_memory` is off.
        config: Settings.
        threaded: True if operations advance in the background.
        recorder: Record of this rank's last operations. `recorder.end_step()` marks the end of a
            training step in the trace, as `DataParallel` does.

    Raises:
        ConfigError: `mpi_comm` is no intracommunicator, or the settings of the ranks differ.

    Collective: yes. Blocking: yes.
    """

    @explaining(INIT)
    def __init__(self, mpi_comm: "MPI.Intracomm", *, config: Config | None = None) -> None:
        self._join(Group(mpi_comm, config_or_default(config)))

    def _join(self, group: Group) -> None:
        self._group, self._fast_calls, self._models = group, group.fast_calls, 0
        self.config, self.recorder = group.config, group.recorder
        self.threaded = group.threaded
        self.rank, self.size = group.rank, group.size
        nodes = group.sharing.topology
        self.local_rank, self.local_size = nodes.local_rank, nodes.local_size
        self.node_rank, self.num_nodes = nodes.node_rank, nodes.num_nodes
        weakref.finalize(self, group.drop).atexit = False

    if not TYPE_CHECKING:
        # A type checker would accept every name.
        def __getattr__(self, name: str) -> Any:
            if name in COMMUNICATOR:
                raise AttributeError(f"a Communicator has no {name}; use {COMMUNICATOR[name]}")
            raise AttributeError(f"a Communicator has no {name}", name=name, obj=self)

    @property
    def memory_groups(self) -> list[list[int]]:
        """List of ranks for each shared memory."""
        return [list(ranks) for ranks in self._group.sharing.memory_groups]

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}{', closed' * self.closed}>"

    # Arrays

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, *,
              device: str | Device = "cpu") -> Any:
        """Return a new array in node-shared memory if available; its content is undefined.

        Collectives on the array, or on contiguous parts of it, copy nothing.

        Args:
            shape: Shape of the array, the same on all ranks.
            dtype: Any dtype that `allreduce` takes.
            device: "cpu" for a NumPy array, or "cuda:1" for a CuPy array on GPU 1 of this process.
                "cuda" assigns the GPUs of a node to its ranks in turn.

        Raises:
            ConfigError: The shape, dtype or device is invalid.
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
            call = Call("empty", f"{name} on a GPU", nbytes=like.nbytes, prepares=True)
            vector: Any = self.run(call, lambda collectives: collectives.empty(
                like.shape, like.dtype), device=gpu)
            return gpu.gpu.array(vector, like.shape)
        if like.nbytes == 0:
            self._group.check_open()
            return np.empty(like.shape, like.dtype)
        return self._group.run(
            Call("empty", name, nbytes=like.nbytes, prepares=True),
            lambda collectives: collectives.empty(like.shape, like.dtype))

    def allreduce(self, x: A, *, op: Op = "sum", algorithm: AlgorithmName = "auto") -> A:
        """Combine `x` over all ranks, in place, and return it.

        The result is bitwise identical on all ranks.

        Args:
            x: NumPy array, PyTorch tensor, CuPy array, or object with
                `__cuda_array_interface__`, of any shape; contiguous and writeable. The dtype is
                bool, integer, floating (including bfloat16 of ml_dtypes) or complex. The arrays of
                all ranks are in host memory, or all are on GPUs. As with PyTorch's operations in
                place, a leaf tensor may require a gradient only in `torch.no_grad()`.
            op: Operation: "sum", "prod", "mean", "max", "min", "band", "bor" or "bxor". The mean of
                floating or complex numbers is also called "avg" or "average". The ops "max" and
                "min" propagate NaN, do not support complex numbers, and are "or" and "and" of bool.
                The ops "band", "bor" and "bxor" combine the bits of integers or bool. An mpi4py op
                such as MPI.SUM is also accepted; the logical ones combine bool only.
            algorithm: Name of the algorithm; "auto" chooses the fastest. The algorithm "shared"
                works in the memory of one node, "hierarchical" in the memory of each node and then
                between nodes. The algorithms "ring" and "direct" exchange messages, and "native"
                calls MPI. Sums of 16-bit numbers are computed in float32 and rounded once. With
                "hierarchical" they are rounded again between nodes, with "ring" at every hop.

        Raises:
            ConfigError: The array, op or algorithm is invalid, or they do not fit each other.
            BufferMismatchError: The ranks made different calls.
            StallError: Some ranks did not call within `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        if type(x) is np.ndarray and algorithm == "auto" and self._fast_calls.repeat(
                "allreduce", x, op):
            return x
        if type(op) is str and op in OP_ALIASES:
            return self.allreduce(x, op=OP_ALIASES[op], algorithm=algorithm)
        prepared = self._allreduce(x, op, algorithm)
        if algorithm == "auto":
            self._group.tune_before(prepared.call, waits=True)
        self._run(prepared, "allreduce", x, op, notes=algorithm == "auto")
        return x

    def _run(self, prepared: Prepared, kind: str, x: Any, op_or_root: Any = None, *,
             notes: bool = True) -> Any:
        """Run a collective, and note it, so that its repetition may be a fast call."""
        note_write(x)
        array = x
        if notes and kind != "reduce_scatter" and is_tensor(x):
            # Calls on tensors in host memory are fast as soon as equal ones on arrays would be.
            array = prepared.vector
            if type(array) is np.ndarray:
                array = array.reshape(x.shape)
                if self._fast_calls.repeat(kind, array, op_or_root):
                    return None
        result = self._group.run(prepared.call, prepared.build)
        if notes and type(array) is np.ndarray:
            self._fast_calls.note(kind, prepared.call, array, op_or_root)
        return result

    def iallreduce(self, x: A, *, op: Op = "sum",
                   algorithm: AlgorithmName = "auto") -> Handle[A]:
        """Start to combine `x` over all ranks, and return a handle at once.

        The operation advances in the background. Do not read or write `x` until the `wait()` of the
        handle returns it. Many operations may be in flight; wait for them in any order. Other ranks
        may call `allreduce` instead.

        Args:
            x, op, algorithm: Arguments of `allreduce`.

        Raises the same errors as `allreduce`, some of them in `wait()`.

        Collective: yes. Blocking: no.
        """
        may_be_fast = type(x) is np.ndarray and algorithm == "auto"
        if may_be_fast and (started := self._fast_calls.iallreduce(x, op)) is not None:
            return started
        if type(op) is str and op in OP_ALIASES:
            return self.iallreduce(x, op=OP_ALIASES[op], algorithm=algorithm)
        call, build, _ = self._allreduce(x, op, algorithm)
        note_write(x)
        if algorithm == "auto":
            self._group.tune_before(call, waits=False)
        handle = self.submit(call, lambda collectives: returning(x, build(collectives)))
        if may_be_fast:
            self._fast_calls.note("allreduce", call, x, op)
        return handle

    def reduce_scatter(self, x: A, *, op: Op = "sum") -> A:
        """Combine `x` over all ranks; each rank receives its own slice of the result.

        Args:
            x: Array as in `allreduce`. It is overwritten; only this rank's slice is valid
                afterwards.
            op: Operation as in `allreduce`.

        Returns:
            The slice of this rank, a view of `x` with one dimension. It has the elements from
            `rank * n // size` to `(rank + 1) * n // size` in memory order, of n elements in all.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        if type(x) is np.ndarray and self._fast_calls.repeat("reduce_scatter", x, op):
            return cast(A, slice_of(flat(x), self.rank, self.size))
        if type(op) is str and op in OP_ALIASES:
            return self.reduce_scatter(x, op=OP_ALIASES[op])
        prepared = self._reduce_scatter(x, op)
        chunk = self._run(prepared, "reduce_scatter", x, op)
        return cast(A, part_of(x, prepared.vector, chunk))

    def allgather(self, x: A) -> A:
        """Copy every rank's slice of `x` to all ranks, in place, and return `x`.

        The counterpart of `reduce_scatter`: rank r contributes the elements from `r * n // size`
        to `(r + 1) * n // size` in memory order, of n elements in all.

        Args:
            x: Array as in `allreduce`.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        if type(x) is not np.ndarray or not self._fast_calls.repeat("allgather", x):
            self._run(self._allgather(x), "allgather", x)
        return x

    def broadcast(self, x: A, *, root: int = 0) -> A:
        """Copy `x` of rank `root` to all ranks, in place, and return it.

        Args:
            x: Array as in `allreduce`; it may be read-only on `root`.
            root: Rank whose array is copied.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        # A fast call compares roots by `==`, but 1.0 and True are no roots.
        is_fast = (type(x) is np.ndarray and type(root) is int
                   and self._fast_calls.repeat("broadcast", x, root))
        if not is_fast:
            self._run(self._broadcast(x, root), "broadcast", x, root)
        return x

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            StallError: Some ranks did not call within `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        if not self._fast_calls.barrier():
            self._run(Prepared(BARRIER, lambda collectives: collectives.barrier(), NOTHING),
                      "barrier", NOTHING)

    def persistent_allreduce(self, x: A, *, op: Op = "sum") -> Persistent[A]:
        """Return an operation that combines `x` over all ranks, in place, each time it is called.

        Arguments are checked, and the algorithm is chosen, once. For `total =
        comm.persistent_allreduce(x)`, `total()` is an `allreduce` that returns `x`; `total.start()`
        and `total.wait()` let the program compute in between.

        Args:
            x: Array as in `allreduce`. The operation is bound to its memory.
            op: Operation as in `allreduce`.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        prepared = self._allreduce(_stable_view(x), op, "auto")
        name = self._checked_op(op, prepared)
        self._group.tune_once()
        return self._persistent(prepared, lambda: self._allreduce(x, op, "auto"), x, x,
                                "allreduce", name)

    def persistent_reduce_scatter(self, x: A, *, op: Op = "sum") -> Persistent[A]:
        """Return an operation that is a `reduce_scatter` of `x` each time it is called.

        Args:
            x: Array as in `reduce_scatter`. The operation is bound to its memory.
            op: Operation as in `allreduce`.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        prepared = self._reduce_scatter(_stable_view(x), op)
        name = self._checked_op(op, prepared)
        chunk = part_of(x, prepared.vector, slice_of(prepared.vector, self.rank, self.size))
        return self._persistent(prepared, lambda: self._reduce_scatter(x, op), x, cast(A, chunk),
                                "reduce_scatter", name)

    def persistent_allgather(self, x: A) -> Persistent[A]:
        """Return an operation that is an `allgather` of `x` each time it is called.

        Args:
            x: Array as in `allgather`. The operation is bound to its memory.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        return self._persistent(
            self._allgather(_stable_view(x)), lambda: self._allgather(x), x, x, "allgather")

    def persistent_broadcast(self, x: A, *, root: int = 0) -> Persistent[A]:
        """Return an operation that is a `broadcast` of `x` each time it is called.

        Args:
            x: Array as in `broadcast`. The operation is bound to its memory.
            root: Rank whose array is copied.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        return self._persistent(
            self._broadcast(_stable_view(x), root), lambda: self._broadcast(x, root), x, x,
            "broadcast", operator.index(root))

    def _checked_op(self, op: Any, prepared: Prepared) -> str:
        """Return the name of an op; raise ConfigError if the dtype does not support it."""
        dtype = prepared.vector.dtype
        return reduction(op_named(op, dtype), dtype, self.size).op

    def _persistent(self, prepared: Prepared, prepare: Callable[[], Prepared], x: Any, result: A,
                    kind: str, op_or_root: Any = None) -> Persistent[A]:
        call, build, vector = prepared
        number = self._group.next_persistent()
        call = replace(call, detail=f"{call.detail}, persistent operation {number}")
        if type(vector) is not np.ndarray:
            # On a GPU, the operation starts after the work that is queued at that time.
            return Persistent(self._group, call, lambda: _noted(x, prepare().build), result, self,
                              vector=None, kind=kind, op_or_root=op_or_root)
        return Persistent(
            self._group, call,
            _checked_build(x, build, self.rank) if is_tensor(x) else lambda: build,
            result, self, vector=vector, kind=kind, op_or_root=op_or_root)

    def _allreduce(self, x: Any, op: Any, algorithm: str) -> Prepared:
        vector = flat(x) if type(x) is np.ndarray else vector_of(x)
        op = op_named(op, vector.dtype)
        return Prepared(allreduce_call(op, x, vector, algorithm), self._for_memory(
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
        root = self._root(root)
        vector = vector_of(x, writeable=self.rank != root)
        return self._prepared("broadcast", f"of {described(x, vector)} from root {root}", vector,
                              lambda collectives: collectives.broadcast(vector, root))

    def _prepared(self, kind: str, detail: str, vector: Any, build: Build[Any]) -> Prepared:
        call = Call(kind, detail, nbytes=vector.nbytes)
        return Prepared(call, self._for_memory(vector, build), vector)

    def _for_memory(self, vector: Any, build: Build[Any]) -> Build[Any]:
        """Return `build` for a vector in host memory, or its equivalent for a vector on a GPU."""
        return build if type(vector) is np.ndarray else self._group.gpus.for_vector(vector, build)

    # Objects

    def broadcast_object(self, obj: T, *, root: int = 0) -> T:
        """Return the object that rank `root` passed, on every rank.

        Args:
            obj: Object that pickles; ignored on ranks other than `root`.
            root: Rank whose object is copied.

        Raises:
            ConfigError: The object does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        return objects.broadcast(self._group, obj, self._root(root))

    def allgather_object(self, obj: T, *, label: str = objects.UNLABELED) -> list[T]:
        """Return the objects that all ranks passed, in rank order.

        Args:
            obj: Object that pickles; types and sizes may differ between ranks.
            label: Name of the call in comparisons between ranks and in reports.

        Raises:
            ConfigError: The object of a rank does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        return objects.allgather(self._group, obj, label)

    def _root(self, root: int) -> int:
        return whole_number(f"rank {self.rank}: root", root, 0, self.size - 1)

    # Operations

    def tune(self, *, fresh: bool = False) -> Model:
        """Measure the cost of each algorithm on these ranks; "auto" uses the result from now on.

        Unless the setting `tuning` is off, `prepare` and `DataParallel` call this. The first
        allreduce between nodes for which all ranks wait also does, if it is one of the first ten.
        It takes less than half a second on usual networks.

        Args:
            fresh: If true, measure even if an earlier job on the same kind of cluster has measured.

        Returns:
            Model of the seconds that each algorithm takes for each size.

        Raises:
            ConfigError: The ranks pass different values; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        with same_on_all(self, "tune") as same:
            same["fresh"] = bool(fresh)
        return self._group.tune(fresh=fresh)

    @property
    def tunable(self) -> Tunable:
        """The settings of these ranks' operations that a DataParallel tunes."""
        return self._group

    def next_model(self) -> str:
        """Count a model whose ranks these are; return its number as a string for messages.

        Ranks compare this string, so that operations of two equal models are not mixed. It is ""
        for the first model. Collective, not blocking.
        """
        self._models += 1
        return f"of model {self._models}" if self._models > 1 else ""

    def prepare(self, dtypes: Iterable[DTypeLike] = ()) -> None:
        """Tune algorithms and compile sums now instead of in the first steps.

        If numba is installed, it compiles faster sums and means on a node; each dtype takes a few
        seconds. Later jobs load the result from the folder in the setting `tuning_folder`. Without
        this call, a process of low priority compiles them after a few seconds of calls, if there is
        a folder.

        Args:
            dtypes: Dtypes of the arrays to combine, such as float16, in addition to float32,
                float64 and int64; the same on all ranks.

        Raises:
            ConfigError: Collectives do not support a dtype, or the ranks pass different dtypes;
                raised on all ranks.

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
        """Start a user-defined operation, composed of mpiring schedules.

        Args:
            call: Description of the operation, compared across ranks and shown in reports.
            build: Function that takes the collectives of the operation and returns its schedule.
            device: GPU that holds the vectors of the schedule; by default they are in host memory.
            ready: Events of that GPU after which the vectors may be used.

        Returns:
            The handle of the operation.

        Raises:
            BufferMismatchError: The ranks made different calls; raised by `wait()` of the handle.

        Collective: yes. Blocking: no. (The first time with a GPU: yes.)
        """
        return self._group.submit(call, self._built(build, device, ready))

    def run(self, call: Call, build: Build[T], *, device: Device | None = None,
            ready: Sequence[Event] = (), patient: float | bool = False) -> T:
        """Run a user-defined operation before those in the background; return its result.

        Args:
            call, build, device, ready: Arguments of `submit`.
            patient: Seconds to wait, if more than `stall_timeout_s`, for ranks whose background
                threads answer; True for a day. Stalls are reported in any case.

        Raises:
            BufferMismatchError: The ranks made different calls.
            StallError: Some ranks did not call in time.

        Collective: yes. Blocking: yes.
        """
        return self._group.run(call, self._built(build, device, ready), patient=patient)

    def _built(self, build: Build[T], device: Device | None, ready: Sequence[Event]) -> Build[T]:
        return build if device is None else self._group.gpus.for_device(device, ready, build)

    def messages(self) -> Messages:
        """Return the point-to-point messages between these ranks, for `mpiring.asynchronous`.

        Collective: yes, the first time. Blocking: yes.
        """
        return self._group.messages()

    @property
    def statistics(self) -> Statistics:
        """Costs of this communicator's operations so far.

        Subtract two values to get the costs of a period. Communicators made by `split` have
        separate statistics.
        """
        return self._group.statistics

    def poke(self) -> None:
        """Advance operations if no background thread does.

        Collective: no. Blocking: no.
        """
        self._group.poke()

    def work_inline(self, work: Callable[[], object]) -> None:
        """Call `work` while this rank waits or polls, if operations have no background thread.

        It is for `mpiring.horovod`, which otherwise has a thread for such work. The function must
        return if a caller of this thread is already at this work.
        """
        self._group.lane.work = work

    def dump_flight(self, *, last: int = 32, file: TextIO | None = None,
                    folder: str | os.PathLike[str] | None = None) -> None:
        """Print this rank's last operations, including incomplete ones.

        The operations in this communicator and in those split from it come first, then those in the
        other open communicators.

        The last thousand are also written to `folder`, or to the folder of the setting `trace`, in
        the format of PyTorch's flight recorder. The command `python -m
        torch.distributed.flight_recorder.fr_trace FOLDER` compares the files of all ranks. A signal
        handler may call this.

        Args:
            last: Number of operations to print, from 0.
            file: Stream to print to; by default standard error.
            folder: Folder for the file `flight-rank<rank>`, which replaces an earlier one; created
                if it does not exist. By default, the folder of the trace, with a
                file per job and rank.

        Raises:
            ConfigError: `last` or `folder` has the wrong type or range.

        Collective: no. Blocking: no.
        """
        self._group.engine.dump(last, file, folder)

    def start_trace(self, folder: str) -> None:
        """Start a trace of every rank; this ends a trace that is being written.

        Args:
            folder: Folder for the files of the trace. The setting `trace` names one for a trace
                from the start of the job.

        Collective: yes. Blocking: yes.
        """
        self._group.start_trace(folder)

    def stop_trace(self) -> str:
        """End the trace, and return the name of this rank's file, or "" if there is no trace.

        Collective: yes. Blocking: yes.
        """
        return self._group.stop_trace()

    # Lifetime

    @overload
    def split(self, color: None, *, key: int = 0) -> None: ...

    @overload
    def split(self, color: int, *, key: int = 0) -> "Communicator": ...

    @overload
    def split(self, color: int | None, *, key: int = 0) -> "Communicator | None": ...

    def split(self, color: int | None, *, key: int = 0) -> "Communicator | None":
        """Wait for all operations in flight; return a communicator of the ranks of one color.

        Args:
            color: Whole number from 0, True or False; or None for ranks that join no communicator.
            key: Whole number by which the new communicator orders its ranks; ties keep their order.

        Returns:
            The new communicator, or None if `color` is None. Do not pass that None as an argument
            `comm`, where it means all ranks.

        Raises:
            ConfigError: The color or the key is not such a number.

        Collective: yes. Blocking: yes.
        """
        if color is not None:
            color = whole_number(f"rank {self.rank}: color", int(color) if isinstance(
                color, bool | np.bool_) else color, 0, MAX_INT32)
        key = whole_number(f"rank {self.rank}: key", key, -MAX_INT32, MAX_INT32)
        group = self._group.split(color, key)
        if group is None:
            return None
        part = Communicator.__new__(Communicator)
        part._join(group)
        return part

    @property
    def closed(self) -> bool:
        """True after `close`, or if a rank has died."""
        return self._group.closed

    def close(self) -> None:
        """Wait for all operations, and for all ranks to close; later calls raise ClosedError.

        The end of the program closes open communicators. A communicator that is garbage-collected
        earlier releases its thread. It keeps about 4 MiB per rank and one MPI communicator, of
        which MPICH has 2,048. A ResourceWarning (`python -W default`) names the line that created
        it.

        Raises:
            StallError: A rank has not closed for a day, or its background thread has not answered
                for `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        self._group.close()

    def survivors(self) -> "Survivors":
        """Return the interface to survive the death of a rank; for `mpiring.elastic`.

        Collective: no. Blocking: no.
        """
        return self._group.survivors()

    def abandon(self, error: BaseException) -> None:
        """Close without waiting for operations or other ranks, because a rank has died.

        Every later call raises `error`, including calls on communicators split from this one.

        Collective: no. Blocking: no.
        """
        self._group.abandon(error)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks do not close; the exception ends the job.
        if error is None:
            self.close()


def _stable_view(x: Any) -> Any:
    """Return a view that later changes of a NumPy array's shape and flags do not affect."""
    return x.view() if isinstance(x, np.ndarray) else x


def _noted(x: Any, build: Build[Any]) -> Build[Any]:
    """Return `build`, which is about to write to an array."""
    note_write(x)
    return build


def _checked_build(x: Any, build: Build[Any], rank: int) -> Callable[[], Build[Any]]:
    """Return a function that returns `build`, or refuses a tensor on the host that has moved."""
    address, n = x.data_ptr(), x.numel()

    def checked() -> Build[Any]:
        if x.data_ptr() != address or x.numel() != n:
            raise ConfigError(f"rank {rank}: the tensor of this persistent operation has moved to "
                              f"other memory; create a new operation for it")
        return _noted(x, build)

    return checked
