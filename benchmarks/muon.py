"""Measures Muon's update in which each matrix has one owner, and one that all ranks repeat."""

import itertools
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mpiring.tools.arguments import positive
from mpiring.tools.bench import peers, timing
from mpiring.tools.bench.benchmark import (
    Benchmark, Measurement, declare_models, declare_turns, run, with_case)
from mpiring.tools.bench.world import World
from mpiring.tools.table import Column, Environment, Row

from . import main
from .plot import DRAWINGS

REDUNDANT, OWNERS = "each rank updates all", "mpiring Sharded"


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    declare_models(parser)
    parser.add_argument("--calls", type=positive, default=5,
                        help="updates per round (default: 5)")
    declare_turns(parser)
    parser.set_defaults(action=lambda options: run(MUON, options))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Time updates, with a backward pass before each; yield after each round.

    Raises:
        MissingDependencyError: There is no PyTorch.

    Collective: yes. Blocking: yes.
    """
    world.call_on_all(peers.refuse_missing_torch)
    import torch

    from mpiring.tools.bench import torch_training
    from mpiring.torch import DataParallel, Sharded
    for kind, parameters in itertools.product(options.models, options.parameters):
        width = torch_training.width_for(kind, parameters)
        batch = torch_training.batch_of(kind, 1, world.rank)
        models = {name: DataParallel(torch_training.model_of(kind, width), world.comm)
                  for name in (REDUNDANT, OWNERS)}
        matrices, others = ([p for p in models[REDUNDANT].parameters() if (p.dim() == 2) is wanted]
                            for wanted in (True, False))
        plain: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices), torch.optim.AdamW(others)]
        groups = [{"params": [p for p in models[OWNERS].parameters() if (p.dim() == 2) is wanted],
                   "use_muon": wanted} for wanted in (True, False)]
        optimizers = {REDUNDANT: plain, OWNERS: [
            Sharded(torch.optim.Muon, models[OWNERS], groups)]}
        readings = yield from timing.in_turns(options, random.Random(options.seed), {
            name: partial(_timed, world, options.calls, models[name], batch, optimizers[name])
            for name in models})
        labels = {"model": kind, "calls": options.calls, "thread_level": world.thread_level,
                  "parameters": sum(p.numel() for p in models[REDUNDANT].parameters())}
        yield [Measurement({**labels, "contender": name}, times)
               for name, times in readings.items()]


def _timed(world: World, calls: int, model: Any, batch: Any,
           optimizers: Sequence[Any]) -> timing.Readings:
    from mpiring.tools.bench import torch_training

    def backward() -> None:
        model.zero_grad()
        torch_training.loss(model, *batch).backward()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    backward()
    update()
    return {"update": timing.timed(world, update, calls, prepare=backward)}


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each contender, compared with updates that all ranks repeat."""
    table = []
    for measurement, case in with_case(measurements, "model", "parameters", "thread_level"):
        calls, seconds = measurement.labels["calls"], measurement.readings["update"]
        ratio = timing.over(*(timing.in_rounds(each, calls)
                              for each in (seconds, case[REDUNDANT].readings["update"])))
        table.append({**measurement.labels, **timing.summary(seconds),
                      **ratio.of("over_redundant")})
    return table


MUON = Benchmark(
    "muon", lambda options: len(options.models) * len(options.parameters) * options.rounds,
    measure, rows, [
        Column("model", -11), Column("parameters", 10), Column("contender", -22, title="update"),
        Column("median_ms", 9, 4), Column("p95_ms", 8, 4), Column("over_redundant", 10, 4, "/all")],
    drawings=DRAWINGS)


if __name__ == "__main__":
    sys.exit(main("muon", declare))
