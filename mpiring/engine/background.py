"""Compiles sums in the background of a program that does not call `Communicator.prepare`."""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..jit import cache, copies, sums
from ..launch.cache import folder_of
from ..launch.environment import variables_for_another_job
from ..transport import compiled

if TYPE_CHECKING:
    import subprocess

_log = logging.getLogger("mpiring")
# Compiling pays off only in a program that has run for some time and made many calls.
_DELAY_S, _OPERATIONS = 2.0, 100
# Maximum number of characters of an error in the log.
_MAX_CHARS = 1000
# Interval at which ranks check for saved code, and time after which they stop.
_INTERVAL_S, _LIMIT_S = 0.5, 600.0
# The child inherits the rank's scheduling policy, which may be real-time, so it changes the policy.
# It lowers its priority before the imports, because imports also take CPU time. PR_SET_PDEATHSIG
# (1) makes Linux kill the child (9) when the rank ends.
_PROGRAM = """
import ctypes, os, sys
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(19)
ctypes.CDLL(None).prctl(1, 9)
from mpiring.engine import background
background.compile_and_save(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""


def may_compile(config: Config) -> bool:
    """Return whether this rank may compile and save code, and numba is installed."""
    return (config.rounds == "auto" and config.machine_code
            and folder_of(config.tuning_folder) is not None and find_spec("numba") is not None)


class BackgroundCompiler:
    """Compiles sums in a separate process, and loads the compiled code.

    The lowest rank of the node starts the process, for one dtype at a time. On each rank, a thread
    checks the folder at intervals until it can load the code.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        # Weak references, because a communicator may be dropped before its code is compiled.
        self._users: list[weakref.ref[Any]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def want(self, fast_calls: Any, op: Any, name: str) -> None:
        """Compile sums of a dtype if the program often uses them; try only once.

        The fast calls forget the noted calls when the code is loaded.
        """
        config, memory = fast_calls.group.config, fast_calls.memory
        if (memory is None or not compiled.is_compilable(op, name, len(memory.ranks))
                or compiled.code(op, name, len(memory.ranks)) is not None):
            return
        if (user := weakref.ref(fast_calls)) not in self._users:
            self._users.append(user)
        if name in self._names or self._stopping.is_set():
            return
        self._names.add(name)
        if may_compile(config):
            self._threads.append(threading.Thread(
                target=self._run,
                args=(name, folder_of(config.tuning_folder), len(memory.ranks), memory.rank == 0),
                name=f"mpiring compiles {name}", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End the process and the threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name: str, folder: Path, ranks: int, starts: bool) -> None:
        """Load the code once it is saved; then forget the noted calls, which do not use it."""
        with self._lock:
            child: subprocess.Popen[str] | None = None
            operations = self._operation_count()
            try:
                for passed_s in self._poll():
                    has_ended = child is not None and child.poll() is not None
                    cache.load_missing()
                    if compiled.code("sum", name, ranks) is not None:
                        for fast_calls in self._live_users():
                            fast_calls.forget()
                        return
                    if child is not None and has_ended:
                        status, output = child.returncode, child.communicate()[1]
                        child = None
                        raise OSError(status, output[-_MAX_CHARS:].strip())
                    if (starts and child is None and passed_s >= _DELAY_S
                            and self._operation_count() - operations >= _OPERATIONS):
                        child = _start_child(name, ranks, folder)
            except OSError as error:
                _log.info("sums of %s cannot be compiled in the background: %s", name, error)
            finally:
                if child is not None:
                    child.kill()
                    child.communicate()

    def _poll(self) -> Iterator[float]:
        """Yield the elapsed seconds at intervals, while the code may still be used."""
        began, passed_s = time.monotonic(), 0.0
        while passed_s < _LIMIT_S and not self._stopping.wait(_INTERVAL_S) and self._live_users():
            passed_s = time.monotonic() - began
            yield passed_s

    def _live_users(self) -> list[Any]:
        return [calls for user in tuple(self._users) if (calls := user()) is not None]

    def _operation_count(self) -> int:
        return sum(int(calls.group.sharing.counter.sequence) for calls in self._live_users())


def _start_child(name: str, ranks: int, folder: Path) -> "subprocess.Popen[str]":
    """Start a process that compiles sums, at the lowest priority."""
    import subprocess
    _log.info("compiling sums of %s in the background; comm.prepare() does it before the first "
              "step", name)
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name, str(ranks), os.fspath(folder)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
        env={**variables_for_another_job(), "OMP_NUM_THREADS": "1"})


def compile_and_save(name: str, ranks: int, folder: str) -> None:
    """Compile the same code as `Communicator.prepare`, in a process without MPI."""
    cache.configure(Path(folder))
    # Ranks stop checking once they can load the first code of this list, so it is compiled last.
    for compilation in reversed([*compilations(ranks, [name])]):
        compilation(compiles=True)


def compilations(ranks: int, dtypes: Sequence[str]) -> Iterator[Any]:
    """Yield functions that load or compile the code for dtypes and a number of ranks of a node."""
    for name in dtypes:
        yield partial(compiled.code, "sum", name, ranks)
        if name in sums.DTYPES:
            yield partial(sums.code, name)
    yield copies.code
