"""The public class Communicator: ranks, collectives on arrays and objects, and messages."""

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, TypeVar, Union, cast, overload

import numpy as np
from numpy.typing import DTypeLike

from .arguments import MAX_INT32, whole_number
from .config import Config, config_or_default
from .engine import objects
from .engine.compiling import COMPILED_EARLY, compile_fast_calls
from .engine.group import Group
from .engine.handle import Handle
from .engine.messages import Messages
from .engine.persistent import Persistent, moved
from .engine.prepared import REDUCING, Pattern, Prepared
from .engine.scalars import SCALARS, OnScalar, array_of_scalar
from .engine.short_gpu import ShortOnGpu, is_short
from .errors import ConfigError
from .gpu.arrays import device_named, seen_on_gpu, vector_of
from .gpu.device import Device
from .gpu.interface import Event, UserStream
from .launch.forks import OfRank
from .memory.arrays import dtype_name
from .memory.reduction import reduction
from .memory.tensors import note_write
from .names import COMMUNICATOR, INIT, AlgorithmName, OpName, explaining
from .operations.agreement import Call, collective_call, op_named, part_of
from .operations.collectives import Build
from .operations.consistency import same_on_all
from .operations.model import Model
from .record.statistics import Statistics
from .transport import compiled
from .transport.base import T

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport.survivors import Survivors

# Vector of calls without data.
_NOTHING = np.empty(0, np.float32)
# An array of NumPy, PyTorch or CuPy, or a scalar.
A = TypeVar("A")
# The documentation shows both members. The mpi4py type is a string: importing it starts MPI.
Op: TypeAlias = Union[OpName, "MPI.Op"]


