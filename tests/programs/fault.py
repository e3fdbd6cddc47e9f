"""Goes wrong in the way that its argument names, on one rank of several."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import mpiring
from mpiring.asynchronous import PairAveraging, ParameterServer
from mpiring.numpy import DataParallel
from mpiring.optim import SGD
from mpiring.transport import waiting

fault = sys.argv[1]
comm = mpiring.init()
odd = comm.rank == comm.size - 1
x = np.ones(1000, np.float32)
comm.allreduce(x)
# The call is prepared for the next time.
is_compiled = any(call.node_call and call.node_call.code for call in comm._group.prepared.values())
print(f"rank {comm.rank} is ready{', compiled' * is_compiled}", flush=True)


def stop():
    """Stop this process, but not for ever, whatever becomes of the job."""
    subprocess.Popen(["sh", "-c", f"sleep 30; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


if fault == "raise":
    if odd:
        raise ValueError("a bug in the user's code")
    comm.allreduce(x)
elif fault == "raise beside a stopped rank":
    pid = comm.broadcast_object(os.getpid())
    if not odd:
        stop()
    while "stopped" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)
    raise ValueError("a bug in the user's code")
elif fault == "shape":
    comm.allreduce(np.ones(1000 - odd, np.float32))
elif fault == "missing call":
    # On a busy machine, answers are late.
    waiting.ANSWER_S = 10.0
    shapes = {"w1": (30, 30), "b1": (30,), "w2": (30, 30), "b2": (30,)}
    dp = DataParallel({name: np.ones(shape) for name, shape in shapes.items()}, comm,
                      bucket_bytes=8000)
    for name in reversed(shapes):
        if odd:
            time.sleep(60)
        dp.ready(name)
    dp.wait()
elif fault == "leaves early":
    if odd:
        sys.exit(3)
    comm.allreduce(x)
elif fault == "leaves a server":
    with ParameterServer({"w": x}, comm, optimizer=SGD, staleness=None) as server:
        if odd:
            sys.exit(3)
        server.step({"w": x})
elif fault == "leaves pairs":
    pairs = PairAveraging({"w": x}, comm)
    if not odd:
        pairs.close()
elif fault == "background":
    # The engine's thread finds out while the main thread computes for long.
    comm.iallreduce(np.ones(1_000_000 - odd, np.float32))
    time.sleep(60)
elif fault == "wait for ever":
    if not odd:
        comm.allreduce(x)
    # Whoever started it ends it, however long a busy machine takes to get there.
    time.sleep(3600)
elif fault.startswith(("killed", "interrupt")):
    is_killed, in_place = fault.startswith("killed"), fault.endswith("in place")
    y = comm.empty(100_000) if in_place else x
    call = comm.allreduce if in_place else comm.reduce_scatter if is_killed else comm.broadcast
    for _ in range(3):
        y[:] = 1
        call(y)
    if odd:
        os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGINT)
    call(y)
    comm.barrier()
elif fault == "full":
    if odd:
        sys.stdout, sys.stderr = open("/dev/full", "w"), open("/dev/full", "w")
        print("unwritten")
        raise ValueError("on a full disk")
    time.sleep(60)
elif fault == "stopped":
    if odd:
        stop()
elif fault == "drift":
    params = {name: np.ones(1000, np.float32) for name in "vw"}
    dp = DataParallel(params, comm)
    for step in range(10):
        params["w"].view(np.uint8)[77] ^= odd and step == 1
        for name in params:
            dp.ready(name)
        dp.wait()
else:
    raise SystemExit(f"unknown fault {fault!r}")
