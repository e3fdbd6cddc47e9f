"""Runs training to its end with the surviving ranks."""

import atexit
import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from ..communicator import Communicator, make_default
from ..errors import ConfigError, MpiringError, ProcessFailedError
from ..launch import forks
from ..launch.environment import survives_deaths
from ..operations.agreement import Call
from ..transport.base import T
from .state import Commits, State

if TYPE_CHECKING:
    from ..transport.survivors import Survivors

_log = logging.getLogger("mpiring")


def run(train: Callable[[State], T], state: State) -> T:
    """Return the result of `train(state)`; if ranks die, the others continue without them.

    The survivors create a new communicator, `state.comm`, return to the last `state.commit()` that
    all of them have, and call `train(state)` again. `train` must create everything that depends on
    the communicator, such as a `DataParallel`, and continue from `state.step`. Means are then over
    the survivors.

    This needs Open MPI's `mpirun --with-ft ulfm`. Otherwise `train` is called once, and the death
    of a rank ends the job. Exceptions in `train` that no death has caused are raised.

    Args:
        train: Function of the state that trains to the end.
        state: State from which training begins.

    Raises:
        ConfigError: An attribute of the state cannot be copied.

    Collective: yes. Blocking: yes.
    """
    if not isinstance(state, State):
        raise ConfigError(f"state is a {type(state).__name__}; pass mpiring.elastic.State(comm)")
    if not callable(train):
        raise ConfigError(f"train is a {type(train).__name__}; pass a function of the state")
    # All ranks begin with equal states, so no barrier is needed. The commit also shows which
    # attributes cannot be copied if ranks cannot survive deaths.
    commits = Commits()
    commits.add(state._attributes)
    if survives_deaths():
        state._commits = commits
        try:
            return _Run(train, state, commits).result()
        finally:
            state._commits = None
    del commits
    if state.comm.rank == 0:
        _log.warning("a rank that dies ends this job: to continue without it, use Open MPI's "
                     "mpirun --with-ft ulfm; otherwise, resume from a checkpoint")
    return train(state)


class _Run(Generic[T]):
    """Attempts to train, each with the survivors of the previous one."""

    def __init__(self, train: Callable[[State], T], state: State, commits: Commits) -> None:
        self._train = train
        self._state = state
        self._commits = commits
        self._config = state.comm.config
        # All survivors agree on this, including those without a new communicator.
        self._survivors = state.comm.survivors()

    def result(self) -> T:
        """Return the result of the first attempt in which no rank dies before its end."""
        done, result = self._attempt(self._trained)
        noticed_s = time.monotonic()
        while not self._survivors.agree(done):
            before = self._survivors.size
            self._survivors = self._survivors.shrunk()
            done, result = self._attempt(lambda: self._trained_anew(before, noticed_s))
            noticed_s = time.monotonic()
        return result  # type: ignore[return-value]

    def _attempt(self, action: Callable[[], T]) -> tuple[bool, T | None]:
        """Return whether an action completes, and its result."""
        try:
            return True, action()
        except Exception as error:
            # A death is the cause, even if the error has another type by now.
            if not isinstance(error, ProcessFailedError) and not self._survivors.lost():
                raise
            _log.debug("rank %d of %d stops", self._state.comm.rank, self._survivors.size,
                       exc_info=True)
            traceback.clear_frames(error.__traceback__)
        self._state.comm.abandon(ProcessFailedError(
            "a rank has died, and this communicator with it; use state.comm instead"))
        self._survivors.leave()
        # This frees models and their buckets, whose hooks would use the dead communicator.
        gc.collect()
        return False, None

    def _trained(self) -> T:
        result = self._train(self._state)
        # A rank that finishes early must wait, to go back if another one dies.
        _wait_for_all(self._state.comm, "end of training")
        return result

    def _trained_anew(self, before: int, noticed_s: float) -> T:
        state = self._state
        state.comm = Communicator(self._survivors.comm, config=self._config)
        # The one that `init` has made includes dead ranks.
        make_default(state.comm)
        state._go_back(self._commits)
        atexit.unregister(_leave)
        atexit.register(_leave, state, self._survivors)
        if state.comm.rank == 0:
            _log.warning(
                "%d of %d ranks resume from %s after the others died; this took %.2f s",
                state.comm.size, before, state._place, time.monotonic() - noticed_s)
        return self._trained()


def _wait_for_all(comm: Communicator, purpose: str) -> None:
    comm.run(Call(purpose), lambda collectives: collectives.barrier(), patient=True)


def _leave(state: State, survivors: "Survivors") -> None:
    """End this process when all survivors have reached their end.

    It does not call MPI_Finalize, which can hang after a death.
    """
    if forks.in_fork:
        return
    with contextlib.suppress(MpiringError):
        _wait_for_all(state.comm, "exit")
    survivors.agree(True)
    forks.leave(0)
