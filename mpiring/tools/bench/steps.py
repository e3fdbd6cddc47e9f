"""Measures training steps of a NumPy model: alone, with mpiring, and with one call after each."""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ...memory.arrays import Array
from ...numpy import DataParallel
from ..files import Environment, Row
from ..table import Column
from . import timing
from .command import Benchmark
from .contenders import Contender, chosen
from .inputs import WrongAnswerError
from .memory import Growth
from .results import Measurement
from .world import World

ALONE = "compute only"
OURS = "mpiring DataParallel"
GLOO = "Gloo + PyTorch's DDP"

_LEARNING_RATE = np.float32(1e-3)
# Gradients come from sums of float32 in another order.
_TOLERANCE = 1e-4
_WARM_BYTES = 1 << 20

Gradients = Mapping[str, Array]
Action = Callable[[], object]
Readings = dict[str, list[float]]


class Network:
    """A multilayer perceptron, with forward and backward pass by hand.

    Args:
        width: Of every layer.
        layers: How many there are.
        batch: Rows of data.
        rank: Ranks have equal weights, but data of their own.

    Attributes:
        params: By name.
        names_as_ready: In the order in which `backward` computes their gradients.
    """

    def __init__(self, width: int, layers: int, batch: int, rank: int) -> None:
        weights, data = np.random.default_rng(0), np.random.default_rng(1 + rank)
        self._layers = range(layers)
        self.params: dict[str, Array] = {}
        for layer in self._layers:
            values = weights.standard_normal((width, width), np.float32)
            self.params[f"w{layer}"] = values * np.float32(np.sqrt(2 / width))
            self.params[f"b{layer}"] = np.zeros(width, np.float32)
        self.names_as_ready = [
            f"{kind}{layer}" for layer in reversed(self._layers) for kind in "wb"]
        self._x = data.standard_normal((batch, width), np.float32)
        self._y = data.standard_normal((batch, width), np.float32)

    def backward(self, gradients: Gradients, ready: Callable[[str], object]) -> None:
        """Compute the gradients of half the mean squared error, the last layer's first.

        Args:
            gradients: Are written, by name.
            ready: Is told each name as soon as its gradient is written.
        """
        inputs, x = [], self._x
        for layer in self._layers:
            inputs.append(x)
            x = x @ self.params[f"w{layer}"] + self.params[f"b{layer}"]
            if layer != self._layers[-1]:
                x = np.maximum(x, 0)
        error = (x - self._y) / np.float32(x.size)
        for layer in reversed(self._layers):
            np.matmul(inputs[layer].T, error, out=gradients[f"w{layer}"])
            ready(f"w{layer}")
            np.sum(error, axis=0, out=gradients[f"b{layer}"])
            ready(f"b{layer}")
            if layer:
                error = (error @ self.params[f"w{layer}"].T) * (inputs[layer] > 0)

    def update(self, gradients: Gradients) -> None:
        """Take a step down the gradients."""
        for name, value in self.params.items():
            value -= _LEARNING_RATE * gradients[name]


class _Variant:
    """A way to take training steps.

    Attributes:
        gradients: Returns what the last step has used.
        own_bytes: Of the gradients, where they were made together with the variant.
    """

    def __init__(self, name: str, network: Network, combine: Callable[[], object],
                 gradients: Callable[[], Gradients],
                 ready: Callable[[str], object] = lambda name: None, own_bytes: int = 0) -> None:
        self.name, self.gradients, self.own_bytes = name, gradients, own_bytes
        self._network, self._combine, self._ready = network, combine, ready

    def step(self) -> None:
        """Take one step."""
        self._network.backward(self.gradients(), self._ready)
        self._combine()
        self._network.update(self.gradients())

    def communicate(self) -> None:
        """Do what a step does with gradients, without the computation and its memory."""
        gradients = self.gradients()
        for name in self._network.names_as_ready:
            gradients[name][...] = 1
            self._ready(name)
        self._combine()


