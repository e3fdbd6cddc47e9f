"""Methods of training a PyTorch module on several ranks; some of them communicate rarely."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from mpiring import Communicator, Statistics
from mpiring.asynchronous import PairAveraging
from mpiring.optim import SGD, AdamW
from mpiring.reducers import PowerSGD, Reducer
from mpiring.tools.bench.reducers import ALONE, DENSE, METHODS as REDUCERS
from mpiring.torch import AsyncDataParallel, DataParallel, DiLoCo, LocalSGD

_OURS: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}


class Method:
    """A method of training a module on several ranks; in this class, each rank trains for itself.

    Args:
        model: Model to call for the module's results.
        optimizer: Optimizer, which uses the gradients that backward() computes.
        settings: Settings of the method, for a reader.
        counter: Object with the `statistics` of its communication; None if there is none.
    """

    def __init__(self, model: nn.Module, optimizer: Any, settings: str = "",
                 counter: Any = None) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._counter = counter

    @property
    def statistics(self) -> Statistics:
        """Costs of its communication so far, on this rank."""
        return self._counter.statistics if self._counter else Statistics()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def before_barrier(self) -> None:
        """Prepare for a barrier; called on all ranks."""

    def validation_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the module has the parameters for validation.

        Collective: yes. Blocking: yes.
        """
        return nullcontext()

    def finish(self) -> None:
        """End the training; afterwards, the module has the same parameters on all ranks.

        Collective: yes. Blocking: yes.
        """


class MeanGradients(Method):
    """Averages the gradients of each step.

    Args:
        module: Module that is trained.
        comm: Communicator of the ranks.
        optimizer: Optimizer of the module.
        reducer: Reducer that averages gradients; None for plain means.
    """

    def __init__(self, module: nn.Module, comm: Communicator, optimizer: Any,
                 reducer: Reducer | None = None) -> None:
        # Its only buffer, the mask, is a constant.
        self._parallel = DataParallel(module, comm, reducer=reducer, broadcast_buffers=False)
        super().__init__(self._parallel, optimizer, "" if reducer is None else repr(reducer))
        self._total = Statistics()

    @property
    def statistics(self) -> Statistics:
        """Sum over all steps; DataParallel counts only the last step."""
        return self._total

    def step(self) -> None:
        """Take a step."""
        self._total += self._parallel.statistics
        super().step()


class LocalSteps(Method):
    """Takes local steps, and synchronizes the ranks in outer steps.

    Args:
        module: Module that is trained.
        optimizer: Inner optimizer.
        outer: Outer optimizer.
    """

    def __init__(self, module: nn.Module, optimizer: Any, outer: LocalSGD | DiLoCo) -> None:
        super().__init__(module, optimizer, repr(outer), outer)
        self._outer = outer

    def step(self) -> None:
        """Take an inner step, and an outer step if it is due."""
        super().step()
        self._outer.step()

    def validation_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the module has the global parameters."""
        return self._outer.global_parameters()

    def finish(self) -> None:
        """Synchronize."""
        self._outer.synchronize()


class ServerTraining(Method):
    """Pushes gradients to the ranks that own slices of the weights, and pulls the weights.

    Args:
        module: Module that is trained.
        comm: Communicator of the ranks.
        optimizer: Function that creates the optimizer of a slice.
        staleness: Largest age of weights, in steps; None for no limit.
    """

    def __init__(self, module: nn.Module, comm: Communicator, optimizer: Callable[..., Any],
                 staleness: int | None) -> None:
        server = AsyncDataParallel(module, comm, optimizer=optimizer, staleness=staleness)
        super().__init__(server, server, f"staleness={staleness}", server)

    def finish(self) -> None:
        """Pull the final weights."""
        self.optimizer.close()


class PairTraining(Method):
    """Trains locally, and averages weights in random pairs of ranks.

    Args:
        module: Module that is trained.
        comm: Communicator of the ranks.
        optimizer: Optimizer of the module.
        delay: Number of steps after which a rank waits for its partner.
    """

    def __init__(self, module: nn.Module, comm: Communicator, optimizer: Any, delay: int) -> None:
        self._pairs = PairAveraging(module, comm, delay=delay)
        super().__init__(module, optimizer, f"delay={delay}", self._pairs)

    def step(self) -> None:
        """Take a step, and average with the weights that a partner has sent."""
        super().step()
        self._pairs.step()

    def before_barrier(self) -> None:
        """Average over all ranks, because ranks do not answer partners while they wait."""
        self._pairs.agree()

    def finish(self) -> None:
        """End the exchange."""
        self._pairs.close()


def create_method(name: str, module: nn.Module, comm: Communicator, optimizer: Any,
                  options: Namespace) -> Method:
    """Return a method of training a module.

    Args:
        name: Name of the method.
        module: Module that is trained.
        comm: Communicator of the ranks.
        optimizer: Optimizer of the module.
        options: Options of the study.
    """
    outer: dict[str, Any] = {"every": options.every, "reducer": REDUCERS[options.outer_reducer](0)}
    nesterov = {"lr": options.outer_rate, "momentum": options.outer_momentum}
    fragments = {"fragments": options.fragments, "delay": options.delay}
    of_slices = partial(_OURS[options.optimizer], lr=optimizer.defaults["lr"])
    make: dict[str, Callable[[], Method]] = {
        ALONE: lambda: Method(module, optimizer),
        DENSE: lambda: MeanGradients(module, comm, optimizer),
        "powersgd": lambda: MeanGradients(module, comm, optimizer, PowerSGD(rank=4)),
        "localsgd": lambda: LocalSteps(module, optimizer, LocalSGD(module, comm, **outer)),
        "diloco": lambda: LocalSteps(module, optimizer, DiLoCo(module, comm, **outer, **nesterov)),
        "streaming": lambda: LocalSteps(module, optimizer, DiLoCo(
            module, comm, **outer, **nesterov, **fragments)),
        "server": lambda: ServerTraining(module, comm, of_slices, options.staleness),
        "pairs": lambda: PairTraining(module, comm, optimizer, options.pair_delay)}
    return make[name]()
