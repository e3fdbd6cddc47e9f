"""Runs `python -m mpiring` with one contender more, which trains wrongly as argument 1 says."""

import sys

from mpiring.__main__ import main
from mpiring.bench import torch_models
from mpiring.bench.torch_models import Contender

KIND = sys.argv.pop(1)
right = torch_models.contenders


def with_a_wrong_one(world, options, place):
    found = right(world, options, place)

    def wrap(model, optimizer):
        wrapped, optimizer = found[1].wrap(model, optimizer)
        *_, bias = model.parameters()
        correct, steps = optimizer.step, []

        def step():
            steps.append(1)
            if KIND == "gradient":
                bias.grad[0] += world.rank == world.size - 1
            correct()
            # What checks of the first step's gradients cannot see.
            if len(steps) == 3:
                bias.data[0] += KIND == "later" or KIND == "rank" and world.rank
        optimizer.step = step
        return wrapped, optimizer

    return [*found, Contender("wrong", wrap)]


torch_models.contenders = with_a_wrong_one
sys.exit(main())
