"""Ways to train a PyTorch module on several ranks: in step, rarely in step, or without waiting."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...asynchronous import PairAveraging
from ...communicator import Communicator
from ...optim import SGD, AdamW
from ...optim.optimizer import Optimizer, TrainedModel
from ...optim.outer import Outer
from ...record.statistics import Statistics
from ...reducers import Reducer
from ...torch import AsyncDataParallel, DataParallel, DiLoCo, LocalSGD

__all__ = ["Alone", "Averaged", "DiLoCo", "InPairs", "LocalSGD", "Pushed", "Rarely", "Rule",
           "Way"]

_OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_OURS: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}


@dataclass(frozen=True)
class Rule:
    """How a rank's optimizer moves weights.

    Attributes:
        name: "adamw", or "sgd" without momentum.
        rate: The learning rate.
    """

    name: str
    rate: float

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of PyTorch's."""
        made: torch.optim.Optimizer = _OPTIMIZERS[self.name](module.parameters(), lr=self.rate)
        return made

    def ours(self) -> Callable[[TrainedModel], Optimizer]:
        """Return what makes the same one of mpiring.optim."""
        return partial(_OURS[self.name], lr=self.rate)


class Way(Protocol):
    """A way to train a module.

    Attributes:
        model: Called for the module's results.
        settings: Of the method, for a reader.
        statistics: Costs of its communication so far, on this rank.
    """

    model: nn.Module
    settings: str
    statistics: Statistics

    def step(self) -> None:
        """Use the gradients that backward() has left."""

    def meet(self) -> None:
        """Take it that no rank goes on before all have come so far; called on all ranks."""

    def show(self) -> AbstractContextManager[Any]:
        """Return a block in which the module has the parameters to be judged.

        Collective: yes. Blocking: yes.
        """

    def finish(self) -> None:
        """End the training: the module has the same parameters on all ranks.

        Collective: yes. Blocking: yes.
        """


class Alone:
    """Trains on each rank for itself; the others change what they have to.

    Args:
        module: What is trained.
        comm: The ranks.
        rule: Of the optimizer.
    """

    settings, statistics = "", Statistics()

    def __init__(self, module: nn.Module, comm: Communicator, rule: Rule) -> None:
        self.model, self.optimizer = module, rule.optimizer(module)

    def step(self) -> None:
        """Take a step."""
        self.optimizer.step()

    def meet(self) -> None:
        """Do nothing."""

    def show(self) -> AbstractContextManager[Any]:
        """Return a block without effect."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing."""


class Averaged(Alone):
    """Averages the gradients of each step.

    Args: see Alone; and
        reducer: How they become their mean.
    """

    def __init__(self, module: nn.Module, comm: Communicator, rule: Rule,
                 reducer: Reducer | None = None) -> None:
        super().__init__(module, comm, rule)
        # Its only buffer, the mask, is a constant.
        self.model = self._averager = DataParallel(
            module, comm, reducer=reducer, broadcast_buffers=False)
        self.settings = "" if reducer is None else repr(reducer)

    def step(self) -> None:
        """Take a step."""
        self.statistics += self._averager.statistics
        super().step()


class Rarely(Alone):
    """Trains locally, and synchronises what the ranks have learnt.

    Args: see Alone; and
        make: Makes the outer optimizer.
    """

    def __init__(self, module: nn.Module, comm: Communicator, rule: Rule,
                 make: Callable[[nn.Module, Communicator], Outer]) -> None:
        super().__init__(module, comm, rule)
        self._outer = make(module, comm)
        self.settings = repr(self._outer)

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Costs so far."""
        return self._outer.statistics

    def step(self) -> None:
        """Take an inner step, and what is due of an outer one."""
        super().step()
        self._outer.step()

    def show(self) -> AbstractContextManager[Any]:
        """Return a block in which the module has the global parameters."""
        return self._outer.global_parameters()

    def finish(self) -> None:
        """Synchronise."""
        self._outer.synchronize()


class Pushed(Alone):
    """Pushes gradients to the ranks that own slices of the weights, and pulls these.

    Args: see Alone; and
        staleness: In steps; None for any.
    """

    def __init__(self, module: nn.Module, comm: Communicator, rule: Rule,
                 staleness: int | None) -> None:
        self._server = self.model = AsyncDataParallel(
            module, comm, optimizer=rule.ours(), staleness=staleness)
        self.settings = f"staleness={staleness}"

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Costs so far."""
        return self._server.statistics

    def step(self) -> None:
        """Push and pull."""
        self._server.step()

    def finish(self) -> None:
        """Pull the final weights."""
        self._server.close()


class InPairs(Alone):
    """Trains locally, and averages weights in random pairs of ranks.

    Args: see Alone; and
        delay: Steps after which a partner is waited for.
    """

    def __init__(self, module: nn.Module, comm: Communicator, rule: Rule, delay: int) -> None:
        super().__init__(module, comm, rule)
        self._pairs = PairAveraging(module, comm, delay=delay)
        self.settings = f"delay={delay}"

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Costs so far."""
        return self._pairs.statistics

    def step(self) -> None:
        """Take a step, and what a partner has sent."""
        super().step()
        self._pairs.step()

    def meet(self) -> None:
        """Average over all ranks: one that waits answers no partner."""
        self._pairs.agree()

    def finish(self) -> None:
        """End the exchange."""
        self._pairs.close()
