"""Measures the cost of fetching the data of PyTorch's training steps from the host."""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from functools import partial

from ...data import prefetch
from ..arguments import positive
from ..files import Environment, Row
from ..table import Column
from . import peers, timing
from .benchmark import Benchmark, run
from .options import declare_device, declare_models, declare_turns
from .results import Measurement, beside
from .world import World

RESIDENT, PREFETCHED, COPIED = "data on the device", "mpiring.data.prefetch", "copied in the step"
# Different batches, which the loader repeats.
_BATCHES = 8


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    declare_device(parser)
    declare_models(parser)
    parser.add_argument("--batch", type=positive, help="per rank; default: one for each model")
    parser.add_argument("--calls", type=positive, default=20, help="steps per round; default: 20")
    parser.add_argument("--depth", type=positive, default=2,
                        help="batches that are fetched ahead; default: 2")
    declare_turns(parser)
    parser.set_defaults(action=partial(run, PREFETCH))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Time steps without communication, case after case; yield after each round.

    Raises:
        MissingDependencyError: There is no PyTorch, or it finds no GPU.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(peers.refuse_missing_torch)
    from . import torch_contenders, torch_models
    device = torch_models.device_named(world, options.device)
    for kind, parameters in itertools.product(options.models, options.parameters):
        training = torch_models.Training(
            torch_contenders.alone(), kind, torch_models.width_for(kind, parameters),
            options.batch, world.rank, device, torch_contenders.RECIPES["sgd"])
        batches = [training.host_batch(number) for number in range(_BATCHES)]
        with_loader = iter(prefetch(itertools.cycle(batches), device.torch, depth=options.depth))
        copied = itertools.cycle(batches)
        actions: dict[str, timing.Action] = {
            RESIDENT: training.step,
            PREFETCHED: lambda: training.learn(*next(with_loader)),
            COPIED: lambda: training.learn(*(x.to(device.torch) for x in next(copied)))}
        readings = yield from timing.in_turns(
            world, options, {name: {"step": action} for name, action in actions.items()},
            stopwatch=device.stopwatch)
        with_loader.close()
        labels = {"model": kind, "parameters": training.parameter_count, "batch": training.batch,
                  "batch_bytes": sum(x.numel() * x.element_size() for x in batches[0]),
                  "calls": options.calls, "device": str(device.torch),
                  "thread_level": world.thread_level}
        yield [Measurement({**labels, "contender": name}, found)
               for name, found in readings.items()]


def rows(found: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each way, compared with steps whose data is on the device already.

    Ratios are medians over rounds, whose readings are close in time.
    """
    table = []
    for measurement, case in beside(found, "model", "parameters", "thread_level"):
        labels, seconds = measurement.labels, measurement.readings["step"]
        ratio = timing.over(seconds, case[RESIDENT].readings["step"], labels["calls"])
        table.append({**labels, **timing.summary(seconds), "over_resident": ratio,
                      "efficiency_percent": 100 / ratio})
    return table


_COLUMNS = [
    Column("model", -11), Column("parameters", 10), Column("batch_bytes", 11),
    Column("contender", -22, title="data"), Column("thread_level", -10, title="threads"),
    Column("median_ms", 9, 4), Column("p95_ms", 8, 4),
    Column("over_resident", 10, 4, "/on device")]
PREFETCH = Benchmark(
    "prefetch",
    lambda options: len(options.models) * len(options.parameters) * int(options.rounds),
    measure, rows, _COLUMNS)
