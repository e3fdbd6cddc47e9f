"""Runs programs and functions one after the other on ranks that start and import PyTorch once.

There is one job for each number of ranks, in each of pytest-xdist's workers. A program must clean
up; programs/served_rank.py checks this. If a program kills a rank, hangs or does not clean up, its
job ends, and the next program gets a new job.
"""

import contextlib
import inspect
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from launching import HANG_S, PROGRAMS, ROOT, Ended, start

# More would waste memory: successive tests mostly need the same number of ranks.
_MAX_JOBS = 4
# Seconds for which the ranks that are ready wait for the others after a rank has died.
_LAST_WORDS_S = 10
_jobs: dict[int, "_Job"] = {}
# Cost of starting jobs, with the imports of their ranks: seconds times ranks.
spent = {"rank_s": 0.0}


def run(ranks, *command, timeout_s=HANG_S, cwd=ROOT, **variables):
    """Run `python command…` on some ranks to its end, as `launching.launch` does.

    Not for programs that test the start or end of processes, signals or settings of MPI.
    """
    job = _jobs.pop(ranks, None) or _Job(ranks)
    # The last job was used last.
    _jobs[ranks] = job
    while len(_jobs) > _MAX_JOBS:
        _jobs.pop(next(iter(_jobs))).end()
    kept = False
    try:
        ended = job.run(list(map(str, command)), timeout_s, cwd, variables)
        kept = job.serves
    finally:
        if not kept:
            _jobs.pop(ranks).end()
    return ended


def call(ranks, function, *arguments, **variables):
    """Return what `function(comm, *arguments)` returns on each rank, in rank order.

    If a rank raises, the test fails with that rank's number and traceback.

    Args:
        ranks: Number of ranks.
        function: Function of a test module. It may not be nested, because the ranks import it.
        arguments: Arguments that can be pickled, as must the results.
        variables: Environment variables.
    """
    with tempfile.TemporaryDirectory(prefix="mpiring-tests-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, arguments)))
        ended = run(ranks, PROGRAMS / "called.py", function.__module__,
                    inspect.getfile(function), folder, **variables)
        if ended.status:
            pytest.fail(f"{function.__name__} failed on {ranks} ranks:\n{ended.output}")
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes())
                for rank in range(ranks)]


def end_all():
    """End all jobs of this process."""
    while _jobs:
        _jobs.popitem()[1].end()


class _Job:
    """Ranks that wait for programs.

    Args:
        ranks: Number of ranks.

    Attributes:
        serves: True if all ranks live, and wait for the next program.
    """

    def __init__(self, ranks):
        self._folder = Path(tempfile.mkdtemp(prefix="mpiring-tests-"))
        self._programs, self._sockets, self.serves = 0, [], True
        address, began = self._folder / "socket", time.monotonic()
        with socket.socket(socket.AF_UNIX) as listener, \
                open(self._folder / "job", "w") as output:
            listener.bind(str(address))
            listener.listen(ranks)
            listener.settimeout(HANG_S)
            self._process = start(ranks, PROGRAMS / "served_rank.py", address, stdout=output)
            while len(self._sockets) < ranks:
                self._sockets.append(listener.accept()[0])
        self._unread = {connection: b"" for connection in self._sockets}
        spent["rank_s"] += ranks * (time.monotonic() - began)

    def run(self, command, timeout_s, cwd, variables):
        self._programs += 1
        output = self._folder / f"output-{self._programs}"
        output.touch()
        task = {"command": command, "cwd": str(cwd), "output": str(output),
                "variables": {name: str(value) for name, value in variables.items()}}
        began = time.monotonic()
        with contextlib.suppress(OSError):
            # If a rank has died meanwhile, this is noticed below.
            for connection in self._sockets:
                connection.sendall(json.dumps(task).encode() + b"\n")
        replies, died = self._replies(began + timeout_s)
        seconds = time.monotonic() - began
        text = output.read_text(errors="replace")
        output.unlink()
        self.serves = len(replies) == len(self._sockets) and not any(
            reply["worn"] or reply["left"] for reply in replies)
        if died:
            # The job's output has the messages of MPI and the launcher.
            status = self._ended() or 1
            return Ended(status, text + (self._folder / "job").read_text(errors="replace"), seconds)
        if len(replies) < len(self._sockets):
            pytest.fail(f"{command} hung for {timeout_s} s on {len(self._sockets)} ranks, of which "
                        f"{len(replies)} have ended:\n{text[-5000:]}")
        left = [f"rank {reply['rank']} {each}" for reply in replies for each in reply["left"]]
        status = max(reply["status"] for reply in replies)
        if left and not status:
            pytest.fail(f"{command} left something behind: {'; '.join(left)}\n{text[-5000:]}")
        return Ended(status, text, seconds)

    def _replies(self, deadline):
        """Return what the ranks report, and whether one of them has died."""
        replies, died, waiting = [], False, list(self._sockets)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in select.select(waiting, [], [], left)[0]:
                try:
                    received = connection.recv(1 << 16)
                except OSError:
                    received = b""
                self._unread[connection] += received
                if not received or self._unread[connection].endswith(b"\n"):
                    waiting.remove(connection)
                if not received:
                    if not died:
                        deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
                    died = True
                elif self._unread[connection].endswith(b"\n"):
                    replies.append(json.loads(self._unread[connection]))
                    self._unread[connection] = b""
        return replies, died

    def end(self):
        """End the ranks, which end by themselves if this process has ended."""
        for connection in self._sockets:
            connection.close()
        self._ended(_LAST_WORDS_S if self.serves else 0)
        shutil.rmtree(self._folder)

    def _ended(self, patience_s=_LAST_WORDS_S):
        """Wait until mpiexec ends, or kill it if it does not; return the status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()
