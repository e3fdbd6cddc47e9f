"""Trains a transformer on real text by several methods, and makes rows of losses and costs."""

import gc
import logging
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpiring import Statistics
from mpiring.tools.arguments import above_zero, positive, seeds
from mpiring.tools.bench import timing
from mpiring.tools.bench.benchmark import Measurement
from mpiring.tools.bench.gradients import check_parameters
from mpiring.tools.bench.peers import refuse_missing_torch
from mpiring.tools.bench.reducers import (
    ALONE, DENSE, KIND, HostTraffic, costs_of_step, declare_training,
)
from mpiring.tools.bench.world import World
from mpiring.tools.table import Row

if TYPE_CHECKING:
    from mpiring.tools.bench.torch_training import Training

    from .methods import Method
    from .texts import Texts

_log = logging.getLogger("mpiring")

_REHEARSED_STEPS, _REHEARSED_WIDTH, _REHEARSED_RATE = 2, 64, 1e-3
# By default, the target is the loss that the plain mean reaches after this share of its steps. It
# is rounded up, so that no method misses it by a rounding error.
_TARGET_SHARE = 0.8
_TARGET_PARTS = 100


def declare_learning(parser: ArgumentParser) -> None:
    """Declare the options of the model, the data, and the validation."""
    declare_training(parser)
    parser.add_argument("--seeds", type=seeds, default=[1], metavar="A,B",
                        help="seeds of the choice of texts, with a training each (default: 1)")
    parser.add_argument("--validate-every", type=positive, metavar="STEPS",
                        help="steps between two validations (default: a twentieth of all)")
    parser.add_argument("--validation-texts", type=positive, default=128, metavar="TEXTS",
                        help="number of validation texts of 64 bytes (default: 128)")
    parser.add_argument("--target-loss", type=above_zero, metavar="BITS",
                        help="target in bits per byte (default: loss of dense after 80%% of its "
                             "steps, rounded up to a hundredth)")
    parser.add_argument("--time-limit", type=above_zero, metavar="SECONDS",
                        help="time limit of each training, without validation")


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: Name of the method.
        seed: Seed of the choice of texts.
        rate: Returns the learning rate, given the previous measurements.
    """

    method: str
    seed: int
    rate: Callable[[Sequence[Measurement]], float]


def measure(world: World, options: Namespace, key: str, runs: Sequence[Run],
            join: Callable[[str, Any, Any, bool], "Method"],
            pauses: Callable[[int], Callable[[], object]] | None = None,
            **labels: Any) -> Iterator[list[Measurement]]:
    """Run all trainings; yield after each, and after the last one yield all measurements.

    Args:
        world: The ranks.
        options: Options of the study.
        key: Name of a method's column in the rows.
        runs: Trainings, in their order.
        join: Function that returns a Method, given its name, a module, its optimizer, and whether
            this is a rehearsal.
        pauses: Function of the seed that returns a function to call in each step of this rank.
        labels: Further labels of the measurements.

    Raises:
        MissingDependencyError: There is no PyTorch.
        WrongAnswerError: A method's final parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    world.call_on_all(refuse_missing_torch)
    from mpiring.tools.bench import torch_training
    from mpiring.torch import share_cores
    from .texts import OPTIMIZERS, random_batches, standard_library
    share_cores(world.comm)
    texts = standard_library(world, options.validation_texts)
    width = torch_training.width_for(KIND, options.parameters)
    world.warm_up()

    def begin(name: str, seed: int, rate: float, rehearsal: bool = False) -> "Training":
        rng = np.random.default_rng([seed, world.rank])
        batches = random_batches(texts.training, options.batch, rng)
        module = torch_training.model_of(KIND, _REHEARSED_WIDTH if rehearsal else width)
        method = join(name, module, OPTIMIZERS[options.optimizer](module.parameters(), lr=rate),
                      rehearsal)
        return torch_training.Training(
            name, module, method.model, method,
            batches if pauses is None else _paused(batches, pauses(seed)))

    for method in dict.fromkeys(run.method for run in runs):
        _rehearse(world, begin(method, 0, _REHEARSED_RATE, rehearsal=True), texts)
    measurements: list[Measurement] = []
    for number, run in enumerate(runs, 1):
        rate = run.rate(measurements)
        training = begin(run.method, run.seed, rate)
        readings = learn(world, options, training, texts, run.seed)
        measurements.append(Measurement({
            key: run.method, "settings": training.optimizer.settings,
            "parameters": training.parameter_count, "seed": run.seed, "batch": options.batch,
            "optimizer": options.optimizer, "learning_rate": rate, **labels,
            "thread_level": world.thread_level}, readings))
        del training
        # Modules and their hooks form reference cycles.
        gc.collect()
        yield measurements if number == len(runs) else []


