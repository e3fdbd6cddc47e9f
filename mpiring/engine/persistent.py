"""An operation that is made once and started many times."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from ..errors import ConfigError
from ..launch.forks import OfRank
from ..memory.arrays import data_address, dtype_name
from ..operations.agreement import Call
from ..transport import compiled
from ..transport.base import T
from ..transport.layout import DONE, GATED
from .compiling import compile_fast_calls
from .fast_calls import COPYING
from .handle import Handle

if TYPE_CHECKING:
    from .group import Build, Group


class Persistent(OfRank, Generic[T]):
    """An operation on one array, made once: call it, or `start()` and `wait()`, many times.

    The `persistent_` methods of a Communicator create it. They check the arguments, choose the
    algorithm and prepare the call. The operation keeps the array and the communicator alive, and
    need not be closed.

    Args:
        build: Function to call before each run; it checks the array and returns the function that
            builds the schedule.
        owner: Object to keep alive.
        vector: The array as a vector in host memory; None if no fast call can use it.
        kind, op_or_root: Description of the collective, see FastCalls.note.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, group: "Group", call: Call, build: "Callable[[], Build[Any]]", result: T,
                 owner: object, *, vector: Any, kind: str, op_or_root: Any) -> None:
        self._group, self._call, self._build = group, call, build
        self._result, self._owner, self._vector = result, owner, vector
        self._handle: Handle[Any] | None = None
        self._fast_calls = fast_calls = group.fast_calls
        # The prepared calls for `__call__` and for `start`.
        self._blocking_call = self._started_call = None
        self._begin: Callable[[int, int], int] | None = None
        self._words_address = self._vector_address = 0
        # All ranks must make the same operations in the same order.
        group.run(Call("persistent", str(call), nbytes=call.nbytes, prepares=True),
                  lambda collectives: collectives.barrier())
        if vector is None:
            return
        name = compiled.COPIES if kind in COPYING else dtype_name(vector.dtype)
        compile_fast_calls(group, [name])
        node_call = fast_calls.prepare(call, vector, kind, op_or_root)
        self._started_call = node_call or fast_calls.prepare(
            call, vector, kind, op_or_root, started=True)
        if kind == "allreduce" and fast_calls.is_compiled(vector, op_or_root):
            node_call = fast_calls.prepare_slices(call, vector, op_or_root)
        self._blocking_call = node_call
        # Only the memory of a NumPy array is known not to move; other memory is checked each time.
        if node_call is not None and node_call.is_short and type(result) is np.ndarray:
            self._begin, self._words_address = node_call.begin, node_call.address
            self._vector_address = data_address(vector)

    def __repr__(self) -> str:
        return f"<Persistent: {self._call}{', started' * (self._handle is not None)}>"

    def start(self) -> None:
        """Begin the operation; do not use the array until `wait()` returns.

        Raises:
            ConfigError: It is already started, or the array was moved or made read-only.

        Collective: yes. Blocking: no.
        """
        self._refuse_started()
        build = self._build()
        if self._started_call is not None:
            self._handle = self._fast_calls.start(self._started_call, self._vector, None)
        if self._handle is None:
            self._handle = self._group.submit(self._call, build)

    def wait(self) -> T:
        """Return the result when the operation is complete on this rank.

        Raises:
            ConfigError: It was not started.
            MpiringError: As for `wait` of a Handle.

        Collective: no. Blocking: yes.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call start() first")
        handle.wait()
        return self._result

    def __call__(self) -> T:
        """Run the operation ahead of those in the background, and return its result.

        Raises:
            MpiringError: As for `start` and `wait`.

        Collective: yes. Blocking: yes.
        """
        if self._handle is not None:
            self._refuse_started()
        begin, node_call = self._begin, self._blocking_call
        try:
            if begin is not None and node_call is not None:
                # This does the same as FastCalls.run, in two thirds of its time.
                status = begin(self._words_address, self._vector_address)
                if status == DONE or status != GATED and self._fast_calls.run(
                        node_call, self._vector, status):
                    return self._result
            build = self._build()
            if node_call is None or not self._fast_calls.run(node_call, self._vector):
                self._group.run(self._call, build)
        except BaseException as error:
            if node_call is not None:
                self._fast_calls.fail(node_call, error)
            raise
        return self._result

    def _refuse_started(self) -> None:
        if self._handle is not None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call wait() first")
