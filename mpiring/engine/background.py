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
from ..transport.layout import COUNTER_SEQUENCE

if TYPE_CHECKING:
    import subprocess

_log = logging.getLogger("mpiring")
# Compiling pays off only in a program that has run for some time and made many calls.
_DELAY_S, _OPERATIONS = 2.0, 100
# Maximum number of characters of an error in the log.
_MAX_CHARS = 1000
# Interval at which ranks check for saved code, and time after which they stop.
_INTERVAL_S, _LIMIT_S = 0.5, 600.0
# The priority is set before the imports, because they also take CPU time. The scheduling policy is
# set because the child inherits the rank's, which may be real-time. PR_SET_PDEATHSIG (1) makes
# Linux kill the child (9) when the rank ends.
_PROGRAM = """
import ctypes, os, sys
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(19)
ctypes.CDLL(None).prctl(1, 9)
from mpiring.engine import background
background.compile_and_save(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""


def may_compile(config: Config) -> bool:
    """Return whether this rank is allowed to compile code and to save it, and has numba."""
    return (config.rounds == "auto" and config.machine_code
            and folder_of(config.tuning_folder) is not None and find_spec("numba") is not None)


class BackgroundCompiler:
    """Starts a process that compiles sums, and loads their code once it is saved.

    The lowest rank of the node starts the process, for one dtype at a time. Each rank loads the
    code in a thread, which checks the folder at intervals, and then ends.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        # A communicator may be dropped meanwhile.
        self._users: list[weakref.ref[Any]] = []
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()
        self._stopping = threading.Event()

    def want(self, fast_calls: Any, op: Any, name: str) -> None:
        """Compile sums of a dtype if a program often needs them; there is only one attempt.

        Args:
            fast_calls: FastCalls of a group, which forget their calls when the code is loaded.
            op: Op of a call.
            name: Name of its dtype.
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
        """Load the code of sums once it is saved, and forget calls that do not use it."""
        with self._turn:
            child: subprocess.Popen[str] | None = None
            operations = self._operations()
            try:
                for passed_s in self._checks():
                    has_ended = child is not None and child.poll() is not None
                    cache.load_missing()
                    if compiled.code("sum", name, ranks) is not None:
                        for fast_calls in self._alive():
                            fast_calls.forget()
                        return
                    if child is not None and has_ended:
                        status, output = child.returncode, child.communicate()[1]
                        child = None
                        raise OSError(status, output[-_MAX_CHARS:].strip())
                    if (starts and child is None and passed_s >= _DELAY_S
                            and self._operations() - operations >= _OPERATIONS):
                        child = _started(name, ranks, folder)
            except OSError as error:
                _log.info("sums of %s cannot be compiled in the background: %s", name, error)
            finally:
                if child is not None:
                    child.kill()
                    child.communicate()

    def _checks(self) -> Iterator[float]:
        """Yield the seconds that have passed, at intervals, while a check makes sense."""
        began, passed_s = time.monotonic(), 0.0
        while passed_s < _LIMIT_S and not self._stopping.wait(_INTERVAL_S) and self._alive():
            passed_s = time.monotonic() - began
            yield passed_s

    def _alive(self) -> list[Any]:
        return [calls for user in tuple(self._users) if (calls := user()) is not None]

    def _operations(self) -> int:
        return sum(int(fast_calls.group.sharing.counter.words[COUNTER_SEQUENCE])
                   for fast_calls in self._alive())


def _started(name: str, ranks: int, folder: Path) -> "subprocess.Popen[str]":
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
    """Compile the same code as `Communicator.prepare`, in a process without MPI.

    Args:
        name: Name of a dtype.
        ranks: Number of ranks.
        folder: Folder in which to save the code.
    """
    cache.configure(Path(folder))
    # Ranks stop checking once the first of these is loaded, so it is compiled last.
    for compilation in reversed([*compilations(ranks, [name])]):
        compilation(compiles=True)


def compilations(ranks: int, dtypes: Sequence[str]) -> Iterator[Any]:
    """Yield functions that load or compile the code for dtypes and a number of ranks of a node."""
    for name in dtypes:
        yield partial(compiled.code, "sum", name, ranks)
        if name in sums.DTYPES:
            yield partial(sums.code, name)
    yield copies.code
