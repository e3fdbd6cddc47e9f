"""Runs training to its end with the surviving ranks, and with new ones."""

import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from .. import Communicator, ConfigError, MpiringError, ProcessFailedError, TransportError
from ..provisional import Call, arguments, launch, world
from . import joining
from .state import Commits, NewRanksJoin, State

if TYPE_CHECKING:
    from ..provisional import survivors

T = TypeVar("T")
_log = logging.getLogger("mpiring")

# Seconds between attempts to start new ranks at commits.
_RETRY_S = 60


def run(train: Callable[[State], T], state: State, *, max_ranks: int | None = None) -> T:
    """Return the result of `train(state)`; if ranks die, the others continue without them.

    The survivors create a new communicator, `state.comm`, return to the last `state.commit()` that
    all of them have, and call `train(state)` again. `train` must create everything that depends on
    the communicator, such as a `DataParallel`, and continue from `state.step`. Means are then over
    the ranks of `state.comm`.

    With `max_ranks`, new ranks replace dead ones. They run the program from its beginning, receive
    the commit from the memory of a survivor, and get the numbers of the dead ranks. If there are
    fewer than `max_ranks` ranks at a later commit, new ranks join there, and `train` is also called
    again.

    This needs Open MPI's `mpirun --with-ft ulfm`. Otherwise, `train` is called once, and the death
    of a rank ends the job. Exceptions in `train` are raised, unless a death has caused them.

    Args:
        train: Function of the state that trains to the end.
        state: State from which training begins.
        max_ranks: Number of ranks up to which new ranks are started, at least `state.comm.size`;
            by default, none are started. A program with `max_ranks` may call `run` only once.

    Raises:
        ConfigError: An attribute of the state cannot be copied, `max_ranks` is invalid, or it is
            given although the launcher ends the job when a rank dies.

    Collective: yes. Blocking: yes.
    """
    if not isinstance(state, State):
        raise ConfigError(f"state is a {type(state).__name__}; pass mpiring.elastic.State(comm)")
    if not callable(train):
        raise ConfigError(f"train is a {type(train).__name__}; pass a function of the state")
    if max_ranks is not None:
        max_ranks = arguments.whole_number("max_ranks", max_ranks, state.comm.size)
        if not launch.survives_deaths():
            raise ConfigError(
                f"max_ranks={max_ranks}: this launcher ends the job when a rank dies, so none can "
                f"join; start it with Open MPI's mpirun --with-ft ulfm --prtemca "
                f"state_base_recoverable 1 --map-by :oversubscribe, or without max_ranks")
    # All ranks begin with equal states, so no barrier is needed. The commit also shows which
    # attributes cannot be copied if ranks cannot survive deaths.
    commits, joined = Commits(), joining.take(may_grow=max_ranks is not None)
    if joined is None:
        commits.add(state._attributes)
    if launch.survives_deaths():
        state._commits = commits
        try:
            return _Run(train, state, commits, max_ranks or 0, joined).result()
        finally:
            state._commits = state._grow = None
    del commits
    if state.comm.rank == 0:
        _log.warning("a rank that dies ends this job: to continue without it, use Open MPI's "
                     "mpirun --with-ft ulfm; otherwise, resume from a checkpoint")
    return train(state)


