"""Runs several benchmarks in one job: python bench_in_turn.py WORDS , WORDS ...

A study's first word is that of its module, benchmarks.NAME.
Their exit statuses stand below what each prints. After --wrong, each has one contender more, or a
Reducer, that is wrong.
"""

import importlib
import itertools
import sys

import benchmarks
from mpiring.__main__ import main


def spoil_sums():
    """On the last rank, spoil one element."""
    from mpiring.tools.bench import allreduce, latency, numpy_training, overlap
    from mpiring.tools.bench.contenders import Contender, chosen, mpi

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

    for module in (allreduce, latency, numpy_training, overlap):
        module.chosen = with_a_wrong_one


def spoil_training():
    """Spoil a gradient of a transformer, or what one learns later, which only the end shows."""
    from mpiring.tools.bench import torch_training
    from mpiring.tools.bench.contenders import Contender
    right = torch_training.contenders

    def with_a_wrong_one(world, options, device):
        contenders = right(world, options, device)

        def join(model, recipe):
            wrapped, optimizer = contenders[1].join(model, recipe)
            *_, bias = model.parameters()
            correct, steps = optimizer.step, []
            early = options.models == ["transformer"]

            def step():
                steps.append(1)
                if early:
                    bias.grad[0] += world.rank == world.size - 1
                correct()
                # What checks of the first step's gradients cannot see.
                if not early and len(steps) == 3:
                    bias.data[0] += 1
            optimizer.step = step
            return wrapped, optimizer

        return [*contenders, Contender("wrong", join=join)]

    torch_training.contenders = with_a_wrong_one


def spoil_a_reducer():
    """Turn the means of one around on rank 0."""
    from mpiring.tools.bench import reducers
    from mpiring.reducers import Cast

    class Wrong(Cast):
        def _reduce(self, collectives, bucket, kept):
            yield from super()._reduce(collectives, bucket, kept)
            if collectives.rank == 0:
                bucket.flat *= -1

    reducers.METHODS["bf16"] = lambda warmup: Wrong("bfloat16")


def status_of(first, *words):
    folder, _, name = first.rpartition(".")
    if folder:
        return benchmarks.main(name, importlib.import_module(first).declare, words)
    return main(["bench", first, *words])


if sys.argv[1] == "--wrong":
    del sys.argv[1]
    spoil_sums(), spoil_training(), spoil_a_reducer()
for ends, words in itertools.groupby(sys.argv[1:], ",".__eq__):
    if not ends:
        words = list(words)
        print(f"{words[0]} ended with status {status_of(*words)}", flush=True)
        if "torch" in words:
            from mpiring.tools.bench import torch_training
            torch_training.close()
