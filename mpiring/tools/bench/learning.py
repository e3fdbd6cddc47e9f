"""Trains with one method, and takes times, losses and costs."""

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...record.statistics import Statistics
from ..arguments import above_zero, checked, positive, seeds
from ..units import parse_count
from . import timing
from .curves import ALONE
from .gradients import check_parameters
from .jobs import LEVELS
from .options import declare_jobs
from .wire import Traffic
from .world import World

if TYPE_CHECKING:
    from .torch_training import Task, Training

_log = logging.getLogger("mpiring")

LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.05}


_REHEARSED_STEPS = 2
_REHEARSED_WIDTH = 64
# The first step builds the buckets anew, the second is the first to write to their memory.
UNSETTLED_STEPS = 2


def declare(parser: ArgumentParser) -> None:
    """Declare the options of the model, the data, and when to look at the loss."""
    parser.set_defaults(rounds=None, levels=list(LEVELS[:1]))
    parser.add_argument("--parameters", type=checked(parse_count), default=13_000_000,
                        metavar="N", help="about how many the transformer has; default: 13M")
    parser.add_argument("--steps", type=positive, default=100, help="default: 100")
    parser.add_argument("--batch", type=positive, default=4, metavar="TEXTS",
                        help="of 64 bytes, per rank; default: 4")
    parser.add_argument("--optimizer", choices=tuple(LEARNING_RATES), default="adamw",
                        help="default: adamw; sgd has no momentum")
    parser.add_argument("--seeds", type=seeds, default=[1], metavar="A,B",
                        help="of the choice of texts, a training each; default: 1")
    parser.add_argument("--validate-every", type=positive, metavar="STEPS",
                        help="default: a twentieth of the steps")
    parser.add_argument("--validation-texts", type=positive, default=128, metavar="TEXTS",
                        help="of 64 bytes; default: 128")
    parser.add_argument("--target-loss", type=above_zero, metavar="BITS",
                        help="per byte; default: what dense reaches after 80%% of its steps, "
                             "rounded up to a hundredth")
    parser.add_argument("--time-limit", type=above_zero, metavar="SECONDS",
                        help="of training, validation not counted, for each method and seed")
    declare_jobs(parser)


def narrow(task: "Task") -> "Task":
    """Return a task with a narrow model, to rehearse with."""
    return replace(task, width=_REHEARSED_WIDTH)


def rehearse(world: World, training: "Training") -> None:
    """Train a little, so that all code is loaded and compiled.

    Collective: yes. Blocking: yes.
    """
    training.steps(_REHEARSED_STEPS)
    with training.show():
        bits_per_byte(world, training)
    training.finish()


def learn(world: World, options: Namespace, training: "Training", traffic: Traffic, name: str,
          seed: int) -> dict[str, list[float]]:
    """Train to the end, or to the time limit, and check that ranks agree; return the readings.

    Steps between two barriers have their mean as their time; to it belongs what it takes to show
    the parameters, in the last of them, and to make all ranks agree at the end. `exposed_s` counts
    what was waited for in steps alone, not for a look, nor at the end.

    Raises:
        WrongAnswerError: Parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    readings: dict[str, list[float]] = {"step": [], "validated": [], "bits": [], "sent": []}
    seconds, limit = readings["step"], options.time_limit or float("inf")
    before, exposed_s, is_over = Statistics(), 0.0, False
    # All ranks know the slowest rank's time, and so stop at the same step.
    while not is_over:
        done = len(seconds)
        if done == options.settled:
            traffic.begin()
            before, exposed_s = training.statistics, 0.0
        count = _next_stop(done, options) - done
        done += count
        exposed_s -= training.statistics.exposed_s
        took_s = _timed(world, partial(training.steps, count))
        exposed_s += training.statistics.exposed_s
        is_over = done == options.steps or sum(seconds) + took_s >= limit
        if is_over:
            took_s += _timed(world, training.finish)
        if name != ALONE and (is_over or done % options.validate_every == 0):
            readings["validated"].append(done)
            took_s += _validate(world, training, readings)
        seconds += [took_s / count] * count
    if name != ALONE:
        check_parameters(world, {name: training.parameters()})
        if done > options.settled:
            cost = replace(training.statistics - before, exposed_s=exposed_s)
            readings |= _costs(world, cost, done - options.settled, traffic.end(cost.bytes_sent))
    if done < options.steps and world.rank == 0:
        _log.warning("%s, seed %d: stopped after %d of %d steps by --time-limit %g", name, seed,
                     done, options.steps, limit)
    return readings


def _validate(world: World, training: "Training", readings: dict[str, list[float]]) -> float:
    """Append the loss, and the bytes sent so far; return the seconds to show the parameters."""
    with ExitStack() as shown:
        took_s = _timed(world, lambda: shown.enter_context(training.show()))
        readings["bits"].append(bits_per_byte(world, training))
    readings["sent"] += _sum(world, [training.statistics.bytes_sent])
    return took_s


def _next_stop(done: int, options: Namespace) -> int:
    """Return after how many steps the ranks next meet to look at clocks, losses or counters."""
    next_look = (done // options.validate_every + 1) * options.validate_every
    stops: list[int] = [done + options.stretch, next_look, options.settled, options.steps]
    return min(stop for stop in stops if stop > done)


def _timed(world: World, action: timing.Action) -> float:
    return timing.timed(world, action, 1)[0]


def bits_per_byte(world: World, training: "Training") -> float:
    """Return the loss on the validation texts, of which each rank predicts a share."""
    bits, nbytes = _sum(world, training.validate())
    return bits / nbytes


def _sum(world: World, values: Sequence[float]) -> list[float]:
    """Return the sums of values over all ranks."""
    total = np.array(values, np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, total, op=world.mpi.SUM)
    return [float(value) for value in total]


def _costs(world: World, cost: Statistics, steps: int, host_bytes: float) -> dict[str, list[float]]:
    """Return the costs of a settled step: bytes of all ranks, seconds of the slowest rank."""
    nbytes = _sum(world, [cost.dense_bytes, cost.bytes_sent])
    slowest = world.slowest([cost.encode_s, cost.wire_s, cost.decode_s, cost.exposed_s])
    names = ("dense_bytes", "sent_bytes", "host_bytes", "encode_s", "wire_s", "decode_s",
             "exposed_s")
    return {name: [value / steps] for name, value in zip(names, (*nbytes, host_bytes, *slowest))}
