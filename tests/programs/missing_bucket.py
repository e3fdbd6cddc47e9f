"""Marks only some gradients ready on rank 1, which then computes for ever."""

import time

import numpy as np

import mpiring
from mpiring.numpy import DataParallel

comm = mpiring.init()
params = {"w1": np.ones((30, 30)), "b1": np.ones(30), "w2": np.ones((30, 30)), "b2": np.ones(30)}
dp = DataParallel(params, comm, bucket_bytes=8000)
for name in ("b2", "w2", "b1", "w1"):
    if comm.rank == 1:
        time.sleep(60)
    dp.ready(name)
dp.wait()
