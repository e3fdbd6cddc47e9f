"""Collectives on arrays, prepared: the calls of a Communicator, and those that are made once."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from .arguments import whole_number
from .engine.group import Build, Group
from .engine.persistent import Persistent
from .errors import ConfigError
from .gpu.arrays import vector_of
from .memory.arrays import flat, slice_of
from .memory.reduction import reduction
from .memory.tensors import is_tensor
from .operations.agreement import Call, allreduce_call, described, op_named, part_of

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


class ArrayCollectives:
    """The part of a Communicator that prepares collectives on arrays."""

    rank: int
    size: int
    _group: Group

    def persistent_allreduce(self, x: A, *, op: str = "sum") -> Persistent[A]:
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

    def persistent_reduce_scatter(self, x: A, *, op: str = "sum") -> Persistent[A]:
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

    def _allreduce(self, x: Any, op: str, algorithm: str) -> Prepared:
        vector = flat(x) if type(x) is np.ndarray else vector_of(x)
        if type(op) is not str:
            op = op_named(op, vector.dtype)
        return Prepared(allreduce_call(op, x, vector, algorithm), self._where(
            vector, lambda collectives: collectives.allreduce(
                vector, op=op, algorithm=algorithm)), vector)

    def _reduce_scatter(self, x: Any, op: str) -> Prepared:
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