def _paused(batches: Iterator[Any], pause: Callable[[], object]) -> Iterator[Any]:
    while True:
        pause()
        yield next(batches)


def _rehearse(world: World, training: "Training", texts: "Texts") -> None:
    """Train for a few steps, so that all code is loaded and compiled.

    Collective: yes. Blocking: yes.
    """
    _take_steps(training, _REHEARSED_STEPS)
    with training.optimizer.validation_parameters():
        _bits_per_byte(world, training, texts)
    training.optimizer.finish()


def learn(world: World, options: Namespace, training: "Training", texts: "Texts",
          seed: int) -> dict[str, list[float]]:
    """Train to the end or to the time limit, and check that ranks agree; return the readings.

    The time of a step is the mean over all steps between two barriers. It includes the time to
    prepare the parameters for validation, and to synchronize all ranks at the end. `exposed_s`
    covers only waiting in steps, not in validation or at the end.

    Raises:
        WrongAnswerError: Parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    readings: dict[str, list[float]] = {"step": [], "validated": [], "bits": [], "sent": []}
    seconds, limit = readings["step"], options.time_limit or math.inf
    name, method = training.name, training.optimizer
    before, exposed_s, is_over = Statistics(), 0.0, False
    # All ranks know the slowest rank's time, so all stop at the same step.
    while not is_over:
        done = len(seconds)
        if done == options.settled:
            traffic = HostTraffic(world)
            before, exposed_s = method.statistics, 0.0
        count = _next_stop(done, options) - done
        done += count
        exposed_s -= method.statistics.exposed_s
        took_s = _timed(world, partial(_take_steps, training, count))
        exposed_s += method.statistics.exposed_s
        is_over = done == options.steps or sum(seconds) + took_s >= limit
        if is_over:
            took_s += _timed(world, method.finish)
        if name != ALONE and (is_over or done % options.validate_every == 0):
            readings["validated"].append(done)
            took_s += _validate(world, training, texts, readings)
        seconds += [took_s / count] * count
    if name != ALONE:
        check_parameters(world, {name: training.parameters()})
        if done > options.settled:
            cost = replace(method.statistics - before, exposed_s=exposed_s)
            readings |= costs_of_step(
                world, cost, done - options.settled, traffic.end(cost.bytes_sent))
    if done < options.steps and world.rank == 0:
        _log.warning("%s, seed %d: stopped after %d of %d steps by --time-limit %g", name, seed,
                     done, options.steps, limit)
    return readings


def _take_steps(training: "Training", count: int) -> None:
    """Take some steps; afterwards, ranks may wait for each other.

    Collective: yes. Blocking: yes.
    """
    for _ in range(count):
        training.step()
    training.optimizer.before_barrier()


def _validate(world: World, training: "Training", texts: "Texts",
              readings: dict[str, list[float]]) -> float:
    """Append the loss and the sent bytes; return the seconds to prepare the parameters."""
    with ExitStack() as shown:
        took_s = _timed(
            world, lambda: shown.enter_context(training.optimizer.validation_parameters()))
        readings["bits"].append(_bits_per_byte(world, training, texts))
    readings["sent"] += _sum(world, [training.optimizer.statistics.bytes_sent])
    return took_s


def _next_stop(done: int, options: Namespace) -> int:
    """Return the step at which ranks next synchronize to read clocks, losses or counters."""
    next_validation = (done // options.validate_every + 1) * options.validate_every
    stops: list[int] = [done + options.stretch, next_validation, options.settled, options.steps]
    return min(stop for stop in stops if stop > done)


def _timed(world: World, action: timing.Action) -> float:
    return timing.timed(world, action, 1)[0]


def _bits_per_byte(world: World, training: "Training", texts: "Texts") -> float:
    """Return the loss on the validation texts, which are divided among ranks."""
    from .texts import bits_and_bytes
    bits, nbytes = _sum(world, bits_and_bytes(
        training.module, texts.validation[world.rank::world.size]))
    return bits / nbytes


def _sum(world: World, values: Sequence[float]) -> list[float]:
    """Return the sums of values over all ranks."""
    total = np.array(values, np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, total, op=world.mpi.SUM)
    return [float(value) for value in total]


class LossCurve(NamedTuple):
    """The validation loss during training, as means over seeds.

    Attributes:
        steps: Steps after which the loss was computed.
        seconds: Training times up to these steps.
        bits: Losses in bits per byte.
        sent: Bytes that all ranks together have sent up to these steps.
    """

    steps: list[int]
    seconds: list[float]
    bits: list[float]
    sent: list[float]

    def at(self, step: int) -> float:
        """Return the loss after one of `steps`."""
        return self.bits[self.steps.index(step)]

    def seconds_to(self, target: float) -> float:
        """Return the time of the first loss at or below a target; NaN if there is none."""
        return next((seconds for seconds, bits in zip(self.seconds, self.bits) if bits <= target),
                    math.nan)


def _curve_of(trainings: Sequence[Measurement]) -> LossCurve:
    """Return the mean curve of trainings with several seeds, up to the end of the shortest."""
    def by_step(name: str) -> list[dict[int, float]]:
        return [dict(zip(map(int, training.readings["validated"]), training.readings[name]))
                for training in trainings]

    bits, sent = by_step("bits"), by_step("sent")
    steps = [step for step in bits[0] if all(step in curve for curve in bits)]
    return LossCurve(
        steps,
        [fmean([sum(training.readings["step"][:step]) for training in trainings])
         for step in steps],
        [fmean([curve[step] for curve in bits]) for step in steps],
        [fmean([curve[step] for curve in sent]) for step in steps])


def _default_target(dense: LossCurve) -> float:
    """Return the loss of dense after a share of its steps, rounded up; NaN without a loss."""
    late = [bits for step, bits in zip(dense.steps, dense.bits)
            if step >= _TARGET_SHARE * dense.steps[-1]]
    if not late or not math.isfinite(late[0]):
        return math.nan
    return math.ceil(late[0] * _TARGET_PARTS) / _TARGET_PARTS


def _accuracy(trainings: Sequence[Measurement], dense: LossCurve, target: float) -> Row:
    """Return the loss, and the time until the target; losses are compared at equal steps."""
    curve = _curve_of(trainings)
    ends = [training.readings["bits"][-1] for training in trainings if training.readings["bits"]]
    seconds = curve.seconds_to(target)
    return {
        "bits_per_byte": curve.bits[-1] if curve.bits else math.nan,
        "bits_over_dense": _difference(curve, dense),
        "spread_of_seeds": max(ends) - min(ends) if len(ends) > 1 else math.nan,
        "target_bits": target,
        "seconds_to_target": seconds,
        "times_faster": dense.seconds_to(target) / seconds,
        "curve_steps": curve.steps, "curve_s": curve.seconds, "curve_bits": curve.bits,
        "curve_bytes": curve.sent}


def _difference(curve: LossCurve, dense: LossCurve) -> float:
    """Return the difference from the loss of dense, at the last step that both have."""
    common = [step for step in curve.steps if step in dense.steps]
    # Less than a ten-thousandth of a bit has no meaning; -0.0 + 0.0 is 0.0.
    return round(curve.at(common[-1]) - dense.at(common[-1]), 4) + 0.0 if common else math.nan


def rows(trainings: Mapping[str, Sequence[Measurement]], options: Namespace,
         costs: Callable[[Sequence[Measurement]], Row]) -> list[Row]:
    """Return a row for each method: labels, costs and losses.

    Args:
        trainings: Trainings by method, with several seeds.
        options: Options of the study.
        costs: Function that returns the costs of a method's trainings.
    """
    dense = _curve_of(trainings[DENSE]) if DENSE in trainings else LossCurve([], [], [], [])
    target = options.target_loss or _default_target(dense)
    return [{
        **{key: value for key, value in runs[0].labels.items() if key != "seed"},
        "seeds": len(runs), **costs(runs), **_accuracy(runs, dense, target),
    } for runs in trainings.values()]
