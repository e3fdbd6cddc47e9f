"""Stops all ranks at the same step, on a signal or before the time limit of the job."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from ..arguments import number
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import ConfigError
from ..launch.environment import job_end
from ..world import or_world
from .checkpoint import Checkpoints
from .children import Shield
from .train_state import TrainState

_log = logging.getLogger("mpiring")

# After longer steps, `now` waits for the exchange, which takes about 0.1 ms.
_LONG_STEP_S = 0.25
# Decay of the longest step time, per step.
_DECAY = 0.98
# Multiples of the time of a checkpoint and of a step to reserve, because the next ones may take
# longer.
_SAVES, _STEPS = 2.0, 2.0
# Until a checkpoint is measured, this fraction of the time limit is reserved, up to a maximum. The
# third number is the minimum in all cases.
_UNKNOWN_SHARE, _UNKNOWN_S, _MIN_S = 0.05, 60.0, 0.5
# A signal is ignored if it repeats within this time: launchers forward signals that the ranks have
# also received directly.
_DUPLICATE_S = 1.0

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Stopping:
    """Decides for all ranks, at the same step, to stop.

        with Stopping(comm, time_limit_s=3600, checkpoints=state) as stopping:    # a TrainState
            for batch in batches:
                if stopping.now():
                    state.save(...)
                    break

    A signal to any rank stops all ranks. They also stop before `time_limit_s`, and before the end
    of the Slurm job if Slurm announces it. For the last steps and the checkpoint, the time of two
    steps and two checkpoints is reserved, as measured on the slowest rank.

    Each call of `now` starts an exchange in the background, which the next call completes, so ranks
    stop one step late. If a step takes longer than 0.25 s, `now` waits for the exchange.

    A signal also calls the previous Python handler. If the same signal arrives again, at least a
    second later, it has its previous effect: most signals end the process.

    Launchers and Slurm also send signals to the child processes of a rank. Processes that are
    started meanwhile by fork, multiprocessing or subprocess do not end on `signals`, except on
    SIGTERM, which `terminate()` sends. Workers of a PyTorch DataLoader, by fork or spawn, also
    ignore SIGTERM if their rank has received it. Create Stopping before they start.

    Args:
        comm: Communicator whose ranks train together; by default, all ranks.
        time_limit_s: Time limit in seconds from now; None for the limit of Slurm only.
        checkpoints: TrainState or Checkpoints whose save time is reserved.
        margin_s: Seconds to reserve instead of the measured time.
        signals: Signals that stop training.

    Attributes:
        reason: The reason to stop, such as "SIGUSR1 on rank 2"; "" while training continues.

    Raises:
        ConfigError: A number is negative, or this is not the main thread.

    Collective: no. Blocking: no.
    """

    def __init__(self, comm: Communicator | None = None, *, time_limit_s: float | None = None,
                 checkpoints: Checkpoints | TrainState | None = None, margin_s: float | None = None,
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
        # The first time is this rank's; the others are maxima over all ranks.
        self._step_s = self._slowest_step_s = self._slowest_save_s = 0.0
        self._waits = False
        self._called_s: float | None = None
        self._limits = _limits(time_limit_s)
        self._previous: dict[int, _Handler] = {}
        self._received_s: dict[int, float] = {}
        self._shield: Shield | None = None
        self.reason = ""
        try:
            for signum in signals:
                self._previous[signum] = signal.signal(signum, self._handle_signal)
        except (OSError, TypeError, ValueError) as exc:
            self._restore()
            raise ConfigError(
                f"rank {comm.rank}: signals={signals!r}: {exc}; pass signals that can be caught, "
                f"such as [signal.SIGUSR1], and create Stopping in the main thread") from exc
        # A fork must not keep the handler: CPython does not call it if `terminate()` sends SIGTERM
        # just before the fork waits.
        self._shield = Shield(self._previous, partial(self._restore_handlers, in_fork=True))
        if self._shield.exposed:
            _log.warning(
                "rank %d started processes %s before Stopping, and a signal that stops the rank "
                "may end them; create Stopping before data loaders start their workers",
                comm.rank, ", ".join(map(str, self._shield.exposed)))

    def now(self) -> bool:
        """Return whether to stop, the same on all ranks; call it once per step.

        Raises the same errors as `comm.allreduce`.

        Collective: yes. Blocking: if steps are long.
        """
        if self.reason:
            return True
        now_s = time.monotonic()
        if self._called_s is not None:
            self._step_s = max(now_s - self._called_s, _DECAY * self._step_s)
        self._called_s = now_s
        if self._complete_exchange():
            return True
        self._start_exchange()
        return self._waits and self._complete_exchange()

    def _start_exchange(self) -> None:
        """Start to exchange whether a rank must stop, and the maxima of the measured times."""
        save_s = 0.0 if self._checkpoints is None else self._checkpoints.save_s
        for name, end, total_s in self._limits:
            if time.time() >= end - self._margin(total_s):
                self._local_reason = self._local_reason or name
        x = np.array([bool(self._local_reason), self._step_s, save_s])
        self._handle = self._comm.iallreduce(x, op="max")

    def _complete_exchange(self) -> bool:
        """Complete the exchange; return whether any rank must stop."""
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

    def _margin(self, total_s: float) -> float:
        if self._margin_s is not None:
            return self._margin_s
        save_s = _SAVES * self._slowest_save_s or min(_UNKNOWN_SHARE * total_s, _UNKNOWN_S)
        return max(_MIN_S, save_s + _STEPS * self._slowest_step_s)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; if it repeats, restore and call the previous handler."""
        previous, now_s = self._previous[number], time.monotonic()
        since_s = now_s - self._received_s.setdefault(number, now_s)
        in_fork = os.getpid() != self._process
        if in_fork or since_s > _DUPLICATE_S:
            signal.signal(number, self._after(number, in_fork=in_fork))
            os.kill(os.getpid(), number)
        elif since_s == 0:
            if self._shield is not None:
                self._shield.received(number)
            self._local_reason = self._local_reason or signal.Signals(number).name
            if callable(previous):
                previous(number, frame)

    def close(self) -> None:
        """Restore the previous signal handlers.

        Collective: yes, if the ranks have not stopped. They complete the last exchange.
        """
        self._restore()
        self._complete_exchange()

    def _restore(self) -> None:
        shield, self._shield = self._shield, None
        if shield is not None:
            shield.close()
        self._restore_handlers(in_fork=False)
        # _previous stays, because a handler that was set later may still call _handle_signal.

    def _restore_handlers(self, *, in_fork: bool) -> None:
        for signum in self._previous:
            if signal.getsignal(signum) == self._handle_signal:
                signal.signal(signum, self._after(signum, in_fork=in_fork))

    def _after(self, number: int, *, in_fork: bool) -> "_Handler":
        """Return what handles a signal in place of `_handle_signal`.

        A fork ignores signals that only stop its rank. `terminate()` sends SIGTERM to a fork.
        """
        previous = self._previous[number]
        if previous is None:
            previous = signal.SIG_DFL
        ignores = in_fork and previous == signal.SIG_DFL and number != signal.SIGTERM
        return signal.SIG_IGN if ignores else previous

    def __enter__(self) -> "Stopping":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception, the other ranks may not take part.
        if error is None:
            self.close()
        else:
            self._restore()


def _limits(time_limit_s: float | None) -> list[tuple[str, float, float]]:
    """Return the name, the time, and the seconds from now of each time limit."""
    now, limits = time.time(), []
    if time_limit_s is not None:
        limits.append((f"the time limit of {time_limit_s:g} s", now + time_limit_s, time_limit_s))
    end = job_end()
    if end is not None and end > now:
        clock = time.strftime("%H:%M:%S", time.localtime(end))
        limits.append((f"the end of the Slurm job at {clock}", end, end - now))
    elif end is not None:
        _log.warning("SLURM_JOB_END_TIME has passed: the current time limit is unknown")
    return limits
