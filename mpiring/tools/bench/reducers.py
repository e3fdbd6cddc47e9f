"""Measures the savings and costs of Reducers in training steps of a PyTorch model."""

import gc
import logging
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ... import Statistics
from ...reducers import Cast, ErrorFeedback, Int8, Mean, OneBit, PowerSGD, Reducer, TopK
from ..arguments import UsageError, checked, names, positive
from ..table import Column, Environment, Row
from ..units import parse_count
from . import timing
from .benchmark import LEVELS, Benchmark, Measurement, declare_jobs, run
from .gradients import check_parameters
from .peers import refuse_missing_torch
from .world import World

if TYPE_CHECKING:
    from .torch_training import Training

METHODS_HELP = """\
  alone      each rank trains for itself, without communication
  dense      plain means without compression, the baseline of all methods
  fp16, bf16, int8, onebit, topk, powersgd, powersgd4
             methods of mpiring.reducers: int8 with error feedback, topk with 0.1 % of the
             gradients, powersgd with rank 2, powersgd4 with rank 4

Gradients are compressed only between nodes: use several hosts, or MPIRING_SHARED_MEMORY=0.
"""
_DESCRIPTION = f"""\
Times the training steps of a transformer with each method of averaging gradients. The study
benchmarks.reducers in mpiring's sources also measures the loss.

{METHODS_HELP}
  compressed  bytes of plain means / bytes sent
  on wire     the same, by the hosts' counters
  encode, wire, decode  time in a step on the slowest rank; overlaps between buckets and with
                        computation"""

_log = logging.getLogger("mpiring")

