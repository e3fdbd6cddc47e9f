"""Trains a model whose result NumPy can tell, checks every sum, and lets ranks be killed.

Usage: elastic_training.py FOLDER STEPS WHAT [FATES [MAX_RANKS]]

Each rank writes its process id to FOLDER, so that whoever watches can kill it, and appends a
line to FOLDER/log when it begins and when it has made its first step after that. FATES are
`RANK:PLACE:STEP`, separated by commas: that rank kills itself there, unless it is a new one.
"""

import faulthandler
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring import elastic
from mpiring.numpy import DataParallel

FOLDER, STEPS, WHAT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
FATES = [fate.split(":") for fate in sys.argv[4].split(",")] if len(sys.argv) > 4 else []
MAX_RANKS = int(sys.argv[5]) if len(sys.argv) > 5 else None
IS_NEW = MPI.Comm.Get_parent() != MPI.COMM_NULL
SHAPES = {"w1": (300, 41), "b1": (41,), "w2": (41, 100), "b2": (7,)}
SAMPLES = 3     # per rank and step
COMMIT_EVERY = 3
MINE = 0        # the rank that this process had at first


def gradients(params, position):
    """Return what a rank that begins at a sample calculates: exact in float64, and its own."""
    of_samples = sum(range(position, position + SAMPLES)) % 1000
    return {name: np.full(shape, of_samples + place, np.float64) + (params[name] > 0)
            for place, (name, shape) in enumerate(SHAPES.items())}


def update(params, means):
    for name in params:
        params[name] -= np.float64(2.0 ** -7) * means[name]


def expected(history):
    """Return the parameters after steps of so many ranks each."""
    params = {name: np.ones(shape) for name, shape in SHAPES.items()}
    position = 0
    for size in history:
        each = [gradients(params, position + rank * SAMPLES) for rank in range(size)]
        update(params, {name: sum(gradient[name] for gradient in each) / size for name in SHAPES})
        position += size * SAMPLES
    return params, position


def log(text):
    with (FOLDER / "log").open("a") as file:
        file.write(f"{time.time():.4f} {MINE} {text}\n")


def die(place, step):
    if not IS_NEW and [str(MINE), place, str(step)] in FATES:
        log("dies")
        os.kill(os.getpid(), signal.SIGKILL)


def check(right, name):
    if not right:
        print(f"WRONG {name}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def collective(comm, step):
    """Run one more collective, whose result is known."""
    kind, _, option = WHAT.partition(" ")
    p, r, n = comm.size, comm.rank, 12000
    x = comm.empty(n) if option.endswith("window") else np.empty(n, np.float32)
    x[:] = np.arange(n) % 100 + r + step % 50
    total = p * (np.arange(n) % 100 + step % 50) + p * (p - 1) // 2
    if kind == "allreduce":
        comm.allreduce(x, algorithm=option.split()[0])
        check((x == total).all(), WHAT)
    elif kind == "iallreduce":
        y = x.copy()
        for handle in [comm.iallreduce(array, algorithm=option.split()[0]) for array in (x, y)]:
            handle.wait()
        check((x == total).all() and (y == total).all(), WHAT)
    elif kind == "reduce_scatter":
        chunk = slice(r * n // p, (r + 1) * n // p)
        check((comm.reduce_scatter(x) == total[chunk]).all(), WHAT)
    elif kind == "allgather":
        comm.allgather(x)
        for rank in range(p):
            chunk = slice(rank * n // p, (rank + 1) * n // p)
            check((x[chunk] == (np.arange(n) % 100 + rank + step % 50)[chunk]).all(), WHAT)
    elif kind == "broadcast":
        comm.broadcast(x, root=step % p)
        check((x == np.arange(n) % 100 + step % p + step % 50).all(), WHAT)
    elif kind == "objects":
        check(comm.allgather_object((r, step)) == [(rank, step) for rank in range(p)], WHAT)
    elif kind == "barrier":
        comm.barrier()
    elif kind == "raise" and step == 40 and r == p - 1:
        raise ValueError("a bug in the user's code")


def train(state):
    global MINE
    comm = state.comm
    if IS_NEW:
        MINE = comm.rank
    (FOLDER / f"pid{MINE}").write_text(str(os.getpid()))
    log(f"begins {state.step} {comm.size}")
    # By default of the survivors.
    dp = DataParallel(state.params, bucket_bytes=40_000)
    assert dp.comm is comm
    first = state.step
    while state.step < STEPS:
        die("compute", state.step)
        # So that ranks wait for each other, now here, now there.
        time.sleep(random.choice((0, 0, 0.002, 0.004 if WHAT != "compute" else 0.05)))
        grads = gradients(state.params, state.position + comm.rank * SAMPLES)
        for name in reversed(SHAPES):
            dp.grads[name][...] = grads[name]
            dp.ready(name)
        die("averaging", state.step)
        dp.wait()
        update(state.params, dp.grads)
        collective(comm, state.step)
        state.position += comm.size * SAMPLES
        state.history = [*state.history, comm.size]
        state.step += 1
        if state.step % (1 if WHAT == "commit" else COMMIT_EVERY) == 0:
            die("commit", state.step)
            state.commit()
        if state.step == first + 1:
            log(f"goes on {state.step} {comm.size}")
    die("end", state.step)
    return comm.size


def main():
    global MINE
    faulthandler.dump_traceback_later(200, exit=True)
    comm = mpiring.init()
    MINE = comm.rank
    params = {name: np.ones(shape) for name, shape in SHAPES.items()}
    state = elastic.State(comm, params=params, position=0, history=[])
    if WHAT == "commit":
        state.more = np.zeros(1 << 20)
    size = elastic.run(train, state, max_ranks=MAX_RANKS)
    params, position = expected(state.history)
    check(len(state.history) == STEPS and state.position == position, "history")
    for name, right in params.items():
        np.testing.assert_allclose(state.params[name], right, rtol=1e-12)
    print(f"right {MINE}: {size} ranks, {sorted(set(state.history), reverse=True)}", flush=True)


if __name__ == "__main__":
    main()