class Communicator(OfRank):
    """The ranks of one MPI communicator, and the collectives among them.

    Every rank must call the same collectives in the same order. Different calls raise
    BufferMismatchError; a call that a rank never makes raises StallError. Several threads may call
    collectives if they agree on the order, since ranks cannot distinguish identical calls from two
    threads. Threads that do not wait for each other need one communicator each: `split(0)`.

    On a GPU, a blocking collective begins after the work that is queued on the current stream of
    CuPy or PyTorch, and may return before the GPU has finished. Use its result on the stream that
    is current when the call returns. Other streams, also of other threads, must wait for this
    stream first. Threads that train at the same time need separate streams.

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
        self._group, self._models, self._persistent = group, 0, 0
        self._prepared = group.prepared
        self._barrier = Prepared(
            group, Call("barrier"), Pattern("barrier", None, _NOTHING.dtype, 0))
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
                place, a leaf tensor may require a gradient only in `torch.no_grad()`. Or a number
                of Python or NumPy, for which the result is a new number of the same type.
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
            ConfigError: The array, op or algorithm is invalid, or they do not fit each other. Or
                integers of this size could add up or multiply to more than 64 bits, or than the
                dtype of a NumPy scalar holds.
            BufferMismatchError: The ranks made different calls.
            StallError: Some ranks did not call within `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        prepared, vector = self._find("allreduce", x, op, algorithm)
        scalar = prepared.run(vector)
        return x if scalar is None else cast(A, scalar)

    def iallreduce(self, x: A, *, op: Op = "sum",
                   algorithm: AlgorithmName = "auto") -> Handle[A]:
        """Start to combine `x` over all ranks, and return a handle at once.

        The operation advances in the background. Do not read or write `x` until the `wait()` of the
        handle returns it. On a GPU, use the result on the stream that is current when `wait()`
        returns; `test()` tells whether the GPU has finished. Many operations may be in flight; wait
        for them in any order. Other ranks may call `allreduce` instead.

        Args:
            x, op, algorithm: Arguments of `allreduce`.

        Raises the same errors as `allreduce`, some of them in `wait()`.

        Collective: yes. Blocking: no.
        """
        prepared, vector = self._find("allreduce", x, op, algorithm)
        return prepared.start(vector, x)

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
        prepared, vector = self._find("reduce_scatter", x, op)
        prepared.run(vector)
        pattern = cast(Pattern, cast(Prepared, prepared).pattern)
        return cast(A, part_of(x, vector, self._part(pattern.n)))

    def allgather(self, x: A) -> A:
        """Copy every rank's slice of `x` to all ranks, in place, and return `x`.

        The counterpart of `reduce_scatter`: rank r contributes the elements from `r * n // size`
        to `(r + 1) * n // size` in memory order, of n elements in all.

        Args:
            x: Array as in `allreduce`.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        prepared, vector = self._find("allgather", x)
        prepared.run(vector)
        return x

    def broadcast(self, x: A, *, root: int = 0) -> A:
        """Copy `x` of rank `root` to all ranks, in place, and return it.

        Args:
            x: Array or number as in `allreduce`; it may be read-only on `root`.
            root: Rank whose array is copied.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        # Numbers that equal whole numbers, like 1.0 and True, are no roots.
        prepared, vector = self._find(
            "broadcast", x, root if type(root) is int else self._root(root))
        scalar = prepared.run(vector)
        return x if scalar is None else cast(A, scalar)

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            StallError: Some ranks did not call within `stall_timeout_s`.

        Collective: yes. Blocking: yes.
        """
        self._barrier.run(_NOTHING)

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
        self._group.tune_once()
        return self._persistent_call("allreduce", x, op)

    def persistent_reduce_scatter(self, x: A, *, op: Op = "sum") -> Persistent[A]:
        """Return an operation that is a `reduce_scatter` of `x` each time it is called.

        Args:
            x: Array as in `reduce_scatter`. The operation is bound to its memory.
            op: Operation as in `allreduce`.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        return self._persistent_call("reduce_scatter", x, op)

    def persistent_allgather(self, x: A) -> Persistent[A]:
        """Return an operation that is an `allgather` of `x` each time it is called.

        Args:
            x: Array as in `allgather`. The operation is bound to its memory.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        return self._persistent_call("allgather", x)

    def persistent_broadcast(self, x: A, *, root: int = 0) -> Persistent[A]:
        """Return an operation that is a `broadcast` of `x` each time it is called.

        Args:
            x: Array as in `broadcast`. The operation is bound to its memory.
            root: Rank whose array is copied.

        Raises the same errors as `allreduce`.

        Collective: yes. Blocking: yes.
        """
        return self._persistent_call("broadcast", x, self._root(root))

    def _find(self, kind: str, x: Any, option: Any = None,
              algorithm: str = "auto") -> tuple[Prepared | OnScalar, Any]:
        """Return a collective on an array, and its vector; look it up if an equal one was made.

        The option is the op or the root. A scalar is first copied to an array.
        """
        is_plain, seen = type(x) is np.ndarray, None
        if algorithm == "auto":
            seen = (x.dtype, x.shape) if is_plain else seen_on_gpu(x)
        if seen is not None:
            try:
                prepared = self._prepared.get((kind, option, seen))
            except TypeError:
                # The option cannot be hashed, so it is refused below.
                prepared = None
            # Check each time, because the array's memory, shape and flags may change at any time.
            if prepared is not None:
                if not is_plain:
                    note_write(x)
                    return prepared, x
                if x.flags.carray:
                    return prepared, x if x.ndim == 1 else x.reshape(-1)
        if not is_plain and isinstance(x, SCALARS):
            on_array, vector = self._find(kind, array_of_scalar(
                x, kind, option, self.rank, self.size), option, algorithm)
            return OnScalar(cast(Prepared, on_array), x), vector
        prepared, vector = self._prepare(kind, x, option, algorithm)
        note_write(x)
        if seen is not None and type(option) in (str, int, NoneType) and (
                x.flags.carray if is_plain else vector is x):
            self._group.keep((kind, option, seen), prepared)
        return prepared, vector

    def _prepare(self, kind: str, x: Any, option: Any, algorithm: str) -> tuple[Prepared, Any]:
        """Return what `_find` returns, after checks.

        The vector of a ShortOnGpu is the array itself, unless its package is unknown.
        """
        if kind == "broadcast":
            option = self._root(option)
        vector = vector_of(x, writeable=kind != "broadcast" or self.rank != option)
        if kind in REDUCING:
            option = op_named(option, vector.dtype)
        call = collective_call(kind, option, x, vector, algorithm)
        is_plain = type(vector) is np.ndarray and vector.flags.carray
        short = algorithm == "auto" and is_short(self._group, vector)
        prepared = self._prepared.get((call, is_plain))
        if prepared is None:
            pattern = Pattern(kind, option, vector.dtype, vector.size, algorithm)
            prepared = ShortOnGpu(self._group, call, pattern) if short else Prepared(
                self._group, call, pattern, can_be_fast=is_plain)
            self._group.keep((call, is_plain), prepared)
        return prepared, x if short and seen_on_gpu(x) is not None else vector

    def _part(self, n: int) -> slice:
        """Return the range of this rank's slice of n elements."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def _persistent_call(self, kind: str, x: A, option: Any = None) -> Persistent[A]:
        # Later changes of a NumPy array's shape and flags do not affect a view.
        equal, vector = self._prepare(
            kind, x.view() if isinstance(x, np.ndarray) else x, option, "auto")
        pattern = cast(Pattern, equal.pattern)
        if kind in REDUCING:
            # An op that the dtype does not support is refused before other ranks wait.
            reduction(pattern.op, pattern.dtype, self.size)
        if kind == "allreduce":
            self._group.tune_once()
        self._persistent += 1
        prepared = equal.named(f"persistent operation {self._persistent}")
        # All ranks must make the same operations in the same order.
        call = Call("persistent", str(prepared), nbytes=equal.call.nbytes, prepares=True)
        self._group.run(call, lambda collectives: collectives.barrier())
        if type(vector) is np.ndarray or isinstance(prepared, ShortOnGpu):
            compile_fast_calls(self._group, [
                dtype_name(pattern.dtype) if kind in REDUCING else compiled.COPIES])
            prepared.make_ready()
        result = x if kind != "reduce_scatter" else part_of(
            x, vector, self._part(pattern.n))
        return Persistent(self._group, prepared, _current_vector(x, vector, self.rank),
                          cast(A, result), self)

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
    def tunable(self) -> Group:
        """The group of these ranks, in which a DataParallel tunes settings and notes Reducers."""
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

    def prepared(self, call: Call, pattern: Pattern | None = None,
                 build: Build[Any] | None = None, *, device: Device | None = None,
                 ready: Callable[[], Sequence[Event]] = tuple,
                 stream: UserStream | None = None, is_agreed: bool = False) -> Prepared:
        """Return a collective to run many times; for the buckets of a model.

        Args:
            call: Default call of its runs, see Prepared.
            pattern: Pattern of a plain collective on vectors in host memory; None for others.
            build, device, stream: Arguments of `submit`, if there is no pattern.
            ready: Function that returns the argument `ready` of `submit`, for each run.
            is_agreed: If true, the vectors are from equal calls of `empty` on all ranks, and the
                schedule consists of collectives on them. It can then be queued on GPUs. Ranks
                compare the calls of a run at the latest in the next run.

        Collective: no. Blocking: no.
        """
        if build is None:
            return Prepared(self._group, call, pattern)
        return Prepared(self._group, call, pattern,
                        lambda x: self._built(build, device, ready(), stream),
                        can_be_fast=pattern is not None, queued=self._group.queued_operation(
                            device, build, ready, stream) if device and is_agreed else None)

    def submit(self, call: Call, build: Build[T], *, device: Device | None = None,
               ready: Sequence[Event] = (), stream: UserStream | None = None) -> Handle[T]:
        """Start a user-defined operation, composed of mpiring schedules.

        Args:
            call: Description of the operation, compared across ranks and shown in reports.
            build: Function that takes the collectives of the operation and returns its schedule.
            device: GPU that holds the vectors of the schedule; by default they are in host memory.
            ready: Events of that GPU after which the vectors may be used.
            stream: Stream on which the caller uses the results; by default, CuPy's current stream.

        Returns:
            The handle of the operation.

        Raises:
            BufferMismatchError: The ranks made different calls; raised by `wait()` of the handle.

        Collective: yes. Blocking: no. (The first time with a GPU: yes.)
        """
        return self._group.submit(call, self._built(build, device, ready, stream))

    def run(self, call: Call, build: Build[T], *, device: Device | None = None,
            ready: Sequence[Event] = (), stream: UserStream | None = None,
            patient: float | bool = False) -> T:
        """Run a user-defined operation before those in the background; return its result.

        Args:
            call, build, device, ready, stream: Arguments of `submit`.
            patient: Seconds to wait, if more than `stall_timeout_s`, for ranks whose background
                threads answer; True for a day. Stalls are reported in any case.

        Raises:
            BufferMismatchError: The ranks made different calls.
            StallError: Some ranks did not call in time.

        Collective: yes. Blocking: yes.
        """
        return self._group.run(call, self._built(build, device, ready, stream), patient=patient)

    def _built(self, build: Build[T], device: Device | None, ready: Sequence[Event],
               stream: UserStream | None) -> Build[T]:
        return build if device is None else self._group.gpus.for_device(
            device, ready, build, stream)

    def own_device(self, device: Device) -> Device:
        """Return a GPU with the streams on which this communicator queues operations.

        Vectors of operations that are passed to `submit` have this device.

        Collective: yes, the first time for a GPU. Blocking: yes.
        """
        return self._group.gpus.own_device(device)

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
        self._group.queue.work = work

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


def _current_vector(x: Any, vector: Any, rank: int) -> Callable[[], Any]:
    """Return a function that returns the vector of `x`, or refuses a tensor that has moved."""
    if isinstance(x, np.ndarray):
        return lambda: vector
    on_gpu, address = type(vector) is not np.ndarray, getattr(x, "data_ptr", int)()

    def current() -> Any:
        if vector is x:
            # A ShortOnGpu checks the array.
            note_write(x)
            return x
        # On a GPU, the operation starts after the work that is queued at this time.
        now = vector_of(x) if on_gpu else vector
        if now.size != vector.size or not on_gpu and (
                x.data_ptr() != address or x.numel() != vector.size):
            raise moved(rank)
        note_write(x)
        return now

    return current
