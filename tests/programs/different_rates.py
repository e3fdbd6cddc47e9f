"""Lets the last rank update its slices at another rate than the others.

Argument: torch, or numpy.
"""

import sys

import numpy as np

import mpiring

comm = mpiring.init()
rate = 0.1 if comm.rank < comm.size - 1 else 0.2
if sys.argv[1] == "torch":
    import torch

    from mpiring.torch import DataParallel, Sharded

    model = DataParallel(torch.nn.Linear(30, 30), comm)
    optimizer = Sharded(torch.optim.SGD, model, lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    model(torch.ones(2, 30)).sum().backward()
else:
    from mpiring.numpy import DataParallel
    from mpiring.optim import SGD

    dp = DataParallel({"w": np.ones(900, "float32")}, comm)
    optimizer = SGD(dp, lr=lambda step: 0.1 if step == 0 else rate, sharded=True)
    for step in range(2):
        dp.grads["w"][...] = 1
        dp.ready("w")
        if step == 0:
            optimizer.step()
optimizer.step()
