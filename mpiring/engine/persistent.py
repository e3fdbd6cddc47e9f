"""An operation on one array that is made once and started many times."""

from collections.abc import Callable
from typing import Any, Generic

import numpy as np

from ..errors import ConfigError
from ..launch.forks import OfRank
from ..memory.arrays import data_address
from ..transport.base import T
from ..transport.layout import DONE, GATED
from ..transport.node_call import NodeCall
from .group import Group
from .handle import Handle
from .prepared import Prepared


def moved(rank: int) -> ConfigError:
    """Return what to raise if a tensor is in other memory than when its operation was made."""
    return ConfigError(f"rank {rank}: the tensor of this persistent operation has moved to other "
                       f"memory; create a new operation for it")


class Persistent(OfRank, Generic[T]):
    """An operation on one array, made once: call it, or `start()` and `wait()`, many times.

    The `persistent_` methods of a Communicator create it. They check the arguments, choose the
    algorithm and prepare the call. The operation keeps the array and the communicator alive, and
    need not be closed.

    Args:
        vector: Function to call before each run; it checks the array and returns its vector.
        owner: Object to keep alive.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, group: Group, prepared: Prepared, vector: Callable[[], Any], result: T,
                 owner: object) -> None:
        self._group, self._prepared, self._vector = group, prepared, vector
        self._result, self._owner = result, owner
        self._handle: Handle[Any] | None = None
        self._begin: Callable[[int, int], int] = lambda words, vector: GATED
        self._node_call: NodeCall | None = None
        self._words_address = self._vector_address = 0
        # Only the memory of a NumPy array is known not to move; other memory is checked each time.
        node_call = prepared.node_call_at(vector()) if type(result) is np.ndarray else None
        if node_call is not None and node_call.is_short:
            self._begin, self._words_address = node_call.begin, node_call.address
            self._node_call, self._vector_address = node_call, data_address(vector())

    def __repr__(self) -> str:
        return f"<Persistent: {self._prepared}{', started' * (self._handle is not None)}>"

    def start(self) -> None:
        """Begin the operation; do not use the array until `wait()` returns.

        Raises:
            ConfigError: It is already started, or the array was moved or made read-only.

        Collective: yes. Blocking: no.
        """
        self._refuse_started()
        self._handle = self._prepared.start(self._vector(), self._result)

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
        node_call = self._node_call
        if node_call is not None:
            fast_calls = self._group.fast_calls
            try:
                # This does the same as Prepared.run, in two thirds of its time.
                status = self._begin(self._words_address, self._vector_address)
                if status == DONE or status != GATED and fast_calls.finish(
                        node_call, self._vector(), status):
                    return self._result
            except BaseException as error:
                fast_calls.fail(node_call, error)
                raise
        self._prepared.run(self._vector())
        return self._result

    def _refuse_started(self) -> None:
        if self._handle is not None:
            raise ConfigError(f"rank {self._group.rank}: {self!r}: call wait() first")
