"""Lets all ranks stop at the same step: on a signal, or before the time of a job is over."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np

from ..arguments import number
from ..communicator import Communicator, refuse_other_than_communicators
from ..engine.handle import Handle
from ..errors import ConfigError
from ..launch.environment import job_end

_log = logging.getLogger("mpiring")

# A step as long as this can afford to wait for the answer: some 0.1 ms.
_LONG_STEP_S = 0.25
# How much of a long step is forgotten with each one after it.
_FADING = 0.98
# Of what a checkpoint took last time; the next one may take longer.
_SAVES, _STEPS = 2.0, 2.0
# Kept for a checkpoint while nobody knows how long one takes: this share of the time, at most so
# many seconds; and in any case so many.
_UNKNOWN_SHARE, _UNKNOWN_S, _LEAST_S = 0.05, 60.0, 0.5
# Within so many seconds, the same signal is the same wish: launchers pass on what the ranks have
# received themselves.
_TWICE_S = 1.0

_Handler = Callable[[int, FrameType | None], Any] | int | None


class _Saves(Protocol):
    """What is asked of Checkpoints: how long the last one took."""

    save_s: float


class Stopping:
    """Tells all ranks at the same step that they are to stop.

        with Stopping(comm, time_limit_s=3600, checkpoints=checkpoints) as stopping:
            for batch in batches:
                if stopping.now():
                    checkpoints.save(...)
                    break

    A signal to any rank stops all of them, and so does the end of the time: of `time_limit_s`, or
    of the Slurm job, where Slurm tells when that is. Of the time, as much is kept as two steps and
    two checkpoints take, as measured, on the slowest rank.

    Ranks ask each other in the background, from one call of `now` to the next: so they stop one
    step late. Where a step takes longer than 0.25 s, they wait for the answer.

    A signal also calls the Python handler that was there before. The same signal once more, a
    second later or after that, does what it did before: most end the process.

    Args:
        comm: The ranks.
        time_limit_s: From now on; None for no limit but Slurm's.
        checkpoints: Whose time to save is kept.
        margin_s: Time to keep instead.
        signals: Those that stop.

    Attributes:
        reason: Why all stop, such as "SIGUSR1 on rank 2"; "" before.

    Raises:
        ConfigError: A number cannot work, or this is not the main thread.

    Collective: no. Blocking: no.
    """

    def __init__(self, comm: Communicator, *, time_limit_s: float | None = None,
                 checkpoints: _Saves | None = None, margin_s: float | None = None,
                 signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        refuse_other_than_communicators(comm)
        for name, value in (("time_limit_s", time_limit_s), ("margin_s", margin_s)):
            if value is not None:
                number(name, value, lambda x: x >= 0, "seconds, 0 or more")
        if checkpoints is not None and not hasattr(checkpoints, "save_s"):
            raise ConfigError(f"checkpoints is a {type(checkpoints).__name__}; pass Checkpoints")
        self._comm, self._checkpoints, self._margin_s = comm, checkpoints, margin_s
        self._process = os.getpid()
        self._mine = ""
        self._handle: Handle[Any] | None = None
        # Of a step, and of a checkpoint; the same on all ranks but for the first.
        self._step_s = self._slowest_step_s = self._slowest_save_s = 0.0
        self._waits = False
        self._called: float | None = None
        self._ends = _ends(time_limit_s)
        self._before: dict[int, _Handler] = {}
        self._arrivals: dict[int, float] = {}
        self.reason = ""
        try:
            for one in signals:
                self._before[one] = signal.signal(one, self._arrived)
        except (OSError, TypeError, ValueError) as exc:
            self._restore()
            raise ConfigError(
                f"rank {comm.rank}: signals={signals!r}: {exc}; pass signals that can be caught, "
                f"as [signal.SIGUSR1], and make Stopping in the main thread") from exc

    def now(self) -> bool:
        """Return whether all ranks stop here; to be called once per step.

        Raises: as `comm.allreduce`.

        Collective: yes. Blocking: where steps are long.
        """
        if self.reason:
            return True
        self._measure_step()
        if self._handle is not None and self._answered():
            return True
        self._ask()
        return self._waits and self._answered()

    def _measure_step(self) -> None:
        now = time.monotonic()
        if self._called is not None:
            self._step_s = max(now - self._called, _FADING * self._step_s)
        self._called = now

    def _ask(self) -> None:
        """Begin to tell the other ranks whether this one wants to stop, and what it measured."""
        save_s = 0.0 if self._checkpoints is None else self._checkpoints.save_s
        if not self._mine:
            self._mine = self._out_of_time()
        x = np.array([bool(self._mine), self._step_s, save_s])
        self._handle = self._comm.iallreduce(x, op="max")

    def _answered(self) -> bool:
        """Return whether any rank wanted to stop when all were asked."""
        if self._handle is None:
            return False
        stop, self._slowest_step_s, self._slowest_save_s = self._handle.wait().tolist()
        self._handle = None
        self._waits = self._slowest_step_s >= _LONG_STEP_S
        if stop:
            reasons = self._comm.allgather_object(self._mine)
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            self.reason = f"{reasons[rank]} on rank {rank}"
        return bool(stop)

    def _out_of_time(self) -> str:
        """Return which time is nearly over, or ""."""
        for what, end, total_s in self._ends:
            if time.time() >= end - self._margin(total_s):
                return what
        return ""

    def _margin(self, total_s: float) -> float:
        """Return how many seconds the last steps and a checkpoint will take."""
        if self._margin_s is not None:
            return self._margin_s
        save_s = _SAVES * self._slowest_save_s or min(_UNKNOWN_SHARE * total_s, _UNKNOWN_S)
        return max(_LEAST_S, save_s + _STEPS * self._slowest_step_s)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; where that was done before, let it do what it always did."""
        before, now = self._before[number], time.monotonic()
        since_s = now - self._arrivals.setdefault(number, now)
        # A worker that was forked meanwhile is to end, too.
        if os.getpid() != self._process or since_s > _TWICE_S:
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
        elif since_s == 0:
            self._mine = self._mine or signal.Signals(number).name
            if callable(before):
                before(number, frame)

    def close(self) -> None:
        """Let signals do what they did before.

        Collective: yes, if the ranks have not stopped: they wait for the last answer.
        """
        self._restore()
        if self._handle is not None:
            self._answered()

    def _restore(self) -> None:
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._arrived:
                signal.signal(signum, signal.SIG_DFL if before is None else before)
        self._before = {}

    def __enter__(self) -> "Stopping":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks do not come.
        if error is None:
            self.close()
        else:
            self._restore()


def _ends(time_limit_s: float | None) -> list[tuple[str, float, float]]:
    """Return what ends when, and how long that is from now."""
    now, found = time.time(), []
    if time_limit_s is not None:
        found.append((f"the time limit of {time_limit_s:g} s", now + time_limit_s, time_limit_s))
    end = job_end()
    if end is not None and end > now:
        clock = time.strftime("%H:%M:%S", time.localtime(end))
        found.append((f"the end of the Slurm job at {clock}", end, end - now))
    elif end is not None:
        _log.warning("SLURM_JOB_END_TIME is over: the time limit was changed, and is not known")
    return found
