"""Keeps the signals that stop a rank from ending its child processes.

Launchers and Slurm also send a signal to the children of a rank, such as data loader workers. A
rank whose worker has died cannot write its checkpoint.

This file replaces functions of CPython and of PyTorch's DataLoader. Verified with Python 3.11 and
PyTorch 2.13. If a later version starts processes by other functions, they are not protected, and
the tests of Stopping fail.
"""

import _posixsubprocess
import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, BinaryIO

from ..files import regular
from ..launch import forks
from ..launch.environment import children_of, has_default_action

# A worker that receives SIGTERM waits this long for its rank to also receive it. The rank notices
# signals between two Python instructions, of which one may take seconds.
_PATIENCE_S, _PAUSE_S = 10.0, 0.01
# Content of the record while the rank has received nothing; after the end, the record is empty.
_ACTIVE, _RECORD_BYTES = b"\0", 1 << 16

_WorkerInit = Callable[[int], object] | None


class Shield:
    """Protects children that are started from now on, until it is closed.

    A process inherits the signals that are blocked when it is started, even if it executes another
    program. The shield blocks the signals for this moment; this thread receives them after it.
    Forks do not execute another program: they change their handlers.

    SIGTERM is not blocked, because `terminate()` of subprocess and multiprocessing sends it. Only
    the workers of PyTorch's DataLoader ignore it, if their rank has received it as well.

    `exposed` has the numbers of the children that were started before, and that a signal would end.
    """

    def __init__(self, signals: Collection[int], fork: Callable[[], None]) -> None:
        self.fork = fork
        forks.gates.add(self)
        self._blocked = {*signals} - {signal.SIGTERM}
        self.exposed = [pid for pid in children_of(os.getpid())
                        if any(has_default_action(number, pid) for number in self._blocked)]
        self._open = True
        # Functions of CPython that start all processes of subprocess and multiprocessing.
        self._starters = [(module, name, getattr(module, name))
                          for module, name in ((_posixsubprocess, "fork_exec"),
                                               (subprocess, "_fork_exec")) if hasattr(module, name)]
        for module, name, start in self._starters:
            setattr(module, name, partial(self._start, start))
        self._loaders = (DataLoaders() if signal.SIGTERM in signals
                         and "torch.utils.data" in sys.modules else None)

    def _start(self, start: Callable[..., int], *arguments: object) -> int:
        """Start a process that inherits blocked signals, and return its number."""
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked if self._open else ())
        try:
            return start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def received(self, number: int) -> None:
        """Tell workers that the rank has received a signal."""
        if self._loaders is not None:
            self._loaders.received(number)

    def close(self) -> None:
        """Stop protecting new children."""
        self._open = False
        for module, name, start in self._starters:
            # Another shield may have been opened since.
            if getattr(getattr(module, name), "func", None) == self._start:
                setattr(module, name, start)
        if self._loaders is not None:
            self._loaders.close()


class DataLoaders:
    """Lets new workers of PyTorch's DataLoader ignore SIGTERM if their rank has received it.

    PyTorch gives its workers a handler that ends them, unless the rank has sent the signal. The
    function `worker_init_fn` of a loader is called after that. The rank writes the signals that it
    receives to a file in memory, which workers can open.
    """

    def __init__(self) -> None:
        self._pid, self._record = os.getpid(), os.memfd_create("mpiring signals")
        os.write(self._record, _ACTIVE)
        self._has_received = False
        self._path = f"/proc/{self._pid}/fd/{self._record}"
        self._class: Any = sys.modules["torch.utils.data"].DataLoader
        self._previous = vars(self._class).get("worker_init_fn")
        self._class.worker_init_fn = self
        # At the exit, multiprocessing terminates workers and waits for them.
        atexit.register(self._end)

    def __get__(self, loader: Any, owner: object = None) -> Any:
        return self if loader is None else partial(_begin, self._path, vars(loader).get(
            "worker_init_fn"))

    def __set__(self, loader: Any, function: _WorkerInit) -> None:
        vars(loader)["worker_init_fn"] = function

    def received(self, number: int) -> None:
        """Tell workers that the rank has received a signal."""
        self._has_received = True
        os.write(self._record, bytes([number]))

    def close(self) -> None:
        """Stop changing new workers.

        Workers may be late to handle a signal that the rank has received. They ignore SIGTERM
        until the rank exits.
        """
        if vars(self._class).get("worker_init_fn") is self:
            del self._class.worker_init_fn
            if self._previous is not None:
                self._class.worker_init_fn = self._previous
        if not self._has_received:
            self._end()

    def _end(self) -> None:
        """Let SIGTERM end workers again."""
        atexit.unregister(self._end)
        # A fork shares the file with its rank.
        if os.getpid() == self._pid:
            os.ftruncate(self._record, 0)
            os.close(self._record)


def _begin(path: str, function: _WorkerInit, worker: int) -> None:
    """Begin a worker: handle SIGTERM, and call the function of the loader's user."""
    # The rank may have left Stopping since.
    with contextlib.suppress(OSError):
        record = open(path, "rb", buffering=0, opener=regular)
        signal.signal(signal.SIGTERM, partial(_end_unless_stopping, record))
    if function is not None:
        function(worker)


def _end_unless_stopping(record: BinaryIO, number: int, frame: object) -> None:
    """End this worker, unless its rank has received the same signal and is stopping."""
    end_s = time.monotonic() + _PATIENCE_S
    while (received := os.pread(record.fileno(), _RECORD_BYTES, 0)) and time.monotonic() < end_s:
        if number in received:
            return
        time.sleep(_PAUSE_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
