"""Creates a NumPy model, and trains it on several ranks by each method."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ...numpy import DataParallel
from ...provisional import Array
from .contenders import ALONE, OURS, Contender, chosen
from .gradients import means_over_ranks
from .world import World

_LEARNING_RATE = np.float32(1e-3)

Gradients = Mapping[str, Array]


class Network:
    """A multilayer perceptron with handwritten forward and backward passes.

    The rank seeds the data; weights are the same on all ranks. In `ready_order`, names have the
    order in which `backward` computes gradients.
    """

    def __init__(self, width: int, layers: int, batch: int, rank: int) -> None:
        weights, data = np.random.default_rng(0), np.random.default_rng(1 + rank)
        self._layers = range(layers)
        self.params: dict[str, Array] = {}
        for layer in self._layers:
            values = weights.standard_normal((width, width), np.float32)
            self.params[f"w{layer}"] = values * np.float32(np.sqrt(2 / width))
            self.params[f"b{layer}"] = np.zeros(width, np.float32)
        self.ready_order = [
            f"{kind}{layer}" for layer in reversed(self._layers) for kind in "wb"]
        self._x = data.standard_normal((batch, width), np.float32)
        self._y = data.standard_normal((batch, width), np.float32)

    def backward(self, gradients: Gradients, ready: Callable[[str], object]) -> None:
        """Compute the gradients of half the mean squared error, the last layer's first.

        The function `ready` is called with each name as soon as its gradient is written.
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


class NumpyTraining:
    """A method to take training steps.

    The `own_bytes` are those of gradients that were allocated together with the variant.
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
        """Communicate as in a step, but without computation and the memory that it needs."""
        gradients = self.gradients()
        for name in self._network.ready_order:
            gradients[name][...] = 1
            self._ready(name)
        self._combine()


def _views(flat: Array, params: Mapping[str, Array]) -> Gradients:
    """Return consecutive views of a vector, with the shapes of the parameters."""
    ends = np.cumsum([value.size for value in params.values()])
    return {name: flat[end - value.size:end].reshape(value.shape)
            for (name, value), end in zip(params.items(), ends)}


def _overlapped(world: World, network: Network, bucket_bytes: int) -> NumpyTraining:
    """Return training in which DataParallel averages the gradients during backward."""
    dp = DataParallel(network.params, world.comm, bucket_bytes=bucket_bytes)
    return NumpyTraining(OURS, network, dp.wait, lambda: dp.grads, dp.ready,
                         sum(value.nbytes for value in network.params.values()))


def _blocking(contender: Contender, network: Network, flat: Array, size: int) -> NumpyTraining:
    """Return training in which one blocking call combines all gradients at once."""
    call, views, share = contender.blocking(flat), _views(flat, network.params), flat.dtype.type(
        1 / size)

    def combine() -> None:
        call()
        np.multiply(flat, share, out=flat)

    return NumpyTraining(f"{contender.name} after backward", network, combine, lambda: views)


def _network_of(world: World, options: Namespace) -> Network:
    return Network(options.width, options.layers, options.batch, world.rank)


def factories(world: World, options: Namespace) -> list[Callable[[], NumpyTraining]]:
    """Return functions that create the variants.

    Parameters already exist, and so do all gradients except those of DataParallel.
    """
    alone = _network_of(world, options)
    length = sum(value.size for value in alone.params.values())
    flat = world.comm.empty(length, np.float32)
    # Written, because unwritten pages would all be the system's page of zeros.
    flat[...] = 1
    views = _views(np.ones(length, np.float32), alone.params)
    return [
        partial(NumpyTraining, ALONE, alone, lambda: None, lambda: views),
        partial(_overlapped, world, _network_of(world, options), options.bucket),
        *(partial(_blocking, contender, _network_of(world, options), flat, world.size)
          for contender in chosen(world, options.contenders, ["auto"], options.interface)),
    ]


def mean_gradients(world: World, options: Namespace) -> dict[str, Array]:
    """Return the means over ranks of the first step's gradients, in float64."""
    network = _network_of(world, options)
    gradients = {name: np.empty_like(value) for name, value in network.params.items()}
    network.backward(gradients, lambda name: None)
    return means_over_ranks(world, gradients)