def _views(flat: Array, params: Mapping[str, Array]) -> Gradients:
    """Return views of a vector, one after the other, of the parameters' shapes."""
    ends = np.cumsum([value.size for value in params.values()])
    return {name: flat[end - value.size:end].reshape(value.shape)
            for (name, value), end in zip(params.items(), ends)}


def _while_computing(world: World, network: Network, bucket_bytes: int) -> _Variant:
    """Return steps in which DataParallel averages the gradients during backward."""
    dp = DataParallel(network.params, world.comm, bucket_bytes=bucket_bytes)
    return _Variant(OURS, network, dp.wait, lambda: dp.grads, dp.ready,
                    sum(value.nbytes for value in network.params.values()))


def _after_backward(contender: Contender, network: Network, flat: Array, size: int) -> _Variant:
    """Return steps in which one blocking call combines all gradients at once."""
    call, views, share = contender.blocking(flat), _views(flat, network.params), flat.dtype.type(
        1 / size)

    def combine() -> None:
        call()
        np.multiply(flat, share, out=flat)

    return _Variant(f"{contender.name} after backward", network, combine, lambda: views)


def _makers(world: World, options: Namespace) -> list[Callable[[], _Variant]]:
    """Return what makes the variants; their parameters exist already, and gradients but ours."""
    def network() -> Network:
        return Network(options.width, options.layers, options.batch, world.rank)

    alone = network()
    length = sum(value.size for value in alone.params.values())
    flat = world.comm.empty(length, np.float32)
    # Written to, so that it has memory of its own.
    flat[...] = 1
    views = _views(np.ones(length, np.float32), alone.params)
    return [
        partial(_Variant, ALONE, alone, lambda: None, lambda: views),
        partial(_while_computing, world, network(), options.bucket),
        *(partial(_after_backward, contender, network(), flat, world.size) for contender in chosen(
            world, options.contenders, ["auto"], options.interface)),
    ]


