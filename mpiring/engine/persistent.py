"""An operation that is made once and started again and again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from ..collectives import shared
from ..collectives.operation import NOWHERE
from ..errors import ConfigError
from ..memory.arrays import Array, data_address, dtype_name
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..transport import compiled
from ..transport.base import Schedule, T
from ..transport.layout import DONE, GATED
from .compiling import compile_fast_calls
from .handle import Handle
from .repeated import COPYING, IN_PLACE, RepeatedCalls

if TYPE_CHECKING:
    from .group import Build, Group

# From here on a second barrier costs less than a copy of a vector, and of all others'. Measured.
_IN_PLACE_BYTES = 4 << 10


class Persistent(Generic[T]):
    """An operation on one array, made once: `start()` and `wait()` it, or call it, again and again.

    Arguments are checked, the algorithm is chosen and the call is composed when it is made. Made by
    the `persistent_` methods of a Communicator; it keeps the array and the communicator, and
    needs no end.

    Args:
        group: Its ranks.
        call: What it is, the same on all ranks.
        build: Returns, for each time, what builds the schedule, after a look at the array.
        result: What `wait` returns.
        owner: Is kept alive.
        vector: The array as a vector in host memory; None where no fast call takes it.
        kind, op_or_root: Of the collective; see RepeatedCalls.note.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, group: "Group", call: Call, build: "Callable[[], Build[Any]]", result: T,
                 owner: object, *, vector: Any, kind: str, op_or_root: Any) -> None:
        self._group, self._call, self._build = group, call, build
        self._counter = group.sharing.counter
        self._result, self._owner, self._vector = result, owner, vector
        self._handle: Handle[Any] | None = None
        self._begin: Callable[[int, int], int] | None = None
        self._address = self._x = 0
        # All ranks make the same ones, and in the same order.
        group.run(Call("persistent", str(call), nbytes=call.nbytes),
                  lambda collectives: collectives.barrier())
        # What runs when it is called, and when it is started.
        self._repeated, self._node_call, self._started = group.repeated, None, None
        in_windows = False
        if vector is not None:
            name = dtype_name(vector.dtype)
            compile_fast_calls(group, [compiled.COPIES if kind in COPYING else name])
        if kind == "allreduce" and vector is not None and op_or_root in compiled.OPS:
            in_windows = group.run(
                Call("persistent", "(whether vectors are in windows)"),
                lambda collectives: _are_in_windows(
                    collectives, vector, op_or_root, group.repeated))
        if in_windows:
            self._build = lambda: (build(), _in_place(vector, op_or_root))[1]
        if self._repeated is not None and vector is not None:
            self._started = self._repeated.round(call, vector, kind, op_or_root, instead=in_windows)
            self._node_call = self._started
            if in_windows or kind == "allreduce" and _is_long_in_window(
                    group, self._repeated, vector, op_or_root):
                self._node_call = self._repeated.in_place(call, vector, op_or_root)
            # Where the memory may move, it has to be looked at each time.
            node_call = self._node_call
            if node_call is not None and node_call.is_short and type(result) is np.ndarray:
                self._begin, self._address = node_call.begin, node_call.address
                self._x = data_address(vector)

    def __repr__(self) -> str:
        return f"<Persistent: {self._call}{', started' * (self._handle is not None)}>"

    def start(self) -> None:
        """Begin the operation; leave the array alone until `wait()` returns.

        Raises:
            ConfigError: It is started already, or the array was moved or made read-only.

        Collective: yes. Blocking: no.
        """
        if self._handle is not None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call wait() first")
        build = self._build()
        if self._started is not None and self._repeated is not None:
            self._handle = self._repeated.start(self._started, self._call, self._vector, None)
        if self._handle is None:
            self._handle = self._group.submit(self._call, build)

    def wait(self) -> T:
        """Return the result when the operation is complete on this rank.

        Raises:
            ConfigError: It was not started.
            MpiringError: As `wait` of a Handle.

        Collective: no. Blocking: yes.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call start() first")
        handle.wait()
        return self._result

    def __call__(self) -> T:
        """Run the operation, ahead of those in the background, and return its result.

        Raises: as `start` and `wait`.

        Collective: yes. Blocking: yes.
        """
        if self._handle is not None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call wait() first")
        begin, repeated, node_call = self._begin, self._repeated, self._node_call
        if begin is not None and repeated is not None and node_call is not None:
            # As repeated.run, but that the memory is known.
            try:
                status = begin(self._address, self._x)
                if status == DONE or status != GATED and repeated.go_on(
                        status, node_call, self._call, self._vector):
                    return self._result
            except BaseException as error:
                repeated.fail(node_call, error)
                raise
        build = self._build()
        if node_call is None or repeated is None or not repeated.run(
                node_call, self._call, self._vector):
            self._group.run(self._call, build)
        return self._result


def _are_in_windows(collectives: Collectives, x: Array, op: str,
                    repeated: RepeatedCalls | None) -> Schedule[bool]:
    """Return whether all ranks are to combine short vectors in place, which takes compiled code.

    Shorter ones are faster copied; with longer ones it goes without saying.
    """
    if len(collectives.nodes) > 1 or collectives.size == 1:
        yield from collectives.barrier()
        return False
    is_able = repeated is not None and repeated.is_compiled(x, op) and x.nbytes >= _IN_PLACE_BYTES
    window, _ = collectives.windows.position_of(x)
    answers = yield from collectives.node.share(window, int(is_able))
    return answers == [(answers[0][0], 1)] * len(answers) and window >= 0


def _is_long_in_window(group: "Group", repeated: RepeatedCalls, x: Array, op: str) -> bool:
    """Return whether this rank may combine a long vector in place, whatever the others do."""
    return group.windows.position_of(x) != NOWHERE and repeated.is_compiled(x, op, IN_PLACE)


def _in_place(x: Array, op: str) -> "Build[None]":
    return lambda collectives: shared.allreduce(
        collectives, x, op, collectives.combiner(op, x.dtype, collectives.size))
