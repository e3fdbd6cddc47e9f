"""Measures training steps of PyTorch models: alone, with mpiring, and with the peers."""

import gc
import hashlib
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...memory.arrays import Array
from ..files import Environment, Row
from ..table import Column
from . import timing
from .command import Benchmark
from .inputs import WrongAnswerError
from .memory import Growth
from .peers import refuse_missing_torch
from .results import Measurement
from .steps import ALONE, GLOO, Readings, check, first_wrong, in_turns, means_over_ranks, warm_up
from .world import World

if TYPE_CHECKING:
    from .torch_models import Contender, Place, Training

MODELS = ("transformer", "convnet", "mlp")


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all contenders, model by model; yield after each round, in the last one them all.

    Raises:
        MissingDependencyError: There is no PyTorch.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(refuse_missing_torch)
    from . import torch_models
    place = torch_models.place_named(world, options.device)
    contenders = torch_models.contenders(world, options, place)
    warm_up(world)
    for kind in options.models:
        for wanted in options.parameters:
            width = torch_models.width_for(kind, wanted)
            yield from _measure(world, options, contenders, kind, width, place)
    torch_models.close()


def _measure(world: World, options: Namespace, contenders: "Sequence[Contender]", kind: str,
             width: int, place: "Place") -> Iterator[list[Measurement]]:
    """Measure all contenders with one model."""
    from .torch_models import Training

    def begin(contender: "Contender") -> "Training":
        return Training(contender, kind, width, options.batch, world.rank, place)

    alone = begin(contenders[0])
    alone.step()
    right = means_over_ranks(world, alone.gradients())
    del alone
    begun = []
    for contender in contenders:
        growth = Growth(world.comm.local_size)
        training, peak = _begun(world, begin(contender), right, growth)
        # The process's memory is not that of the GPU.
        begun.append((training, peak if place.device.type == "cpu" else math.nan))
    flat = world.comm.empty(sum(value.size for value in right.values()), np.float32,
                            device=options.device)
    actions = {}
    for contender, (training, _) in zip(contenders, begun):
        actions[contender.name] = {"step": training.step, "communication": contender.blocking(flat)}
    readings: dict[str, Readings] = {}
    for count, readings in enumerate(in_turns(
            world, options, actions, lambda: flat.fill(1), place.stopwatch), 1):
        if count < options.rounds:
            yield []
    check_parameters(world, {training.name: training.parameters() for training, _ in begun})
    labels = {"model": kind, "parameters": flat.size, "batch": begun[0][0].batch,
              "calls": options.calls, "device": str(place.device),
              "thread_level": world.thread_level}
    yield [Measurement({**labels, "contender": training.name},
                       {**readings[training.name], "peak_bytes": [peak]})
           for training, peak in begun]
    del begun, actions, training
    # Modules and their hooks hold each other.
    gc.collect()


def _begun(world: World, training: "Training", right: Mapping[str, Array], growth: Growth,
           ) -> tuple["Training", float]:
    """Check a training's first step; return it, and by how much it makes the process grow.

    Not counted is the first step, after which buckets are built anew.
    """
    training.step()
    if training.name != ALONE:
        check(world, training.name, training.gradients(), right)
    training.step()
    growth.forget_peak()
    training.step()
    training.step()
    return training, world.slowest([growth.most_bytes()])[0]


def check_parameters(world: World, found: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise on all ranks if trained parameters differ between ranks, or from PyTorch's DDP's.

    Args:
        found: The parameters of each contender, after as many steps.

    Raises:
        WrongAnswerError: They differ between ranks in any bit, or by more than rounding from
            those of DDP with Gloo, where it takes part.

    Collective: yes. Blocking: yes.
    """
    for contender, parameters in found.items():
        if contender == ALONE:
            continue
        digest = hashlib.sha256()
        for value in parameters.values():
            digest.update(value.tobytes())
        if len(set(world.raw.allgather(digest.digest()))) > 1:
            raise WrongAnswerError(f"{contender} on rank {world.rank}: the parameters differ "
                                   f"between ranks after training")
        rank, wrong = first_wrong(world, parameters, found.get(GLOO, {}))
        if wrong:
            raise WrongAnswerError(f"{contender} on rank {rank}: after training, the parameters "
                                   f"{wrong} are not those with {GLOO}")


def rows(found: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each model and contender, beside the compute alone and DDP with Gloo.

    Ratios are medians over rounds, whose readings lie close in time.
    """
    of_case: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for measurement in found:
        of_case.setdefault(_case(measurement), {})[measurement.labels["contender"]] = measurement
    return [_row(measurement, of_case[_case(measurement)], about, options)
            for measurement in found]


def _case(measurement: Measurement) -> tuple[Any, ...]:
    return tuple(measurement.labels[key] for key in ("model", "parameters", "thread_level"))


def _row(measurement: Measurement, case: Mapping[str, Measurement], about: Environment,
         options: Namespace) -> Row:
    labels, seconds = measurement.labels, measurement.readings["step"]
    median = timing.median(seconds)
    compute = timing.median(case[ALONE].readings["step"])
    nbytes = 4 * labels["parameters"]
    bound = float("nan")
    if options.link_rate is not None:
        bound = max(compute, timing.wire_seconds(
            nbytes, about["nodes"], options.link_rate * options.goodput))
    communication = hidden = extra = float("nan")
    if labels["contender"] != ALONE:
        communication = timing.median(measurement.readings["communication"])
        hidden = timing.overlap_percentage(compute, communication, median)
        extra = max(measurement.readings["peak_bytes"]) - max(case[ALONE].readings["peak_bytes"])
    over_compute = _over(measurement, case.get(ALONE))
    return {
        **labels,
        "steps": len(seconds),
        "median_ms": median * 1e3,
        "p95_ms": timing.p95(seconds) * 1e3,
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
    }


def _over(measurement: Measurement, other: Measurement | None) -> float:
    """Return how many times longer the step is than another contender's: the median of rounds."""
    if other is None:
        return float("nan")
    return timing.over(measurement.readings["step"], other.readings["step"],
                       measurement.labels["calls"])


def columns(several_levels: bool) -> list[Column]:
    """Return the columns of the table."""
    level = [Column("thread_level", "threads", -10)] if several_levels else []
    return [
        Column("model", "model", -11), Column("parameters", "parameters", 10),
        Column("contender", "training step", -22), *level,
        Column("median_ms", "median ms", 9, 4), Column("p95_ms", "p95 ms", 8, 4),
        Column("over_compute", "/compute", 8, 3), Column("over_gloo", "/Gloo", 6, 3),
        Column("communication_ms", "comm. ms", 8, 3), Column("hidden_percent", "hidden %", 8, 3),
        Column("bound_ms", "bound ms", 8, 4), Column("over_bound", "/bound", 6, 3),
        Column("extra_MiB", "extra MiB", 9, 3),
        Column("extra_over_gradients", "/gradients", 10, 3),
    ]


TORCH_STEPS = Benchmark(
    "steps", lambda options: len(options.models) * len(options.parameters) * int(options.rounds),
    measure, rows, columns)
