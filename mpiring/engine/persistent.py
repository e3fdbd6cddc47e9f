"""An operation that is made once and started again and again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from ..errors import ConfigError
from ..operations.agreement import Call
from ..transport.base import T
from .handle import Handle

if TYPE_CHECKING:
    from .group import Build, Group


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
        vector: The array as a vector in host memory; None where it cannot be a round.
        op: Of an allreduce.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, group: "Group", call: Call, build: "Callable[[], Build[Any]]", result: T,
                 owner: object, *, vector: Any = None, op: str = "") -> None:
        self._group, self._call, self._build = group, call, build
        self._result, self._owner, self._vector = result, owner, vector
        self._handle: Handle[Any] | None = None
        # All ranks make the same ones, and in the same order.
        group.run(Call("persistent", str(call), nbytes=call.nbytes),
                  lambda collectives: collectives.barrier())
        self._short, self._round = group.short, None
        if self._short is not None and vector is not None:
            self._round = self._short.round(call, vector, op)

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
        self._handle = self._group.submit(self._call, self._build())

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
        build = self._build()
        if self._round is None or self._short is None or not self._short.run(
                self._round, self._call, self._vector):
            self._group.run(self._call, build)
        return self._result
