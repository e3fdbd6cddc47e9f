"""Measures what it costs that the data of PyTorch's training steps comes from the host."""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...data import prefetch
from ..files import Environment, Row
from ..table import Column
from . import timing
from .command import Benchmark
from .peers import refuse_missing_torch
from .results import Measurement
from .steps import ALONE, Readings, in_turns
from .world import World

RESIDENT, PREFETCHED, COPIED = "data on the device", "mpiring.data.prefetch", "copied in the step"
# Different batches that the loader has, over and over.
_BATCHES = 8


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Time steps without communication, case after case; yield after each round.

    Raises:
        MissingDependencyError: There is no PyTorch, or it finds no GPU.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(refuse_missing_torch)
    from . import torch_models
    place = torch_models.place_named(world, options.device)
    for kind, parameters in itertools.product(options.models, options.parameters):
        training = torch_models.Training(
            torch_models.Contender(ALONE, lambda model, optimizer: (model, optimizer)), kind,
            torch_models.width_for(kind, parameters), options.batch, world.rank, place)
        batches = [training.host_batch(number) for number in range(_BATCHES)]
        with_loader = iter(prefetch(itertools.cycle(batches), place.device, depth=options.depth))
        copied = itertools.cycle(batches)
        actions: Mapping[str, Callable[[], object]] = {
            RESIDENT: training.step,
            PREFETCHED: lambda: training.learn(*next(with_loader)),
            COPIED: lambda: training.learn(*(x.to(place.device) for x in next(copied)))}
        readings: dict[str, Readings] = {}
        for count, readings in enumerate(in_turns(
                world, options, {name: {"step": action} for name, action in actions.items()},
                stopwatch=place.stopwatch), 1):
            if count < options.rounds:
                yield []
        with_loader.close()
        labels = {"model": kind, "parameters": training.parameter_count, "batch": training.batch,
                  "batch_bytes": sum(x.numel() * x.element_size() for x in batches[0]),
                  "calls": options.calls, "device": str(place.device),
                  "thread_level": world.thread_level}
        yield [Measurement({**labels, "contender": name}, found)
               for name, found in readings.items()]


def rows(found: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each way, beside the step whose data is on the device already.

    Ratios are medians over rounds, whose readings lie close in time.
    """
    resident = {_case(one): one.readings["step"] for one in found
                if one.labels["contender"] == RESIDENT}
    table = []
    for one in found:
        seconds, base = one.readings["step"], resident[_case(one)]
        ratio = timing.over(seconds, base, one.labels["calls"])
        table.append({
            **one.labels,
            "steps": len(seconds),
            "median_ms": timing.median(seconds) * 1e3,
            "p95_ms": timing.p95(seconds) * 1e3,
            "over_resident": ratio,
            "efficiency_percent": 100 / ratio,
        })
    return table


def _case(measurement: Measurement) -> tuple[Any, ...]:
    return tuple(measurement.labels[key] for key in ("model", "parameters", "thread_level"))


def columns(several_levels: bool) -> list[Column]:
    """Return the columns of the table."""
    level = [Column("thread_level", "threads", -10)] if several_levels else []
    return [
        Column("model", "model", -11), Column("parameters", "parameters", 10),
        Column("batch_bytes", "batch bytes", 11), Column("contender", "data", -22), *level,
        Column("median_ms", "median ms", 9, 4), Column("p95_ms", "p95 ms", 8, 4),
        Column("over_resident", "/on device", 10, 4),
    ]


PREFETCH = Benchmark(
    "prefetch",
    lambda options: len(options.models) * len(options.parameters) * int(options.rounds),
    measure, rows, columns)