class _Run(Generic[T]):
    """Attempts to train, each with the survivors of the previous one, and with new ranks."""

    def __init__(self, train: Callable[[State], T], state: State, commits: Commits,
                 max_ranks: int, joined: "survivors.Survivors | None") -> None:
        self._train, self._state, self._commits = train, state, commits
        self._config, self._max_ranks = state.comm.config, max_ranks
        # All survivors agree on this, including those without a new communicator.
        self._survivors = joined or state.comm.survivors()
        self._is_new, self._message = joined is not None, ""
        self._grown: survivors.Survivors | None = None
        # Number of commits at the last growth, and time before which commits do not start ranks.
        self._growth, self._retry_s = 0, 0.0
        state._grow = self._grow if max_ranks else None

    def result(self) -> T:
        """Return the result of the first attempt in which no rank dies before its end."""
        if self._is_new:
            self._state.comm.abandon(ProcessFailedError(
                "this rank has joined others; use state.comm instead"))
            done, result = self._attempt(self._restore_and_train)
        else:
            done, result = self._attempt(self._train_to_end)
        while not self._survivors.agree(done):
            noticed_s = time.monotonic()
            if self._max_ranks and not self._survivors.agree(True):
                # Another rank has raised an exception. mpirun can hang if several ranks call
                # MPI_Abort, so this rank first waits until that rank ends.
                self._survivors.agree(True)
                launch.forks.leave(1)
            self._regroup()
            done, result = self._attempt(lambda: self._restore_and_train(noticed_s))
        return result  # type: ignore[return-value]

    def _regroup(self) -> None:
        """Continue with the survivors; replace dead ranks if possible."""
        number, before = self._survivors.comm.rank, self._survivors.size
        if self._grown is None:
            self._survivors = self._survivors.shrink()
            # Without a commit since the last growth, new ranks would probably also die.
            if self._max_ranks and self._survivors.agree(self._commits.count > self._growth):
                self._start_ranks(number)
        alive, self._survivors = self._survivors, self._grown or self._survivors
        new, self._grown = self._survivors.size - alive.size, None
        self._message = "" if alive.comm.rank else (
            f"{alive.size} of {before} ranks{f' and {new} new ones' * bool(new)} resume")

    def _start_ranks(self, number: int) -> None:
        """Start new ranks if possible; `number` becomes this rank's number among all ranks."""
        survivors = self._survivors
        try:
            with _limit(joining.JOINING_S):
                self._grown = survivors.grow(number, self._max_ranks, joining.command)
            self._growth = self._commits.count
        except TransportError as error:
            if survivors.comm.rank == 0:
                _log.warning("%d ranks continue without new ones: %s", survivors.size, error)
        self._retry_s = time.monotonic() + _RETRY_S

    def _grow(self) -> None:
        """Start new ranks at a commit, unless the last attempt was a short time ago.

        Collective: yes. Blocking: yes.
        """
        comm = self._state.comm
        if comm.size < self._max_ranks and comm.broadcast_object(time.monotonic() > self._retry_s):
            self._start_ranks(comm.rank)
            if self._grown is not None:
                raise NewRanksJoin

    def _attempt(self, action: Callable[[], T]) -> tuple[bool, T | None]:
        """Return whether an action completes, and its result."""
        try:
            return True, action()
        except NewRanksJoin as error:
            traceback.clear_frames(error.__traceback__)
        except Exception as error:
            # If a rank is lost, its death is the cause, even if the error has another type.
            if not isinstance(error, ProcessFailedError) and not self._survivors.has_lost_rank():
                self._end_job()
                raise
            _log.debug("rank %d of %d stops", self._state.comm.rank, self._survivors.size,
                       exc_info=True)
            traceback.clear_frames(error.__traceback__)
        self._state.comm.abandon(ProcessFailedError(
            "a rank has died or joined, and this communicator has ended; use state.comm instead"))
        self._survivors.leave()
        # This frees models and their buckets, whose hooks would use the dead communicator.
        gc.collect()
        return False, None

    def _end_job(self) -> None:
        """End the other ranks, because MPI_Abort after an exception ends only some of them."""
        if self._max_ranks:
            self._survivors.leave()
            self._state.comm.abandon(ProcessFailedError("another rank has raised an exception"))
            for _ in ("the result", "whether to continue"):
                self._survivors.agree(False)

    def _train_to_end(self) -> T:
        result = self._train(self._state)
        # A rank that finishes early must wait, because it must resume if another rank dies.
        _wait_for_all(self._state.comm, "end of training")
        return result

    def _restore_and_train(self, noticed_s: float = 0.0) -> T:
        state = self._state
        state.comm = Communicator(self._survivors.comm, config=self._config)
        # The default communicator from `init` includes dead ranks.
        world.make_default(state.comm)
        state._restore(self._commits)
        self._growth = self._commits.count
        launch.exits.unregister(self._leave)
        launch.exits.register(self._leave)
        if self._message:
            _log.warning("%s from %s; this took %.2f s", self._message, state._resume_point,
                         time.monotonic() - noticed_s)
        return self._train_to_end()

    def _leave(self) -> None:
        """End this process when all survivors have finished.

        The process does not call MPI_Finalize, which can hang after a death.
        """
        if launch.forks.in_fork:
            return
        with contextlib.suppress(MpiringError):
            _wait_for_all(self._state.comm, "exit")
        self._survivors.agree(True)
        launch.forks.leave(0)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End this process if a block lasts longer, as MPI may wait forever for a new rank."""
    def end() -> None:
        print(f"mpiring: new ranks have not joined for {seconds:g} s; one may have died before it "
              f"has started MPI. The job ends", file=sys.stderr)
        launch.forks.leave(1)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _wait_for_all(comm: Communicator, purpose: str) -> None:
    comm.run(Call(purpose), lambda collectives: collectives.barrier(), patient=True)
