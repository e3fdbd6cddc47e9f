"""Horovod's operations on arrays: checks of arguments, names and submission."""

from collections.abc import Callable, Sequence
from typing import Any

from .compression import Compression
from .matching import await_all
from .ops import Average, op_named
from .process_sets import ProcessSet
from .requests import BARRIER, JOIN, NamedRequest, Terms, terms_of
from .world import global_process_set, world

Arrays = Sequence[Any]


class Operations:
    """Horovod's functions on the arrays of one package.

    Ranks match operations by name, in any order; operations without a name are numbered. A function
    `..._async` returns a handle for `poll` and `synchronize`. A function whose name ends with `_`
    works in place. A function `grouped_...` accepts a list of arrays, for one operation. All ranks
    of the `process_set` must call the function.

    Args:
        arrays: Functions of the package; see requests.ArrayPackage.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays

    def _submit(self, kind: str, tensors: Arrays, name: str | None, process_set: ProcessSet,
                op: str = "", factors: tuple[float, float] = (1.0, 1.0), root: int = -1,
                in_place: bool = False, single: bool = False, splits: Any = None) -> NamedRequest:
        matcher, arrays = process_set.matcher, self._arrays
        tensors = tensors if isinstance(tensors, list) else list(tensors)
        # The general case takes 1 µs longer.
        if len(tensors) == 1:
            x = arrays.array(tensors[0], written=in_place)
            tensors, terms = [x], terms_of(arrays, kind, (x.dtype,), (x.shape,), op, root, factors,
                                           arrays.device(x))
        else:
            tensors = [arrays.array(x, written=in_place) for x in tensors]
            devices = sorted({arrays.device(x) for x in tensors})
            if len(devices) != 1:
                raise ValueError(f"{kind} of {len(tensors)} tensors on {devices}: expected at "
                                 f"least one, all in host memory or all on GPUs")
            terms = terms_of(arrays, kind, tuple([x.dtype for x in tensors]),
                             tuple([x.shape for x in tensors]), op, root, factors, devices[0])
        return matcher.submit(
            NamedRequest(arrays, name or "", terms, tensors, in_place, single, splits))

    def poll(self, handle: Any) -> bool:
        """Return whether an operation is complete, so that `synchronize` returns at once.

        Args:
            handle: Handle of the operation.

        Collective: no. Blocking: no.
        """
        return not isinstance(handle, NamedRequest) or bool(handle.matcher.poll(handle))

    def synchronize(self, handle: Any) -> Any:
        """Return the result of an operation when it is complete.

        Args:
            handle: Handle of the operation.

        Raises:
            HorovodInternalError: Ranks have submitted different operations under its name, a rank
                never submitted it, or a rank has died.

        Collective: yes. Blocking: yes.
        """
        return handle.matcher.finish(handle) if isinstance(handle, NamedRequest) else handle()

    def _differentiable(self, run: Callable[[Arrays], Arrays],
                        backward: Callable[[Arrays], Arrays], tensors: Arrays) -> Arrays:
        """Return `run(tensors)`; if gradients are recorded, `backward` computes them."""
        return run(tensors)

    def _compressed(self, run: Callable[[Arrays], Arrays], backward: Callable[[Arrays], Arrays],
                    tensors: Arrays, compression: Any) -> list[Any]:
        pairs = [compression.compress(self._arrays.array(x)) for x in tensors]
        results = self._differentiable(run, backward, [x for x, _ in pairs])
        return [compression.decompress(x, context) for x, (_, context) in zip(results, pairs)]

    # Allreduce

    def allreduce_async(self, tensor: Any, average: bool | None = None, name: str | None = None,
                        op: int | None = None, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0,
                        process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to combine an array over all ranks, and return a handle of the new array.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            average: Deprecated argument of Horovod; use `op`.
            name: Name of the operation, the same on all ranks.
            op: Reduction: Average (the default), Sum, Adasum, Min, Max or Product. An average of
                integers is rounded toward zero.
            prescale_factor, postscale_factor: Factors of the array and of the result.
            process_set: Ranks that combine the array.

        Raises:
            ValueError: An operation of this name is in flight, or the array or the op is not
                supported.

        Collective: yes. Blocking: no.
        """
        return self._submit("allreduce", [tensor], name, process_set, op_named(op, average),
                            (prescale_factor, postscale_factor), single=True)

    def allreduce_async_(self, tensor: Any, average: bool | None = None, name: str | None = None,
                         op: int | None = None, prescale_factor: float = 1.0,
                         postscale_factor: float = 1.0,
                         process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to combine an array over all ranks, in place; see `allreduce_async`.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: no.
        """
        return self._submit("allreduce", [tensor], name, process_set, op_named(op, average),
                            (prescale_factor, postscale_factor), in_place=True, single=True)

    def allreduce(self, tensor: Any, average: bool | None = None, name: str | None = None,
                  compression: Any = Compression.none, op: int | None = None,
                  prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                  process_set: ProcessSet = global_process_set) -> Any:
        """Return an array combined over all ranks.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            compression: Compression of the message; see Compression.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: yes.
        """
        return self.grouped_allreduce([tensor], average, name, compression, op, prescale_factor,
                                      postscale_factor, process_set)[0]

    def allreduce_(self, tensor: Any, average: bool | None = None, name: str | None = None,
                   op: int | None = None, prescale_factor: float = 1.0,
                   postscale_factor: float = 1.0,
                   process_set: ProcessSet = global_process_set) -> Any:
        """Combine an array over all ranks, in place, and return it; see `allreduce_async`.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: yes.
        """
        return self.synchronize(self.allreduce_async_(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set))

    def grouped_allreduce_async(
            self, tensors: Arrays, average: bool | None = None, name: str | None = None,
            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
            process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to combine arrays over all ranks; see `allreduce_async`.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: no.
        """
        return self._submit("allreduce", tensors, name, process_set, op_named(op, average),
                            (prescale_factor, postscale_factor))

    def grouped_allreduce_async_(
            self, tensors: Arrays, average: bool | None = None, name: str | None = None,
            op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
            process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to combine arrays over all ranks, in place; see `allreduce_async`.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: no.
        """
        return self._submit("allreduce", tensors, name, process_set, op_named(op, average),
                            (prescale_factor, postscale_factor), in_place=True)

    def grouped_allreduce(self, tensors: Arrays, average: bool | None = None,
                          name: str | None = None, compression: Any = Compression.none,
                          op: int | None = None, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0,
                          process_set: ProcessSet = global_process_set) -> list[Any]:
        """Return arrays combined over all ranks.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks.
            compression: Compression of the messages; see Compression.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: yes.
        """
        def run(xs: Arrays) -> Arrays:
            return self.synchronize(self.grouped_allreduce_async(  # type: ignore[no-any-return]
                xs, average, name, op, prescale_factor, postscale_factor, process_set))

        def backward(grads: Arrays) -> Arrays:
            return self.grouped_allreduce(grads, average, None, Compression.none, op,
                                          prescale_factor, postscale_factor, process_set)

        return self._compressed(run, backward, tensors, compression)

    def grouped_allreduce_(self, tensors: Arrays, average: bool | None = None,
                           name: str | None = None, op: int | None = None,
                           prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                           process_set: ProcessSet = global_process_set) -> Any:
        """Combine arrays over all ranks, in place, and return them; see `allreduce_async`.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks.
            average, name, op, prescale_factor, postscale_factor, process_set: Arguments of
                `allreduce_async`.

        Collective: yes. Blocking: yes.
        """
        return self.synchronize(self.grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set))

    # Allgather

    def allgather_async(self, tensor: Any, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to concatenate all ranks' arrays; see `grouped_allgather_async`.

        Args:
            tensor: Array with the same dtype and shape on all ranks, except for the first
                dimension.
            name: Name of the operation, the same on all ranks.
            process_set: Ranks whose arrays are concatenated.

        Collective: yes. Blocking: no.
        """
        return self._submit("allgather", [tensor], name, process_set, single=True)

    def allgather(self, tensor: Any, name: str | None = None,
                  process_set: ProcessSet = global_process_set) -> Any:
        """Return the concatenation of all ranks' arrays; see `grouped_allgather_async`.

        Args:
            tensor: Array with the same dtype and shape on all ranks, except for the first
                dimension.
            name: Name of the operation, the same on all ranks.
            process_set: Ranks whose arrays are concatenated.

        Collective: yes. Blocking: yes.
        """
        return self.grouped_allgather([tensor], name, process_set)[0]

    def grouped_allgather_async(self, tensors: Arrays, name: str | None = None,
                                process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to concatenate all ranks' arrays along the first dimension; return a handle.

        Args:
            tensors: Arrays with the same dtypes and shapes on all ranks, except for the first
                dimensions.
            name: Name of the operation, the same on all ranks.
            process_set: Ranks whose arrays are concatenated.

        Collective: yes. Blocking: no.
        """
        return self._submit("allgather", tensors, name, process_set)

    def grouped_allgather(self, tensors: Arrays, name: str | None = None,
                          process_set: ProcessSet = global_process_set) -> list[Any]:
        """Return the concatenations of all ranks' arrays; see `grouped_allgather_async`.

        Args:
            tensors, name, process_set: Arguments of `grouped_allgather_async`.

        Collective: yes. Blocking: yes.
        """
        rows: list[Any] = []

        def run(xs: Arrays) -> Arrays:
            request = self.grouped_allgather_async(xs, name, process_set)
            results = self.synchronize(request)
            rows.extend(request.rows)
            return results  # type: ignore[no-any-return]

        def backward(grads: Arrays) -> Arrays:
            rank, means = process_set.comm.rank, self.grouped_allreduce(
                grads, op=Average, process_set=process_set)
            return [mean[sum(counts[:rank]):sum(counts[:rank + 1])]
                    for mean, counts in zip(means, rows)]

        return list(self._differentiable(run, backward, [*map(self._arrays.array, tensors)]))

    # Broadcast

    def broadcast_async(self, tensor: Any, root_rank: int, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to copy one rank's array to new arrays on all ranks; return a handle.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            root_rank: Global rank whose array is copied.
            name: Name of the operation, the same on all ranks.
            process_set: Ranks that get the array.

        Collective: yes. Blocking: no.
        """
        process_set.root(root_rank)
        return self._submit("broadcast", [tensor], name, process_set, root=root_rank, single=True)

    def broadcast_async_(self, tensor: Any, root_rank: int, name: str | None = None,
                         process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to copy one rank's array to the arrays of all ranks; see `broadcast_async`.

        Args:
            tensor, root_rank, name, process_set: Arguments of `broadcast_async`.

        Collective: yes. Blocking: no.
        """
        process_set.root(root_rank)
        return self._submit("broadcast", [tensor], name, process_set, root=root_rank,
                            in_place=True, single=True)

    def broadcast(self, tensor: Any, root_rank: int, name: str | None = None,
                  process_set: ProcessSet = global_process_set) -> Any:
        """Return a copy of one rank's array; see `broadcast_async`.

        Args:
            tensor, root_rank, name, process_set: Arguments of `broadcast_async`.

        Collective: yes. Blocking: yes.
        """
        def run(xs: Arrays) -> Arrays:
            return [self.synchronize(self.broadcast_async(xs[0], root_rank, name, process_set))]

        def backward(grads: Arrays) -> Arrays:
            mean = self.allreduce(grads[0], op=Average, process_set=process_set)
            return [mean if process_set.comm.rank == process_set.root(root_rank) else mean * 0]

        return self._differentiable(run, backward, [self._arrays.array(tensor)])[0]

    def broadcast_(self, tensor: Any, root_rank: int, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Any:
        """Copy one rank's array to the arrays of all ranks; see `broadcast_async`.

        Args:
            tensor, root_rank, name, process_set: Arguments of `broadcast_async`.

        Collective: yes. Blocking: yes.
        """
        return self.synchronize(self.broadcast_async_(tensor, root_rank, name, process_set))

    # Alltoall

    def alltoall_async(self, tensor: Any, splits: Any = None, name: str | None = None,
                       process_set: ProcessSet = global_process_set) -> NamedRequest:
        """Start to send rows of an array to each rank.

        Args:
            tensor: Array with the same dtype and shape on all ranks, except for the first
                dimension.
            splits: Number of rows to send to each rank; by default, equal numbers.
            name: Name of the operation, the same on all ranks.
            process_set: Ranks that exchange rows.

        Returns:
            A handle. `synchronize` returns the received rows, in rank order, and the number of
            rows from each rank.

        Raises:
            ValueError: `splits` does not fit the number of rows or of ranks.

        Collective: yes. Blocking: no.
        """
        x, size = self._arrays.array(tensor), process_set.comm.size
        rows = x.shape[0] if x.shape else 0
        given = [rows // size] * size if splits is None else self._arrays.splits(splits)
        if len(given) != size or sum(given) != rows or min(given) < 0:
            raise ValueError(
                f"rank {process_set.comm.rank}: alltoall of {rows} rows with splits="
                f"{None if splits is None else given}: expected {size} numbers from 0 whose sum "
                f"is {rows}; without splits, the rows must be an even multiple of {size}")
        return self._submit("alltoall", [x], name, process_set, single=True,
                            splits=(given, splits))

    def alltoall(self, tensor: Any, splits: Any = None, name: str | None = None,
                 process_set: ProcessSet = global_process_set) -> Any:
        """Return the rows that all ranks have sent to this rank.

        Args:
            tensor, splits, name, process_set: Arguments of `alltoall_async`.

        Returns:
            The rows. If `splits` was passed, a pair of the rows and the number of rows from each
            rank.

        Collective: yes. Blocking: yes.
        """
        received: list[Any] = []

        def run(xs: Arrays) -> Arrays:
            rows, counts = self.synchronize(self.alltoall_async(xs[0], splits, name, process_set))
            received.append(counts)
            return [rows]

        def backward(grads: Arrays) -> Arrays:
            return self.alltoall(grads[0], received[0],  # type: ignore[no-any-return]
                                 process_set=process_set)[:1]

        (rows,) = self._differentiable(run, backward, [self._arrays.array(tensor)])
        return rows if splits is None else (rows, received[0])

    # Reducescatter

    def reducescatter_async(self, tensor: Any, name: str | None = None, op: int = Average,
                            process_set: ProcessSet = global_process_set,
                            prescale_factor: float = 1.0,
                            postscale_factor: float = 1.0) -> NamedRequest:
        """Start to combine an array over all ranks; each rank gets some rows of the result.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            name, op, process_set, prescale_factor, postscale_factor: Arguments of
                `grouped_reducescatter_async`.

        Collective: yes. Blocking: no.
        """
        return self._submit("reducescatter", [tensor], name, process_set, op_named(op, None),
                            (prescale_factor, postscale_factor), single=True)

    def reducescatter(self, tensor: Any, name: str | None = None,
                      compression: Any = Compression.none, op: int = Average,
                      process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0) -> Any:
        """Return this rank's rows of a combined array; see `grouped_reducescatter_async`.

        Args:
            tensor: Array with the same shape and dtype on all ranks.
            compression: Compression of the message; see Compression.
            name, op, process_set, prescale_factor, postscale_factor: Arguments of
                `grouped_reducescatter_async`.

        Collective: yes. Blocking: yes.
        """
        return self.grouped_reducescatter([tensor], name, compression, op, process_set,
                                          prescale_factor, postscale_factor)[0]

    def grouped_reducescatter_async(self, tensors: Arrays, name: str | None = None,
                                    op: int = Average,
                                    process_set: ProcessSet = global_process_set,
                                    prescale_factor: float = 1.0,
                                    postscale_factor: float = 1.0) -> NamedRequest:
        """Start to combine arrays over all ranks; each rank gets some rows of the results.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks. If an array has n rows,
                the first n % size ranks get one row more than the other ranks.
            name: Name of the operation, the same on all ranks.
            op: Reduction, as for `allreduce_async`.
            process_set: Ranks that combine the arrays.
            prescale_factor, postscale_factor: Factors of the arrays and of the results.

        Collective: yes. Blocking: no.
        """
        return self._submit("reducescatter", tensors, name, process_set, op_named(op, None),
                            (prescale_factor, postscale_factor))

    def grouped_reducescatter(self, tensors: Arrays, name: str | None = None,
                              compression: Any = Compression.none, op: int = Average,
                              process_set: ProcessSet = global_process_set,
                              prescale_factor: float = 1.0,
                              postscale_factor: float = 1.0) -> list[Any]:
        """Return this rank's rows of combined arrays; see `grouped_reducescatter_async`.

        Args:
            tensors: Arrays with the same shapes and dtypes on all ranks.
            compression: Compression of the message; see Compression.
            name, op, process_set, prescale_factor, postscale_factor: Arguments of
                `grouped_reducescatter_async`.

        Collective: yes. Blocking: yes.
        """
        def run(xs: Arrays) -> Arrays:
            return self.synchronize(  # type: ignore[no-any-return]
                self.grouped_reducescatter_async(
                    xs, name, op, process_set, prescale_factor, postscale_factor))

        def backward(grads: Arrays) -> Arrays:
            factor = prescale_factor * postscale_factor * (
                1 if op == Average else process_set.comm.size)
            return self.grouped_allgather([grad * factor for grad in grads],
                                          process_set=process_set)

        return self._compressed(run, backward, tensors, compression)

    # All ranks

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return when all ranks have called this function.

        Args:
            process_set: Ranks that must call.

        Collective: yes. Blocking: yes.
        """
        self.synchronize(self._submit_bare(BARRIER, process_set))

    def join(self, device: int = -1) -> int:
        """Contribute zeros to sums and means of other ranks until all ranks have called this.

        This includes steps of `DistributedOptimizer` and all process sets of this rank.

        Args:
            device: Argument for compatibility with Horovod; ignored.

        Returns:
            The last rank to call this function.

        Raises:
            HorovodInternalError: A rank has ended. Ranks that have not called `join` get this error
                in all other calls, except in `barrier`.

        Collective: yes. Blocking: yes.
        """
        return int(await_all([self._submit_bare(JOIN, each) for each in world().included])[0])

    def _submit_bare(self, kind: str, process_set: ProcessSet) -> NamedRequest:
        return process_set.matcher.submit(NamedRequest(self._arrays, "", Terms(kind), ()))
