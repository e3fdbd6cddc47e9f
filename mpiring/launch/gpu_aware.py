"""Tests in separate processes whether MPI accepts pointers to GPU memory.

A library that does not accept these pointers uses them as host pointers, and crashes. Some
libraries claim to accept them but do not. Therefore two processes under a separate launcher
exchange messages; they run this file as a module.
"""

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..config import Config
from ..errors import MissingDependencyError, MpiringError
from ..gpu import cuda
from ..gpu.device import Device
from ..gpu.interface import Event
from . import child_job
from .cache import Cache
from .environment import relevant_variables, variables_for_another_job
from .start import find_mpiexec

_log = logging.getLogger("mpiring")

# Two CUDA contexts and the start of MPI take a few seconds.
_LIMIT_S = 60.0
_PROOF = "mpiring: MPI takes GPU memory"
_PROBLEM = "mpiring: "
# Sizes of an eager message and of a rendezvous message, which MPI may send in several parts.
_SIZES = 64, 4 << 20
_MAX_LINES = 3


def takes_pointers(config: Config, library: str, index: int | None) -> bool:
    """Return whether MPI accepts pointers to GPU memory.

    The result comes from the setting `gpu_aware`, the cache, or a trial, which takes as long as the
    start of a job. A negative result is logged with its reason. Call this function on one rank, and
    send the result to the other ranks. Without CuPy, no trial is possible; the GPU's `index` is
    then None.
    """
    if config.gpu_aware != "auto":
        return config.gpu_aware == "yes"
    if index is None:
        return _report("to try it needs CuPy, and one of NVIDIA's GPUs")
    try:
        versions = cuda.versions()
    except MissingDependencyError as error:
        return _report(str(error))
    # Everything that the result depends on.
    variables = {name: value for name, value in relevant_variables().items()
                 if not name.startswith(("MPIRING_", "OMP_"))}
    key = f"{library} {versions} {os.uname().nodename} {json.dumps(variables)}"
    cache = Cache(config.tuning_folder, "gpu-aware-", key)
    problem = cache.read("problem")
    if not isinstance(problem, str):
        mpiexec = find_mpiexec()
        if mpiexec is None:
            return _report("there is no mpiexec to try it with")
        problem = trial_problem([mpiexec, "-n", "2", sys.executable, "-m", __name__, str(index)])
        # If the folder is not writable, each job runs a trial.
        with suppress(OSError):
            cache.write("problem", problem)
    return _report(problem)


def trial_problem(command: Sequence[str], limit_s: float = _LIMIT_S) -> str:
    """Run a command that starts two ranks of this module; return the problem, "" for none."""
    try:
        ended = child_job.run([*command, str(limit_s)], limit_s + child_job.GRACE_S,
                              env=variables_for_another_job())
    except OSError as error:
        return f"{command[0]} cannot be started: {error}"
    if ended.status is None:
        return f"a trial had not ended after {limit_s:g} s"
    if ended.status == 0 and ended.lines.count(_PROOF) == 2:
        return ""
    # Use the problems that the ranks reported, otherwise the last lines that the launcher printed.
    problems = list(dict.fromkeys(line.removeprefix(_PROBLEM) for line in ended.lines
                                  if line.startswith(_PROBLEM) and line != _PROOF))
    problems = problems or [line.strip() for line in child_job.last_lines(ended.lines, _MAX_LINES)]
    return f"a trial ended with status {ended.status}: {'; '.join(problems)}"


def _report(problem: str) -> bool:
    if problem:
        _log.warning("MPI is handed no pointers of GPU memory, data goes through the host's (%s); "
                     "if you know better, set MPIRING_GPU_AWARE=yes", problem)
    return not problem


def _exchange(device: Device) -> None:
    """Exchange numbers in GPU memory, like operations do; raise if the received ones are wrong."""
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    other = 1 - comm.rank
    for nbytes in _SIZES:
        sent, received = device.allocate(nbytes), device.allocate(nbytes)
        host = device.gpu.pinned(nbytes)
        _fill(host, comm.rank)
        _wait(device.to_device(host, sent))
        requests = [comm.Irecv([received, nbytes, MPI.BYTE], other),
                    comm.Isend([sent, nbytes, MPI.BYTE], other)]
        MPI.Request.Waitall(requests)
        _wait(device.to_host(received, host))
        arrived = host.copy()
        _fill(host, other)
        if not (arrived == host).all():
            raise MpiringError(f"{nbytes} bytes arrived changed")


def _fill(x: np.ndarray[Any, Any], rank: int) -> None:
    x[...] = np.arange(x.size, dtype=np.uint32).view(np.uint8)[:x.size] ^ (rank + 1)


def _wait(event: Event) -> None:
    while not event.test():
        pass


def _main(index: str, limit_s: str) -> None:
    # This ends the process even if MPI holds the interpreter lock.
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    try:
        _exchange(cuda.device(int(index)))
    except Exception as error:
        print(f"{_PROBLEM}{type(error).__name__}: {error}", flush=True)
        # Skip MPI_Finalize, which would wait for the other rank.
        os._exit(1)
    print(_PROOF, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
