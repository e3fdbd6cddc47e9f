"""Trains a transformer by several methods in turn, and makes rows of times, losses and costs."""

import gc
import logging
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...record.statistics import Statistics
from ..arguments import above_zero, checked, positive, seeds
from ..files import Row
from ..units import parse_count
from . import timing
from .benchmark import LEVELS, Measurement
from .gradients import check_parameters
from .options import declare_jobs
from .peers import refuse_missing_torch
from .world import World

if TYPE_CHECKING:
    from .torch_training import Texts, Training, TrainingMethod

_log = logging.getLogger("mpiring")

ALONE = "alone"
DENSE = "dense"
LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.05}
_KIND = "transformer"
_REHEARSED_STEPS, _REHEARSED_WIDTH, _REHEARSED_RATE = 2, 64, 1e-3
# The first step builds the buckets again, the second is the first to write to their memory.
UNSETTLED_STEPS = 2
# By default, the loss that the plain mean reaches after this share of its steps is the target,
# rounded up, so that no method misses it by a rounding error.
_TARGET_SHARE = 0.8
_TARGET_PARTS = 100
_INTERFACES = Path("/sys/class/net")
_LOOPBACK = "lo"


def declare(parser: ArgumentParser) -> None:
    """Declare the options of the model, the data, and when to compute the loss."""
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


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: Name of the method.
        seed: Seed of the choice of texts.
        rate: Returns the learning rate, given what was measured before.
    """

    method: str
    seed: int
    rate: Callable[[Sequence[Measurement]], float]


def measure(world: World, options: Namespace, key: str, runs: Sequence[Run],
            join: Callable[[str, Any, Any, bool], "TrainingMethod"],
            pauses: Callable[[int], Callable[[], object]] | None = None,
            **labels: Any) -> Iterator[list[Measurement]]:
    """Train again and again; yield after each training, after the last one all measurements.

    Args:
        key: What the rows call a method.
        runs: Trainings, in their order.
        join: Returns how the ranks train, given the method's name, a module, its optimizer, and
            whether it is a rehearsal.
        pauses: Returns what is called in each step of this rank, given the seed.
        labels: Further labels of the measurements.

    Raises:
        MissingDependencyError: There is no PyTorch.
        WrongAnswerError: A method's parameters differ between ranks in the end.

    Collective: yes. Blocking: yes.
    """
    world.everywhere(refuse_missing_torch)
    from ...torch import share_cores
    from . import torch_training
    share_cores(world.comm)
    texts = torch_training.standard_library(world, options.validation_texts)
    width = torch_training.width_for(_KIND, options.parameters)
    world.warm_up()

    def begin(method: str, seed: int, rate: float, rehearsal: bool = False) -> "Training":
        dice = np.random.default_rng([seed, world.rank])
        batches = torch_training.drawn_from(texts.training, options.batch, dice)
        model = torch_training.model_of(_KIND, _REHEARSED_WIDTH if rehearsal else width)
        optimizer = torch_training.OPTIMIZERS[options.optimizer](model.parameters(), lr=rate)
        return torch_training.Training(
            method, model, join(method, model, optimizer, rehearsal),
            batches if pauses is None else _paused(batches, pauses(seed)))

    for method in dict.fromkeys(run.method for run in runs):
        _rehearse(world, begin(method, 0, _REHEARSED_RATE, rehearsal=True), texts)
    traffic, measurements = HostTraffic(world), list[Measurement]()
    for number, run in enumerate(runs, 1):
        rate = run.rate(measurements)
        training = begin(run.method, run.seed, rate)
        readings = learn(world, options, training, texts, traffic, run.seed)
        measurements.append(Measurement({
            key: run.method, "settings": training.method.settings,
            "parameters": training.parameter_count, "seed": run.seed, "batch": options.batch,
            "optimizer": options.optimizer, "learning_rate": rate, **labels,
            "thread_level": world.thread_level}, readings))
        del training
        # Modules and their hooks refer to each other.
        gc.collect()
        yield measurements if number == len(runs) else []


def _paused(batches: Iterator[Any], pause: Callable[[], object]) -> Iterator[Any]:
    while True:
        pause()
        yield next(batches)


def _rehearse(world: World, training: "Training", texts: "Texts") -> None:
    """Train a little, so that all code is loaded and compiled.

    Collective: yes. Blocking: yes.
    """
    _take_steps(training, _REHEARSED_STEPS)
    with training.method.show():
        _bits_per_byte(world, training, texts)
    training.method.finish()


def learn(world: World, options: Namespace, training: "Training", texts: "Texts",
          traffic: "HostTraffic", seed: int) -> dict[str, list[float]]:
    """Train to the end, or to the time limit, and check that ranks agree; return the readings.

    Steps between two barriers have their mean as their time; to it belongs what it takes to show
    the parameters, in the last of them, and to make all ranks agree at the end. `exposed_s` counts
    what was waited for in steps alone, not for a look, nor at the end.

    Raises:
        WrongAnswerError: Parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    readings: dict[str, list[float]] = {"step": [], "validated": [], "bits": [], "sent": []}
    seconds, limit = readings["step"], options.time_limit or math.inf
    name, method = training.name, training.method
    before, exposed_s, is_over = Statistics(), 0.0, False
    # All ranks know the slowest rank's time, and so stop at the same step.
    while not is_over:
        done = len(seconds)
        if done == options.settled:
            traffic.begin()
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
            readings |= _costs(world, cost, done - options.settled, traffic.end(cost.bytes_sent))
    if done < options.steps and world.rank == 0:
        _log.warning("%s, seed %d: stopped after %d of %d steps by --time-limit %g", name, seed,
                     done, options.steps, limit)
    return readings


