"""Stops all ranks at the same step: on a signal, or before the time of a job is over."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np

from ..arguments import number
from ..communicator import Communicator, or_world
from ..engine.handle import Handle
from ..errors import ConfigError
from ..launch.environment import job_end

_log = logging.getLogger("mpiring")

# Steps from this length on wait for the answer, which takes about 0.1 ms.
_LONG_STEP_S = 0.25
# A long step fades by this factor with each step after it.
_FADING = 0.98
# Reserved, in multiples of the last checkpoint and step: the next may take longer.
_SAVES, _STEPS = 2.0, 2.0
# Reserved while no checkpoint was measured: a share of the time, and at most so many seconds. The
# last is reserved in any case.
_UNKNOWN_SHARE, _UNKNOWN_S, _LEAST_S = 0.05, 60.0, 0.5
# Within this time the same signal is the same wish: launchers pass on signals that the ranks have
# received themselves.
_TWICE_S = 1.0

_Handler = Callable[[int, FrameType | None], Any] | int | None


class _Saves(Protocol):
    """The part of Checkpoints and TrainState that is needed: the time of the last `save`."""

    save_s: float


class Stopping:
    """Decides for all ranks, at the same step, to stop.

        with Stopping(comm, time_limit_s=3600, checkpoints=state) as stopping:    # a TrainState
            for batch in batches:
                if stopping.now():
                    state.save(...)
                    break

    A signal to any rank stops all ranks. So does the end of `time_limit_s`, or of the Slurm job if
    Slurm announces it. The measured time of two steps and two checkpoints on the slowest rank is
    reserved.

    Ranks ask each other in the background, from one call of `now` to the next, so they stop one
    step late. If a step takes longer than 0.25 s, they wait for the answer.

    A signal also calls the earlier Python handler. The same signal again, at least a second later,
    has the effect that it had before: most signals end the process.

    Args:
        comm: Communicator whose ranks train together; by default, all ranks.
        time_limit_s: Seconds from now on; None for no limit except Slurm's.
        checkpoints: A TrainState or Checkpoints, whose time to save is reserved.
        margin_s: Seconds to reserve instead of the measured time.
        signals: Signals that stop the training.

    Attributes:
        reason: The reason to stop, such as "SIGUSR1 on rank 2"; "" before.

    Raises:
        ConfigError: A number is wrong, or this is not the main thread.

    Collective: no. Blocking: no.
    """

    def __init__(self, comm: Communicator | None = None, *, time_limit_s: float | None = None,
                 checkpoints: _Saves | None = None, margin_s: float | None = None,
                 signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        comm = or_world(comm)
        for name, value in (("time_limit_s", time_limit_s), ("margin_s", margin_s)):
            if value is not None:
                number(name, value, lambda x: x >= 0, "seconds, 0 or more")
        if checkpoints is not None and not hasattr(checkpoints, "save_s"):
            raise ConfigError(f"checkpoints is a {type(checkpoints).__name__}; pass Checkpoints")
        self._comm, self._checkpoints, self._margin_s = comm, checkpoints, margin_s
        self._process = os.getpid()
        self._local_reason = ""
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
            for signum in signals:
                self._before[signum] = signal.signal(signum, self._arrived)
        except (OSError, TypeError, ValueError) as exc:
            self._restore()
            raise ConfigError(
                f"rank {comm.rank}: signals={signals!r}: {exc}; pass signals that can be caught, "
                f"as [signal.SIGUSR1], and make Stopping in the main thread") from exc

    def now(self) -> bool:
        """Return whether all ranks stop here; call it once per step.

        Raises: as `comm.allreduce`.

        Collective: yes. Blocking: if steps are long.
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
        """Begin to exchange which ranks are to stop, and what they measured."""
        save_s = 0.0 if self._checkpoints is None else self._checkpoints.save_s
        if not self._local_reason:
            self._local_reason = self._out_of_time()
        x = np.array([bool(self._local_reason), self._step_s, save_s])
        self._handle = self._comm.iallreduce(x, op="max")

    def _answered(self) -> bool:
        """Return whether any rank was to stop at the last exchange."""
        if self._handle is None:
            return False
        stop, self._slowest_step_s, self._slowest_save_s = self._handle.wait().tolist()
        self._handle = None
        self._waits = self._slowest_step_s >= _LONG_STEP_S
        if stop:
            reasons = self._comm.allgather_object(self._local_reason)
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            self.reason = f"{reasons[rank]} on rank {rank}"
        return bool(stop)

    def _out_of_time(self) -> str:
        """Return the name of a time that is nearly over, or ""."""
        for name, end, total_s in self._ends:
            if time.time() >= end - self._margin(total_s):
                return name
        return ""

    def _margin(self, total_s: float) -> float:
        """Return the seconds to reserve for the last steps and a checkpoint."""
        if self._margin_s is not None:
            return self._margin_s
        save_s = _SAVES * self._slowest_save_s or min(_UNKNOWN_SHARE * total_s, _UNKNOWN_S)
        return max(_LEAST_S, save_s + _STEPS * self._slowest_step_s)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the second time, do what it did before."""
        before, now = self._before[number], time.monotonic()
        since_s = now - self._arrivals.setdefault(number, now)
        # A forked worker also ends.
        if os.getpid() != self._process or since_s > _TWICE_S:
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
        elif since_s == 0:
            self._local_reason = self._local_reason or signal.Signals(number).name
            if callable(before):
                before(number, frame)

    def close(self) -> None:
        """Restore the earlier handlers of signals.

        Collective: yes, if the ranks have not stopped. They then wait for the last exchange.
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception the other ranks may not call.
        if error is None:
            self.close()
        else:
            self._restore()


def _ends(time_limit_s: float | None) -> list[tuple[str, float, float]]:
    """Return what ends, when, and in how many seconds from now."""
    now, ends = time.time(), []
    if time_limit_s is not None:
        ends.append((f"the time limit of {time_limit_s:g} s", now + time_limit_s, time_limit_s))
    end = job_end()
    if end is not None and end > now:
        clock = time.strftime("%H:%M:%S", time.localtime(end))
        ends.append((f"the end of the Slurm job at {clock}", end, end - now))
    elif end is not None:
        _log.warning("SLURM_JOB_END_TIME is over: the time limit was changed, and is unknown")
    return ends
