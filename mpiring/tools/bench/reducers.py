"""Measures what Reducers save and cost: trains one model with each of them, on real text."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ...record.statistics import Statistics
from ...reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, Reducer, TopK
from . import timing
from .command import Benchmark
from .peers import refuse_missing_torch
from .reducers_table import ALONE, DENSE, columns, rows
from .results import Measurement
from .steps import warm_up
from .torch_steps import check_parameters
from .wire import Traffic
from .world import World

if TYPE_CHECKING:
    from .torch_training import Task, Training

_log = logging.getLogger("mpiring")

# Each is made anew for each training, given for how many steps it may begin gently.
METHODS: Mapping[str, Callable[[int], Reducer | None]] = {
    DENSE: lambda warmup: None,
    "fp16": lambda warmup: Cast("float16"),
    "bf16": lambda warmup: Cast("bfloat16"),
    "int8": lambda warmup: ErrorFeedback(Int8()),
    "onebit": lambda warmup: OneBit(warmup_steps=warmup),
    "topk": lambda warmup: TopK(density=0.001, warmup_steps=warmup),
    "powersgd": lambda warmup: PowerSGD(rank=2, start_step=warmup),
    "powersgd4": lambda warmup: PowerSGD(rank=4, start_step=warmup),
}
NAMES = (ALONE, *METHODS)
LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.05}

# The first step builds the buckets anew, the second one writes to their memory first.
_UNSETTLED_STEPS = 2
_REHEARSED_STEPS = 2
_REHEARSED_WIDTH = 64


def complete(options: Namespace) -> Namespace:
    """Give the options that depend on others their defaults.

    Raises:
        ConfigError: No steps are left to be measured.
    """
    if options.warmup_steps is None:
        options.warmup_steps = options.steps // 10
    if options.validate_every is None:
        options.validate_every = max(1, options.steps // 20)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    # From here on all methods compress, and nothing is new to any of them.
    options.settled = max(options.warmup_steps, _UNSETTLED_STEPS)
    if options.settled >= options.steps:
        raise ConfigError(f"--steps {options.steps} is too few: the first {options.settled} are "
                          f"not measured, with --warmup-steps {options.warmup_steps}")
    return options


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train with all methods, seed by seed; yield after each training, in the last one them all.

    Raises:
        MissingDependencyError: There is no PyTorch.
        WrongAnswerError: A method's parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(refuse_missing_torch)
    from . import torch_training
    _warn_where_nothing_is_compressed(world)
    task = torch_training.task(world, options)
    warm_up(world)
    traffic, found = Traffic(world), list[Measurement]()
    for name in options.reducers:
        _rehearse(world, options, task, name)
    for seed in options.seeds:
        for name in options.reducers:
            found.append(_train(world, options, task, traffic, name, seed))
            torch_training.free()
            yield found if len(found) == _cases(options) else []


def _cases(options: Namespace) -> int:
    return len(options.seeds) * len(options.reducers)


def _warn_where_nothing_is_compressed(world: World) -> None:
    # Not comm.num_nodes: without shared memory, each rank of a host is a node.
    if len(world.comm.memory_groups) == 1 and world.rank == 0:
        _log.warning(
            "all %d ranks share one node's memory, where nothing is sent, and NOTHING IS "
            "COMPRESSED: all methods are one. Take several hosts, `python -m mpiring lab run "
            "--hosts 2 -- ...`, or set MPIRING_SHARED_MEMORY=0, which makes each rank a node",
            world.size)


def _begun(world: World, options: Namespace, task: "Task", name: str, seed: int,
           warmup_steps: int) -> "tuple[Training, str]":
    """Begin a training, and return it with what its Reducer says of itself."""
    from .torch_training import Training
    reducer = None if name == ALONE else METHODS[name](warmup_steps)
    training = Training(task, world, options, seed, reducer, joined=name != ALONE)
    return training, "" if reducer is None else repr(reducer)


def _rehearse(world: World, options: Namespace, task: "Task", name: str) -> None:
    """Train a narrow model, so that all code is loaded, and compiled where it has to be."""
    training, _ = _begun(world, options, replace(task, width=_REHEARSED_WIDTH), name, 0, 0)
    for _ in range(_REHEARSED_STEPS):
        training.step()
    _bits_per_byte(world, training)


def _train(world: World, options: Namespace, task: "Task", traffic: Traffic, name: str,
           seed: int) -> Measurement:
    """Train with one method to the end, or to the time limit, and check that ranks agree."""
    training, settings = _begun(world, options, task, name, seed, options.warmup_steps)
    seconds, validated, bits = list[float](), list[float](), list[float]()
    cost, done, limit = Statistics(), 0, options.time_limit or float("inf")
    # The slowest rank's time is known to all, so that all stop at the same step.
    while done < options.steps and sum(seconds) < limit:
        if done == options.settled:
            traffic.begin()
        seconds += timing.timed(world, training.step, 1, prepare=training.draw)
        done += 1
        if done > options.settled:
            cost += training.statistics
        over = done == options.steps or sum(seconds) >= limit
        if name != ALONE and (over or done % options.validate_every == 0):
            validated.append(done)
            bits.append(_bits_per_byte(world, training))
    readings = {"step": seconds, "validated": validated, "bits": bits}
    if name != ALONE:
        check_parameters(world, {name: training.parameters()})
        if done > options.settled:
            readings |= _costs(world, cost, done - options.settled, traffic.end(cost.bytes_sent))
    if done < options.steps and world.rank == 0:
        _log.warning("%s, seed %d: stopped after %d of %d steps by --time-limit %g", name, seed,
                     done, options.steps, limit)
    return Measurement({
        "reducer": name, "settings": settings, "parameters": task.parameters, "seed": seed,
        "batch": options.batch, "optimizer": options.optimizer,
        "learning_rate": options.learning_rate, "thread_level": world.thread_level}, readings)


def _bits_per_byte(world: World, training: "Training") -> float:
    """Return the loss on the validation texts, of which each rank predicts a share."""
    total = np.array(training.validate(), np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, total, op=world.mpi.SUM)
    return float(total[0] / total[1])


def _costs(world: World, cost: Statistics, steps: int, host_bytes: float) -> dict[str, list[float]]:
    """Return what a settled step has cost: bytes of all ranks, seconds of the slowest one."""
    nbytes = np.array([cost.dense_bytes, cost.bytes_sent], np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, nbytes, op=world.mpi.SUM)
    slowest = world.slowest([cost.encode_s, cost.wire_s, cost.decode_s])
    names = ("dense_bytes", "sent_bytes", "host_bytes", "encode_s", "wire_s", "decode_s")
    return {name: [value / steps] for name, value in zip(names, (*nbytes, host_bytes, *slowest))}


REDUCERS = Benchmark("reducers", _cases, measure, rows, columns)