def _take_steps(training: "Training", count: int) -> None:
    """Take some steps, after which ranks may wait for each other.

    Collective: yes. Blocking: yes.
    """
    for _ in range(count):
        training.step()
    training.method.meet()


def _validate(world: World, training: "Training", texts: "Texts",
              readings: dict[str, list[float]]) -> float:
    """Append the loss, and the bytes sent so far; return the seconds to show the parameters."""
    with ExitStack() as shown:
        took_s = _timed(world, lambda: shown.enter_context(training.method.show()))
        readings["bits"].append(_bits_per_byte(world, training, texts))
    readings["sent"] += _sum(world, [training.method.statistics.bytes_sent])
    return took_s


def _next_stop(done: int, options: Namespace) -> int:
    """Return after how many steps the ranks next meet to read clocks, losses or counters."""
    next_look = (done // options.validate_every + 1) * options.validate_every
    stops: list[int] = [done + options.stretch, next_look, options.settled, options.steps]
    return min(stop for stop in stops if stop > done)


def _timed(world: World, action: timing.Action) -> float:
    return timing.timed(world, action, 1)[0]


def _bits_per_byte(world: World, training: "Training", texts: "Texts") -> float:
    """Return the loss on the validation texts, of which each rank predicts a share."""
    from . import torch_training
    bits, nbytes = _sum(world, torch_training.bits_and_bytes(
        training.module, texts.validation[world.rank::world.size]))
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


class HostTraffic:
    """Counts the bytes that all hosts send, all headers included.

    Args:
        world: The ranks on these hosts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = sent_bytes()

    def begin(self) -> None:
        """Count from here on.

        Collective: yes. Blocking: yes.
        """
        self._world.barrier()
        self._before = sent_bytes()

    def end(self, known_bytes: int) -> float:
        """Return what all hosts have sent since `begin`.

        Args:
            known_bytes: Bytes that this rank has sent at least.

        Returns:
            NaN where all ranks are on one host, and where a counter shows less than a rank has
            sent, as with InfiniBand, whose messages bypass the system.

        Collective: yes. Blocking: yes.
        """
        self._world.barrier()
        comm, counted = self._world.comm, grown(self._before, sent_bytes())
        ranks = comm.allgather_object((known_bytes, counted, comm.local_rank))
        least = min(known for known, _, _ in ranks)
        if comm.num_nodes == 1 or any(grew < least for _, grew, _ in ranks):
            return math.nan
        return float(sum(grew for _, grew, local_rank in ranks if local_rank == 0))


def sent_bytes(interfaces: Path = _INTERFACES) -> dict[str, int]:
    """Return the bytes that each network interface has sent, without the loopback."""
    return {path.name: int((path / "statistics/tx_bytes").read_text())
            for path in interfaces.glob("*") if path.name != _LOOPBACK and path.is_dir()}


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    """Return the growth of the interface that has sent the most.

    Not that of all: a bridge, a bond and its members count the same bytes.
    """
    return max((after[name] - before[name] for name in before.keys() & after.keys()), default=0)


@dataclass(frozen=True)
class LossCurve:
    """A validation loss as training goes on: means over seeds.

    Attributes:
        steps: Those after which it was computed.
        seconds: Of training until then.
        bits: Per byte.
        sent: Bytes that all ranks together have sent until then.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def at(self, step: int) -> float:
        """Return the loss after one of `steps`."""
        return self.bits[self.steps.index(step)]

    def seconds_to(self, target: float) -> float:
        """Return when the loss was first seen at or below a target; NaN if never."""
        return next((seconds for seconds, bits in zip(self.seconds, self.bits) if bits <= target),
                    math.nan)


def _curve_of(trainings: Sequence[Measurement]) -> LossCurve:
    """Return the mean curve of trainings with several seeds, as far as all of them have come."""
    def by_step(name: str) -> list[dict[int, float]]:
        return [dict(zip(map(int, training.readings["validated"]), training.readings[name]))
                for training in trainings]

    bits, sent = by_step("bits"), by_step("sent")
    steps = [step for step in bits[0] if all(step in its for its in bits)]
    return LossCurve(
        steps,
        [mean([sum(training.readings["step"][:step]) for training in trainings])
         for step in steps],
        [mean([its[step] for its in bits]) for step in steps],
        [mean([its[step] for its in sent]) for step in steps])


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def _default_target(dense: LossCurve) -> float:
    """Return the loss that dense reaches after a share of its steps, rounded up; NaN of nothing."""
    late = [bits for step, bits in zip(dense.steps, dense.bits)
            if step >= _TARGET_SHARE * dense.steps[-1]]
    if not late or not math.isfinite(late[0]):
        return math.nan
    return math.ceil(late[0] * _TARGET_PARTS) / _TARGET_PARTS


def reading(trainings: Sequence[Measurement], name: str) -> float:
    """Return the mean of a reading over trainings; NaN where none has it."""
    values = [training.readings[name][0] for training in trainings if name in training.readings]
    return mean(values) if values else math.nan


def ratio(more: float, less: float) -> float:
    """Return a ratio; NaN where one of both is nothing."""
    return more / less if more and less else math.nan


def _accuracy(trainings: Sequence[Measurement], dense: LossCurve, target: float) -> Row:
    """Return the loss, and the time until the target; compared after equally many steps."""
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
    """Return the loss minus dense's, at the last step that both have."""
    common = [step for step in curve.steps if step in dense.steps]
    # Less than a ten thousandth of a bit means nothing; -0.0 + 0.0 is 0.0.
    return round(curve.at(common[-1]) - dense.at(common[-1]), 4) + 0.0 if common else math.nan


def rows(trainings: Mapping[str, Sequence[Measurement]], options: Namespace,
         costs: Callable[[Sequence[Measurement]], Row]) -> list[Row]:
    """Return a row for each method: labels, costs and losses.

    Args:
        trainings: Trainings by each method, of several seeds.
        costs: Returns the costs of a method's trainings.
    """
    dense = _curve_of(trainings[DENSE]) if DENSE in trainings else LossCurve()
    target = options.target_loss or _default_target(dense)
    return [{
        **{key: value for key, value in runs[0].labels.items() if key != "seed"},
        "seeds": len(runs), **costs(runs), **_accuracy(runs, dense, target),
    } for runs in trainings.values()]
