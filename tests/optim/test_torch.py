"""Holds SGD, Adam and AdamW to PyTorch's, where both mean the same."""

import numpy as np
import pytest
from launching import installed
from threads import TrainingComm, on_ranks

from mpiring.numpy import DataParallel
from mpiring.optim import SGD, Adam, AdamW

SHAPES = {"w": (30, 40), "b": (7,)}


@pytest.mark.parametrize(("make", "settings"), [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
], ids=["sgd", "momentum", "nesterov", "late momentum", "adam", "adamw"])
def test_as_pytorch(make, settings):
    installed("torch")
    import torch

    def gradient(step, name):
        return np.random.default_rng([step, *name.encode()]).standard_normal(SHAPES[name], "f4")

    def momentum(step):
        """Begin late, and pause."""
        return 0.9 * (step > 4 and step not in (10, 11))

    start = {name: gradient(99, name) for name in SHAPES}

    def program(comm):
        dp = DataParallel({name: x.copy() for name, x in start.items()}, comm)
        optimizer = make(dp, **settings)
        for step in range(20):
            if settings.get("momentum") == 0:
                for its in optimizer.settings.values():
                    its["momentum"] = momentum(step)
            for name, grad in dp.grads.items():
                grad[...] = gradient(step, name)
                dp.ready(name)
            optimizer.step()
        return dp.params

    ours, = on_ranks(1, program, TrainingComm)
    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    optimizer = getattr(torch.optim, make.__name__)(theirs.values(), **settings)
    for step in range(20):
        if settings.get("momentum") == 0:
            optimizer.param_groups[0]["momentum"] = momentum(step)
        for name, x in theirs.items():
            x.grad = torch.tensor(gradient(step, name))
        optimizer.step()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x.detach().numpy(), 1e-5, 1e-6)