ALONE, DENSE = "alone", "dense"
# Functions that return a new Reducer for each training, given the number of warm-up steps.
METHODS: Mapping[str, Callable[[int], Reducer | None]] = {
    DENSE: lambda warmup: Mean(),
    "fp16": lambda warmup: Cast("float16"),
    "bf16": lambda warmup: Cast("bfloat16"),
    "int8": lambda warmup: ErrorFeedback(Int8()),
    "onebit": lambda warmup: OneBit(warmup_steps=warmup),
    "topk": lambda warmup: TopK(density=0.001, warmup_steps=warmup),
    "powersgd": lambda warmup: PowerSGD(rank=2, start_step=warmup),
    "powersgd4": lambda warmup: PowerSGD(rank=4, start_step=warmup),
}
NAMES = (ALONE, *METHODS)
KIND = "transformer"
# The first step is the first to write to the memory of buckets and of messages.
UNSETTLED_STEPS = 2
_INTERFACES = Path("/sys/class/net")
_LOOPBACK = "lo"


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    declare_reducers(parser)
    declare_training(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    refuse_few_steps(options)
    return run(REDUCERS, options)


def declare_reducers(parser: ArgumentParser) -> None:
    """Declare which Reducers take part."""
    parser.add_argument("--reducers", type=names(NAMES), default=list(NAMES), metavar="A,B",
                        help=f"methods, some of {', '.join(NAMES)} (default: all)")


def declare_training(parser: ArgumentParser) -> None:
    """Declare the options of the model and of its training."""
    parser.set_defaults(rounds=None, levels=list(LEVELS[:1]), settled=UNSETTLED_STEPS)
    parser.add_argument("--parameters", type=checked(parse_count), default=13_000_000,
                        metavar="N", help="approximate number of parameters of the transformer "
                                          "(default: 13M)")
    parser.add_argument("--steps", type=positive, default=100, metavar="N",
                        help="number of steps with each method (default: 100)")
    parser.add_argument("--batch", type=positive, default=4, metavar="TEXTS",
                        help="number of texts of 64 bytes per rank and step (default: 4)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw",
                        help="optimizer, AdamW or SGD without momentum (default: adamw)")
    declare_jobs(parser)


def refuse_few_steps(options: Namespace) -> None:
    """Raise UsageError if no steps are left to measure."""
    if options.settled >= options.steps:
        raise UsageError(f"--steps {options.steps} is too few: the first {options.settled} are "
                         f"not measured")


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train with one method after another; yield after each, and yield all after the last.

    Raises:
        MissingDependencyError: There is no PyTorch.
        WrongAnswerError: A method's final parameters differ between ranks.
    """
    warn_if_nothing_is_compressed(world)
    world.call_on_all(refuse_missing_torch)
    from ...torch import share_cores
    from . import torch_training
    share_cores(world.comm)
    width = torch_training.width_for(KIND, options.parameters)
    batch = torch_training.batch_of(KIND, options.batch, 1 + world.rank)
    world.warm_up()
    measurements: list[Measurement] = []
    for number, name in enumerate(options.reducers, 1):
        reducer = None if name == ALONE else METHODS[name](0)
        contender = torch_training.NOBODY if name == ALONE else torch_training.data_parallel(
            world, name, reducer=reducer, broadcast_buffers=False)
        training = torch_training.training_of(
            contender, KIND, width, torch_training.RECIPES[options.optimizer], batch)
        measurements.append(Measurement({
            "reducer": name, "settings": "" if reducer is None else repr(reducer),
            "parameters": training.parameter_count, "batch": options.batch,
            "optimizer": options.optimizer, "thread_level": world.thread_level},
            _readings(world, options, training, communicates=name != ALONE)))
        del training
        # Modules and their hooks form reference cycles.
        gc.collect()
        yield measurements if number == len(options.reducers) else []


def warn_if_nothing_is_compressed(world: World) -> None:
    """Log on rank 0 that all ranks share one memory, if they do."""
    # Not comm.num_nodes: without shared memory, each rank of a host is a node.
    if len(world.comm.memory_groups) == 1 and world.rank == 0:
        _log.warning(
            "all %d ranks share one node's memory, where nothing is sent, and NOTHING IS "
            "COMPRESSED: all methods are one. Take several hosts, `python -m mpiring lab run "
            "--hosts 2 -- ...`, or set MPIRING_SHARED_MEMORY=0, which makes each rank a node",
            world.size)


def _readings(world: World, options: Namespace, training: "Training", *,
              communicates: bool) -> timing.Readings:
    """Train, and return the seconds of each step, and the costs of a settled step."""
    cost, settled = Statistics(), options.steps - options.settled

    def step() -> None:
        nonlocal cost
        training.step()
        if communicates:
            cost += training.model.statistics

    seconds = timing.timed(world, training.step, options.settled)
    traffic = HostTraffic(world)
    seconds += timing.timed(world, step, settled)
    if not communicates:
        return {"step": seconds}
    host_bytes = traffic.end(cost.bytes_sent)
    check_parameters(world, {training.name: training.parameters()})
    return {"step": seconds, **costs_of_step(world, cost, settled, host_bytes)}


def costs_of_step(world: World, cost: Statistics, steps: int, host_bytes: float) -> timing.Readings:
    """Return the costs of a settled step: bytes of all ranks, seconds of the slowest rank.

    The `cost` is that of all `steps` on this rank; all hosts have sent `host_bytes` in them.
    """
    ranks = world.raw.allgather(cost)
    totals = {"dense_bytes": sum(cost.dense_bytes for cost in ranks),
              "sent_bytes": sum(cost.bytes_sent for cost in ranks), "host_bytes": host_bytes,
              **{name: max(getattr(cost, name) for cost in ranks)
                 for name in ("encode_s", "wire_s", "decode_s", "exposed_s")}}
    return {name: [total / steps] for name, total in totals.items()}


class HostTraffic:
    """Counts the bytes that all hosts send from now on, including all headers."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.barrier()
        self._before = sent_bytes()

    def end(self, known_bytes: int) -> float:
        """Return the bytes that all hosts have sent; NaN if all ranks are on one host.

        It is also NaN if a counter shows fewer bytes than the `known_bytes` of a rank. This happens
        with InfiniBand, whose messages bypass the system.
        """
        self._world.barrier()
        comm, counted = self._world.comm, max_growth(self._before, sent_bytes())
        ranks = comm.allgather_object((known_bytes, counted, comm.local_rank))
        least = min(known for known, _, _ in ranks)
        if comm.num_nodes == 1 or any(grew < least for _, grew, _ in ranks):
            return math.nan
        return float(sum(grew for _, grew, local_rank in ranks if local_rank == 0))


def sent_bytes(interfaces: Path = _INTERFACES) -> dict[str, int]:
    """Return the bytes that each network interface has sent, without the loopback."""
    return {path.name: int((path / "statistics/tx_bytes").read_text())
            for path in interfaces.glob("*") if path.name != _LOOPBACK and path.is_dir()}


def max_growth(before: dict[str, int], after: dict[str, int]) -> int:
    """Return the growth of the interface that has sent the most.

    A sum over all interfaces would be wrong: a bond and its members count the same bytes, as do a
    bridge and its members.
    """
    return max((after[name] - before[name] for name in before.keys() & after.keys()), default=0)


def by_method(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the trainings, by method."""
    trainings: dict[str, list[Measurement]] = {}
    for training in measurements:
        trainings.setdefault(training.labels["reducer"], []).append(training)
    return trainings


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method, compared with the plain mean and with compute alone."""
    trainings = by_method(measurements)
    return [{**runs[0].labels, **costs(runs, trainings, options.settled)}
            for runs in trainings.values()]


def costs(runs: Sequence[Measurement], trainings: Mapping[str, Sequence[Measurement]],
          first: int) -> Row:
    """Return the times of steps with one method, and the costs of a settled step.

    The `trainings` of all methods are given by method; `first` is the index of the first settled
    step.
    """
    def over(other: str) -> timing.Ratio:
        return timing.over(*([run.readings["step"][first:] for run in each]
                             for each in (runs, trainings.get(other, []))))

    seconds = [value for run in runs for value in run.readings["step"][first:]]
    on_wire = reading(runs, "host_bytes")
    return {
        "steps": min(len(run.readings["step"]) for run in runs),
        "training_s": fmean([sum(run.readings["step"]) for run in runs]),
        "median_ms": timing.median(seconds) * 1e3, "p95_ms": timing.p95(seconds) * 1e3,
        **over(DENSE).of("over_dense"), **over(ALONE).of("over_alone"),
        "compression_ratio": ratio(reading(runs, "dense_bytes"), reading(runs, "sent_bytes")),
        "wire_ratio": ratio(reading(trainings.get(DENSE, []), "host_bytes"), on_wire),
        "wire_MiB": on_wire / 2 ** 20,
        **{f"{name}_ms": reading(runs, f"{name}_s") * 1e3
           for name in ("encode", "wire", "decode")}}


def reading(trainings: Sequence[Measurement], name: str) -> float:
    """Return the mean of a reading over trainings; NaN if no training has it."""
    values = [training.readings[name][0] for training in trainings if name in training.readings]
    return fmean(values) if values else math.nan


def ratio(more: float, less: float) -> float:
    """Return a ratio; NaN if either number is 0."""
    return more / less if more and less else math.nan


COLUMNS = (
    Column("reducer", -9), Column("steps", 5, 1), Column("median_ms", 6, 4, "ms"),
    Column("p95_ms", 6, 4), Column("over_dense", 6, 3, "/dense"),
    Column("over_alone", 6, 3, "/alone"), Column("compression_ratio", 10, 3, "compressed"),
    Column("wire_ratio", 7, 3, "on wire"), Column("encode_ms", 9, 3), Column("wire_ms", 7, 3),
    Column("decode_ms", 9, 3))
REDUCERS = Benchmark("reducers", lambda options: len(options.reducers), measure, rows, COLUMNS)