def warm_up(world: World) -> None:
    """Take the memory that a process's first messages cost, whoever sends them.

    Collective: yes. Blocking: yes.
    """
    few, many = np.ones(world.size), np.ones(world.size * _WARM_BYTES // 8)
    world.comm.iallreduce(few).wait()
    world.comm.allreduce(few)
    world.raw.Alltoall(many, np.empty_like(many))


def _begun(world: World, make: Callable[[], _Variant], right: Mapping[str, Array],
           ) -> tuple[_Variant, float]:
    """Make and check a variant; return it, and the bytes that it has beyond the gradients."""
    growth = Growth(world.comm.local_size)
    variant = make()
    # The first step of all starts from the same weights, so that it can be checked.
    variant.step()
    if variant.name != ALONE:
        check(world, variant.name, variant.gradients(), right)
    variant.step()
    growth.forget_peak()
    variant.communicate()
    variant.communicate()
    return variant, world.slowest([growth.most_bytes() - variant.own_bytes])[0]


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all variants in each round; the last one yields them all.

    Collective: yes. Blocking: yes.
    """
    right = _mean_gradients(world, options)
    warm_up(world)
    begun = [_begun(world, make, right) for make in _makers(world, options)]
    actions = {variant.name: {"step": variant.step} for variant, _ in begun}
    readings: dict[str, Readings] = {}
    for count, readings in enumerate(in_turns(world, options, actions), 1):
        if count < options.rounds:
            yield []
    for variant, extra in begun:
        readings[variant.name]["extra_bytes"] = [extra]
    labels = {"parameters": sum(value.size for value in right.values()),
              "batch": options.batch, "thread_level": world.thread_level}
    yield [Measurement({**labels, "contender": name}, found) for name, found in readings.items()]


def in_turns(world: World, options: Namespace, subjects: Mapping[str, Mapping[str, Action]],
             prepare: Action = lambda: None,
             stopwatch: timing.Stopwatch = timing.by_clock) -> Iterator[dict[str, Readings]]:
    """Time what each subject does, in rounds of random order; yield all readings in each round.

    Args:
        subjects: Their actions, by name; each is called once in a round before it is timed.
        prepare: Is called before each timed call.
        stopwatch: See `timing.timed`.

    Collective: yes. Blocking: yes.
    """
    readings: dict[str, Readings] = {
        name: {kind: [] for kind in actions} for name, actions in subjects.items()}
    dice = random.Random(options.seed)
    for _ in range(options.rounds):
        for name in dice.sample(list(subjects), len(subjects)):
            for kind, action in subjects[name].items():
                action()
                readings[name][kind] += timing.timed(
                    world, action, options.calls, prepare=prepare, stopwatch=stopwatch)
        yield readings


def _mean_gradients(world: World, options: Namespace) -> dict[str, Array]:
    """Return the means over ranks of the first step's gradients, in float64."""
    network = Network(options.width, options.layers, options.batch, world.rank)
    mine = {name: np.empty_like(value) for name, value in network.params.items()}
    network.backward(mine, lambda name: None)
    return means_over_ranks(world, mine)


def means_over_ranks(world: World, mine: Mapping[str, Array]) -> dict[str, Array]:
    """Return the means of all ranks' arrays, in float64, by MPI.

    Collective: yes. Blocking: yes.
    """
    means = {}
    for name, value in mine.items():
        means[name] = value.astype(np.float64, order="C") / world.size
        world.raw.Allreduce(world.mpi.IN_PLACE, means[name], op=world.mpi.SUM)
    return means


def check(world: World, contender: str, found: Mapping[str, Array],
          right: Mapping[str, Array]) -> None:
    """Raise on all ranks if on any of them a gradient is not the mean.

    Raises:
        WrongAnswerError: One differs by more than rounding does.

    Collective: yes. Blocking: yes.
    """
    rank, wrong = first_wrong(world, found, right)
    if wrong:
        raise WrongAnswerError(f"{contender} on rank {rank}: the gradients {wrong} are not the "
                               f"means over ranks")


def first_wrong(world: World, found: Mapping[str, Array], right: Mapping[str, Array],
                ) -> tuple[int, list[str]]:
    """Return the lowest rank on which arrays differ from others, and their names, if there is one.

    Collective: yes. Blocking: yes.
    """
    wrong = [name for name, value in right.items() if not close_to(found[name], value)]
    return next(filter(lambda one: one[1], enumerate(world.raw.allgather(wrong))), (0, []))


def close_to(value: Array, right: Array) -> bool:
    """Return whether arrays differ by no more than rounding, at the size of the largest number."""
    return np.allclose(value, right, rtol=_TOLERANCE, atol=_TOLERANCE * np.abs(right).max())


def rows(found: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each variant, compared with the compute alone at its thread level."""
    alone = {measurement.labels["thread_level"]: timing.median(measurement.readings["step"])
             for measurement in found if measurement.labels["contender"] == ALONE}
    table = []
    for measurement in found:
        seconds, labels = measurement.readings["step"], measurement.labels
        median = timing.median(seconds)
        table.append({
            **labels,
            "steps": len(seconds),
            "median_ms": median * 1e3,
            "p95_ms": timing.p95(seconds) * 1e3,
            "samples_per_s": labels["batch"] * about["ranks"] / median,
            "extra_MiB": max(measurement.readings["extra_bytes"]) / 2 ** 20,
            "efficiency_percent": 100 * alone[labels["thread_level"]] / median,
        })
    return table


def columns(several_levels: bool) -> list[Column]:
    """Return the columns of the table."""
    level = [Column("thread_level", "threads", -10)] if several_levels else []
    return [
        Column("parameters", "parameters", 10), Column("batch", "batch", 6),
        Column("contender", "training step", -32), *level,
        Column("median_ms", "median ms", 10, 4), Column("p95_ms", "p95 ms", 10, 4),
        Column("samples_per_s", "samples/s", 10, 4),
        Column("efficiency_percent", "efficiency %", 12, 3),
        Column("extra_MiB", "extra MiB", 9, 3),
    ]


STEPS = Benchmark("steps", lambda options: int(options.rounds), measure, rows, columns)
