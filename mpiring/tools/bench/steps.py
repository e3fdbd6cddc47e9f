"""Measures training steps of models: alone, with mpiring, and with MPI or the peers."""

import dataclasses
import gc
import math
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..arguments import UsageError, checked, names, positive
from ..table import Column, Environment, Row
from ..units import parse_size
from . import gradients, peers, timing
from .benchmark import (
    Benchmark, Measurement, declare_device, declare_link, declare_models, declare_turns, run,
    with_case,
)
from .contenders import ALONE, GLOO, SUMMING, Contender, declare_contenders, settle_contenders
from .numpy_training import NumpyTraining, factories, mean_gradients
from .world import World

if TYPE_CHECKING:
    from .torch_training import ModelDevice

# Methods of sharding the optimizer, and contenders that can train PyTorch models, by device.
SHARDINGS = ("slices", "overlap", "node", "zero", "fsdp")
_TRAINING = {"cpu": ("mpiring", "hvd", *peers.NAMES), "cuda": ("mpiring", "gloo")}


def declare(parser: ArgumentParser) -> None:
    """Declare the options, also of the steps of PyTorch models."""
    declare_device(parser)
    parser.add_argument("--framework", choices=("numpy", "torch"), default="numpy",
                        help="framework of the model (default: numpy)")
    parser.add_argument("--batch", type=positive, metavar="N",
                        help="number of samples per rank and step (default: 64, or with PyTorch a "
                             "number that depends on the model)")
    parser.add_argument("--bucket", type=checked(parse_size), metavar="SIZE",
                        help="size of a bucket in bytes (default: 4MiB, or with PyTorch the "
                             "defaults of DataParallel and DDP)")
    parser.add_argument("--calls", type=positive, default=3, metavar="N",
                        help="number of steps per round (default: 3)")
    numpy = parser.add_argument_group("with --framework numpy: a multilayer perceptron")
    numpy.add_argument("--width", type=partial(positive, most=1 << 20), default=1024, metavar="N",
                       help="number of units of each layer (default: 1024)")
    numpy.add_argument("--layers", type=positive, default=3, metavar="N",
                       help="number of layers (default: 3)")
    torch = parser.add_argument_group("with --framework torch")
    declare_models(torch)
    torch.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd",
                       help="optimizer, SGD or PyTorch's fused AdamW (default: sgd)")
    torch.add_argument("--sharded", type=names(SHARDINGS), nargs="?", metavar="A,B", default=[],
                       const=list(SHARDINGS), help="methods of sharding the optimizer that are "
                       f"also measured, some of {', '.join(SHARDINGS)} (without a value: all)")
    declare_link(torch)
    # With few rounds, it ends within a minute on two cores.
    declare_turns(parser, rounds=4)
    declare_contenders(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    if options.framework == "torch":
        settle_contenders(options, _TRAINING, options.device)
        if options.sharded and options.device != "cpu":
            raise UsageError("--sharded needs --device cpu")
        return run(SHARDED_STEPS if options.sharded else TORCH_STEPS, options)
    if options.device != "cpu" or options.sharded or options.optimizer != "sgd":
        raise UsageError("--device cuda, --optimizer adamw and --sharded need --framework torch")
    settle_contenders(options, SUMMING)
    options.batch = options.batch or 64
    options.bucket = options.bucket or 4 << 20
    return run(NUMPY_STEPS, options)


def _measure_numpy(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all variants in each round; the last round yields all results."""
    right = mean_gradients(world, options)
    world.warm_up()
    started = [gradients.start_training(world, make, right, NumpyTraining.communicate)
               for make in factories(world, options)]
    readings = yield from timing.in_turns(options, random.Random(options.seed), {
        variant.name: partial(timing.timed_steps, world, options, {"step": variant.step})
        for variant, _ in started})
    labels = {"parameters": sum(value.size for value in right.values()),
              "batch": options.batch, "thread_level": world.thread_level}
    yield [Measurement({**labels, "contender": variant.name}, {
        **readings[variant.name], "extra_bytes": [memory["peak_bytes"][0] - variant.own_bytes]})
        for variant, memory in started]


def _measure_torch(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all contenders, model by model; the last round of a model yields all results."""
    world.call_on_all(peers.refuse_missing_torch)
    from . import torch_training
    # Each measurement of memory collects garbage; frozen objects, such as PyTorch's, are skipped.
    gc.freeze()
    device = torch_training.device_named(world, options.device)
    contenders = torch_training.contenders(world, options, device.torch)
    world.warm_up()
    for kind in options.models:
        for wanted in options.parameters:
            width = torch_training.width_for(kind, wanted)
            yield from _measure_model(world, options, contenders, kind, width, device)
    torch_training.close()


def _measure_model(world: World, options: Namespace, contenders: Sequence[Contender], kind: str,
                   width: int, device: "ModelDevice") -> Iterator[list[Measurement]]:
    """Measure all contenders with a model."""
    from .torch_training import RECIPES, batch_of, training_of
    x, y = (part.to(device.torch) for part in batch_of(kind, options.batch, 1 + world.rank))
    begin = partial(training_of, kind=kind, width=width, recipe=RECIPES[options.optimizer],
                    batch=(x, y))
    alone = begin(contenders[0])
    alone.step()
    right = gradients.means_over_ranks(world, alone.gradients())
    del alone
    trainings, memories = [], {}
    for contender in contenders:
        training, memory = gradients.start_training(
            world, partial(begin, contender), right if contender.has_means else {})
        trainings.append(training)
        # The process's memory does not include the GPU's.
        on_host = device.torch.type == "cpu"
        memories[contender.name] = memory if on_host else dict.fromkeys(memory, [math.nan])
    flat = world.comm.empty(sum(value.size for value in right.values()), np.float32,
                            device=options.device)
    # Written, because unwritten pages would all be the system's page of zeros. Sums stay zero.
    flat[...] = 0
    actions = {contender.name: partial(
        timing.timed_steps, world, options,
        {"step": training.step, "communication": contender.blocking(flat)}, device.stopwatch)
        for contender, training in zip(contenders, trainings)}
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
    # Modules and their hooks form reference cycles.
    gc.collect()


def numpy_rows(measurements: Sequence[Measurement], about: Environment, options: Namespace,
               ) -> list[Row]:
    """Return a row for each variant, compared with compute alone at its thread level."""
    table = []
    for measurement, case in with_case(measurements, "thread_level"):
        seconds, labels = measurement.readings["step"], measurement.labels
        median = timing.median(seconds)
        table.append({
            **labels,
            **timing.summary(seconds),
            "samples_per_s": labels["batch"] * about["ranks"] / median,
            "extra_MiB": max(measurement.readings["extra_bytes"]) / 2 ** 20,
            "efficiency_percent": 100 * timing.median(case[ALONE].readings["step"]) / median,
        })
    return table


def torch_rows(measurements: Sequence[Measurement], about: Environment, options: Namespace,
               ) -> list[Row]:
    """Return a row for each model and contender, compared with compute alone and with Gloo."""
    return [_torch_row(measurement, case, about, options)
            for measurement, case in with_case(measurements, "model", "parameters", "thread_level")]


def _torch_row(measurement: Measurement, case: Mapping[str, Measurement], about: Environment,
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
    over_compute = _over(measurement, case[ALONE])
    return {
        **labels,
        **timing.summary(seconds),
        "samples_per_s": labels["batch"] * about["ranks"] / median,
        "communication_ms": communication * 1e3,
        **over_compute.of("over_compute"),
        "efficiency_percent": 100 / over_compute.value,
        "hidden_percent": hidden,
        **_over(measurement, case.get(GLOO)).of("over_gloo"),
        "bound_ms": bound * 1e3,
        "over_bound": median / bound,
        "extra_MiB": extra / 2 ** 20,
        "extra_over_gradients": extra / nbytes,
        "node_bytes_per_parameter": max(measurement.readings["node_bytes"]) / labels["parameters"],
    }


def _over(measurement: Measurement, other: Measurement | None) -> timing.Ratio:
    """Return the ratio of a contender's step time to another contender's."""
    calls = measurement.labels["calls"]
    return timing.over(*(timing.in_rounds(each.readings["step"] if each else [], calls)
                         for each in (measurement, other)))


def _title(row: Row) -> str:
    model = row.get("model", "multilayer perceptron")
    return f"{model} of {row['parameters'] / 1e6:.1f} M parameters, batch {row['batch']} per rank"


_NUMPY_COLUMNS = [
    Column("contender", -28, title="training step"),
    Column("thread_level", -10, title="threads"), Column("median_ms", 10, 4),
    Column("p95_ms", 10, 4), Column("samples_per_s", 9, 4, "samples/s"),
    Column("efficiency_percent", 12, 3, "efficiency %"), Column("extra_MiB", 9, 3)]
NUMPY_STEPS = Benchmark("steps", lambda options: options.rounds, _measure_numpy,
                        numpy_rows, _NUMPY_COLUMNS, _title)
_TORCH_COLUMNS = [
    Column("contender", -24, title="training step"), Column("thread_level", -10, title="threads"),
    Column("median_ms", 9, 4), Column("over_compute", 17, 3, "/compute", interval=True),
    Column("over_gloo", 17, 3, "/Gloo", interval=True), Column("over_bound", 6, 3, "/bound")]
TORCH_STEPS = Benchmark(
    "steps", lambda options: len(options.models) * len(options.parameters) * options.rounds,
    _measure_torch, torch_rows,
    [*_TORCH_COLUMNS, Column("hidden_percent", 8, 3, "hidden %"), Column("extra_MiB", 9, 3)],
    _title)
SHARDED_STEPS = dataclasses.replace(TORCH_STEPS, layout=[
    *_TORCH_COLUMNS, Column("node_bytes_per_parameter", 8, 3, "node B/p")])
