"""Holds SGD, Adam and AdamW to PyTorch's, where both mean the same."""

import numpy as np
import pytest
from launching import installed
from threads import TrainingComm, on_ranks

from mpiring.numpy import DataParallel
from mpiring.optim import SGD, Adam, AdamW

SHAPES = {"w": (30, 40), "b": (7,)}


def late(step):
    """Return momentum that begins late, and pauses."""
    return 0.9 * (step > 4 and step not in (10, 11))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("make", "settings"), [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0}),
    (SGD, {"lr": 0.1, "momentum": late, "nesterov": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
], ids=["sgd", "momentum", "nesterov", "written momentum", "late nesterov", "adam", "adamw"])
def test_as_pytorch(make, settings, sharded):
    installed("torch")
    import torch

    def gradient(step, name):
        return np.random.default_rng([step, *name.encode()]).standard_normal(SHAPES[name], "f4")

    start = {name: gradient(99, name) for name in SHAPES}
    writes, is_late = settings.get("momentum") == 0, settings.get("momentum") in (0, late)

    def program(comm):
        dp = DataParallel({name: x.copy() for name, x in start.items()}, comm)
        optimizer = make(dp, sharded=sharded, **settings)
        for step in range(20):
            for its in optimizer.settings.values() if writes else ():
                its["momentum"] = late(step)
            for name, grad in dp.grads.items():
                grad[...] = gradient(step, name)
                dp.ready(name)
            optimizer.step()
            assert ("b" in optimizer.state["w"]) == ("momentum" in settings and (
                not writes or step > 4))
        return dp.params

    replicas = on_ranks(2, program, TrainingComm)
    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    optimizer = getattr(torch.optim, make.__name__)(
        theirs.values(), **{**settings, **({"momentum": 0.9} if is_late else {})})
    for step in range(20):
        if is_late:
            optimizer.param_groups[0]["momentum"] = late(step)
        for name, x in theirs.items():
            x.grad = torch.tensor(gradient(step, name))
        optimizer.step()
    for name, x in theirs.items():
        for ours in replicas:
            np.testing.assert_allclose(ours[name], x.detach().numpy(), 1e-5, 1e-6)
