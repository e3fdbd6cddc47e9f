"""Runs `python -m mpiring` with one contender more, which on the last rank spoils one element."""

import sys

from mpiring.__main__ import main
from mpiring.bench import allreduce, overlap, steps
from mpiring.bench.contenders import Contender, chosen, mpi


def with_a_wrong_one(world, *asked):
    right = mpi(world)

    def blocking(x):
        call = right.blocking(x)

        def wrong():
            call()
            x[-1] += x.dtype.type(world.rank == world.size - 1)
        return wrong

    return [*chosen(world, *asked), Contender(
        "wrong", blocking, lambda x: lambda call=blocking(x): call)]


for module in (allreduce, overlap, steps):
    module.chosen = with_a_wrong_one
sys.exit(main())
