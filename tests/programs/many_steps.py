"""Trains for many steps, and prints what has grown since the first tenth of them."""

import os
import resource
import sys

import numpy as np

import mpiring
from mpiring.numpy import DataParallel

STEPS = 1000


def usage():
    with open("/proc/self/statm") as file:
        pages = map(int, file.read().split()[:2])
        virtual, resident = (number * resource.getpagesize() for number in pages)
    with open("/proc/self/maps") as file:
        windows = sum("memfd:mpiring" in line for line in file)
    return {"virtual": virtual, "resident": resident, "windows": windows,
            "files": len(os.listdir("/proc/self/fd"))}


with mpiring.init() as comm:
    random = np.random.default_rng(0)
    params = {f"w{i}": random.standard_normal((16, 300 * i)) for i in range(1, 6)}
    dp = DataParallel(params, comm, bucket_bytes=50_000)
    before = {}
    for step in range(STEPS):
        for name in reversed(params):
            dp.grads[name][...] = comm.rank + step
            dp.ready(name)
        dp.wait()
        assert dp.grads["w1"][0, 0] == step + (comm.size - 1) / 2
        scratch = comm.empty((100, 1 + step % 7))
        scratch[...] = 1
        comm.allreduce(scratch)
        if step == STEPS // 10:
            before = usage()
    after = usage()
    if comm.rank == 0:
        print(*(f"{name} {before[name]} {after[name]}" for name in after), sep="\n")
sys.stdout.flush()
