"""Measures training steps of a NumPy model: alone, with mpiring, and with one call after each."""

import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ...errors import ConfigError
from ...memory.arrays import Array
from ...numpy import DataParallel
from ..arguments import checked, names, positive
from ..table import Column, Environment, Row
from ..units import parse_size
from . import gradients, timing
from .benchmark import Benchmark, Measurement, run, with_case
from .contenders import ALONE, ON_CPU, OURS, Contender, chosen
from .options import (
    declare_contenders, declare_device, declare_link, declare_models, declare_turns,
    settle_contenders,
)
from .torch_steps import SHARDINGS, TORCH_ON_CPU, TORCH_ON_GPU, TORCH_STEPS
from .world import World

_LEARNING_RATE = np.float32(1e-3)

Gradients = Mapping[str, Array]


def declare(parser: ArgumentParser) -> None:
    """Declare the options, also of the steps of PyTorch models."""
    declare_device(parser)
    parser.add_argument("--framework", choices=("numpy", "torch"), default="numpy",
                        help="default: numpy")
    parser.add_argument("--batch", type=positive,
                        help="per rank; default: 64, with PyTorch one for each model")
    parser.add_argument("--bucket", type=checked(parse_size),
                        help="bytes that are fused into a message; default: 4MiB, with PyTorch "
                             "what DataParallel and DDP have by themselves")
    parser.add_argument("--calls", type=positive, default=5, help="steps per round; default: 5")
    numpy = parser.add_argument_group("with --framework numpy: a multilayer perceptron")
    numpy.add_argument("--width", type=positive, default=1024, help="default: 1024")
    numpy.add_argument("--layers", type=positive, default=3, help="default: 3")
    torch = parser.add_argument_group("with --framework torch")
    declare_models(torch)
    torch.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd",
                       help="default: sgd; adamw is PyTorch's fused one")
    torch.add_argument("--sharded", type=names(SHARDINGS), nargs="?", metavar="A,B", default=[],
                       const=list(SHARDINGS), help="also train so that ranks share the "
                       f"optimizer's work; of {', '.join(SHARDINGS)}; default: all")
    declare_link(torch)
    declare_turns(parser)
    declare_contenders(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    if options.framework == "torch":
        settle_contenders(options, options.device, TORCH_ON_CPU, TORCH_ON_GPU)
        if options.sharded and options.device != "cpu":
            raise ConfigError("--sharded needs --device cpu")
        return run(TORCH_STEPS, options)
    if options.device != "cpu" or options.sharded or options.optimizer != "sgd":
        raise ConfigError("--device cuda, --optimizer adamw and --sharded need --framework torch")
    settle_contenders(options, "cpu", ON_CPU, ())
    options.batch = options.batch or 64
    options.bucket = options.bucket or 4 << 20
    return run(STEPS, options)


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
            gradients: Written, by name.
            ready: Called with each name as soon as its gradient is written.
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
        gradients: Returns those of the last step.
        own_bytes: Bytes of gradients that were made together with the variant.
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


def _network(world: World, options: Namespace) -> Network:
    return Network(options.width, options.layers, options.batch, world.rank)


def _makers(world: World, options: Namespace) -> list[Callable[[], _Variant]]:
    """Return what makes the variants; parameters exist already, and all gradients but ours."""
    alone = _network(world, options)
    length = sum(value.size for value in alone.params.values())
    flat = world.comm.empty(length, np.float32)
    # Written to, so that it has memory of its own.
    flat[...] = 1
    views = _views(np.ones(length, np.float32), alone.params)
    return [
        partial(_Variant, ALONE, alone, lambda: None, lambda: views),
        partial(_while_computing, world, _network(world, options), options.bucket),
        *(partial(_after_backward, contender, _network(world, options), flat, world.size)
          for contender in chosen(world, options.contenders, ["auto"], options.interface)),
    ]


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all variants in each round; the last round yields them all.

    Collective: yes. Blocking: yes.
    """
    right = _mean_gradients(world, options)
    world.warm_up()
    begun = [gradients.begun(world, make, right, _Variant.communicate)
             for make in _makers(world, options)]
    readings = yield from timing.in_turns(options, random.Random(options.seed), {
        variant.name: timing.timed_steps(world, options, {"step": variant.step})
        for variant, _ in begun})
    labels = {"parameters": sum(value.size for value in right.values()),
              "batch": options.batch, "thread_level": world.thread_level}
    yield [Measurement({**labels, "contender": variant.name}, {
        **readings[variant.name], "extra_bytes": [memory["peak_bytes"][0] - variant.own_bytes]})
        for variant, memory in begun]


def _mean_gradients(world: World, options: Namespace) -> dict[str, Array]:
    """Return the means over ranks of the first step's gradients, in float64."""
    network = _network(world, options)
    of_this_rank = {name: np.empty_like(value) for name, value in network.params.items()}
    network.backward(of_this_rank, lambda name: None)
    return gradients.means_over_ranks(world, of_this_rank)


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each variant, compared with the compute alone at its thread level."""
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


_COLUMNS = [
    Column("parameters", 10), Column("batch", 6), Column("contender", -32, title="training step"),
    Column("thread_level", -10, title="threads"), Column("median_ms", 10, 4),
    Column("p95_ms", 10, 4), Column("samples_per_s", 10, 4, "samples/s"),
    Column("efficiency_percent", 12, 3, "efficiency %"), Column("extra_MiB", 9, 3)]
STEPS = Benchmark("steps", lambda options: int(options.rounds), measure, rows, _COLUMNS)
