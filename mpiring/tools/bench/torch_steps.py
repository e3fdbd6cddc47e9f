"""Measures training steps of PyTorch models: alone, with mpiring, and with the peers."""

import gc
import math
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..table import Column, Environment, Row
from . import gradients, peers, timing
from .benchmark import Benchmark, Measurement, with_case
from .contenders import ALONE, GLOO, Contender
from .world import World

if TYPE_CHECKING:
    from .torch_training import ModelDevice

# Ways to share the optimizer's work.
SHARDINGS = ("slices", "overlap", "node", "zero", "fsdp")
TORCH_ON_CPU, TORCH_ON_GPU = ("mpiring", *peers.NAMES), ("mpiring", "gloo")


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all contenders, model by model; the last round of a model yields them all.

    Raises:
        MissingDependencyError: There is no PyTorch.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(peers.refuse_missing_torch)
    from . import torch_contenders, torch_training
    # Whenever memory is measured, garbage is collected: not among all that PyTorch has imported.
    gc.freeze()
    device = torch_training.device_named(world, options.device)
    contenders = torch_contenders.contenders(world, options, device.torch)
    world.warm_up()
    for kind in options.models:
        for wanted in options.parameters:
            width = torch_training.width_for(kind, wanted)
            yield from _measure(world, options, contenders, kind, width, device)
    torch_contenders.close()


def _measure(world: World, options: Namespace, contenders: Sequence[Contender], kind: str,
             width: int, device: "ModelDevice") -> Iterator[list[Measurement]]:
    """Measure all contenders with a model."""
    from .torch_contenders import RECIPES
    from .torch_training import batch_of, training_of
    x, y = (part.to(device.torch) for part in batch_of(kind, options.batch, 1 + world.rank))
    begin = partial(training_of, kind=kind, width=width, recipe=RECIPES[options.optimizer],
                    batch=(x, y))
    alone = begin(contenders[0])
    alone.step()
    right = gradients.means_over_ranks(world, alone.gradients())
    del alone
    trainings, memories = [], {}
    for contender in contenders:
        training, memory = gradients.begun(
            world, partial(begin, contender), right if contender.has_means else {})
        trainings.append(training)
        # The process's memory is not that of the GPU.
        on_host = device.torch.type == "cpu"
        memories[contender.name] = memory if on_host else dict.fromkeys(memory, [math.nan])
    flat = world.comm.empty(sum(value.size for value in right.values()), np.float32,
                            device=options.device)
    # Written to, so that it has memory of its own; sums of zeros never overflow.
    flat[...] = 0
    actions = {contender.name: timing.timed_steps(
        world, options, {"step": training.step, "communication": contender.blocking(flat)},
        device.stopwatch) for contender, training in zip(contenders, trainings)}
    readings = yield from timing.in_turns(options, random.Random(options.seed), actions)
    gradients.check_parameters(
        world, {training.name: training.parameters() for training in trainings})
    node_ranks = int(world.slowest([world.comm.local_size])[0])
    labels = {"model": kind, "parameters": flat.size, "batch": len(x),
              "optimizer": options.optimizer, "calls": options.calls, "device": str(device.torch),
              "thread_level": world.thread_level}
    yield [Measurement(
        {**labels, "contender": contender.name, "formula_bytes_per_parameter":
         contender.shares.bytes_per_parameter(options.optimizer, node_ranks, world.size)},
        {**readings[contender.name], **memories[contender.name]}) for contender in contenders]
    del trainings, actions
    # Modules and their hooks hold each other.
    gc.collect()


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each model and contender, beside the compute alone and DDP with Gloo.

    Ratios are medians over rounds, whose readings are close in time.
    """
    return [_row(measurement, case, about, options)
            for measurement, case in with_case(measurements, "model", "parameters", "thread_level")]


def _row(measurement: Measurement, case: Mapping[str, Measurement], about: Environment,
         options: Namespace) -> Row:
    labels, seconds = measurement.labels, measurement.readings["step"]
    median = timing.median(seconds)
    compute = timing.median(case[ALONE].readings["step"])
    nbytes = 4 * labels["parameters"]
    bound = math.nan
    if options.link_rate is not None:
        bound = max(compute, timing.wire_seconds(
            nbytes, about["nodes"], options.link_rate * options.goodput))
    communication = hidden = extra = math.nan
    if labels["contender"] != ALONE:
        communication = timing.median(measurement.readings["communication"])
        hidden = timing.overlap_percentage(compute, communication, median)
        extra = max(measurement.readings["peak_bytes"]) - max(case[ALONE].readings["peak_bytes"])
    over_compute = _over(measurement, case.get(ALONE))
    return {
        **labels,
        **timing.summary(seconds),
        "samples_per_s": labels["batch"] * about["ranks"] / median,
        "communication_ms": communication * 1e3,
        "over_compute": over_compute,
        "efficiency_percent": 100 / over_compute,
        "hidden_percent": hidden,
        "over_gloo": _over(measurement, case.get(GLOO)),
        "bound_ms": bound * 1e3,
        "over_bound": median / bound,
        "extra_MiB": extra / 2 ** 20,
        "extra_over_gradients": extra / nbytes,
        "node_bytes_per_parameter": max(measurement.readings["node_bytes"]) / labels["parameters"],
    }


def _over(measurement: Measurement, other: Measurement | None) -> float:
    """Return how many times longer the step is than another contender's: the median of rounds."""
    if other is None:
        return math.nan
    return timing.over(measurement.readings["step"], other.readings["step"],
                       measurement.labels["calls"])


_COLUMNS = [
    Column("model", -11), Column("parameters", 10),
    Column("contender", -24, title="training step"), Column("thread_level", -10, title="threads"),
    Column("median_ms", 9, 4), Column("p95_ms", 8, 4), Column("over_compute", 8, 3, "/compute"),
    Column("over_gloo", 6, 3, "/Gloo"), Column("communication_ms", 8, 3, "comm. ms"),
    Column("hidden_percent", 8, 3, "hidden %"), Column("bound_ms", 8, 4),
    Column("over_bound", 6, 3, "/bound"), Column("extra_MiB", 9, 3),
    Column("extra_over_gradients", 10, 3, "/gradients"),
    Column("node_bytes_per_parameter", 8, 3, "node B/p"),
    Column("formula_bytes_per_parameter", 7, 3, "formula")]
TORCH_STEPS = Benchmark(
    "steps", lambda options: len(options.models) * len(options.parameters) * int(options.rounds),
    measure, rows, _COLUMNS)
