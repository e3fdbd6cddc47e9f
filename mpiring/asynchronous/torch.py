"""Trains a PyTorch module on several ranks that do not wait for each other."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from torch import nn

from .. import Communicator, ConfigError, GradientError, Statistics
from ..provisional import adapter, optimizers, world
from ..torch import broadcast_parameters, share_cores
from .server import ParameterServer


class AsyncDataParallel(adapter.modules.Wrapper):
    """A module that all ranks train, each at its own speed; see mpiring.asynchronous.

        model = AsyncDataParallel(model, comm, optimizer=partial(AdamW, lr=1e-3), staleness=4)
        for x, y in batches:
            loss_of(model(x), y).backward()
            model.step()                        # replaces optimizer.step()
        model.close()                           # all ranks now have the same weights

    `step` pushes this rank's gradients to the owners of slices, sets `p.grad` to None, and pulls
    the newest weights into the parameters. Buffers (BatchNorm statistics) are local to each rank.
    All ranks get the buffers of rank 0 at the start and in `close`.

    Args:
        module: Module to train, the same on every rank, with parameters in host memory. Frozen
            parameters are broadcast from rank 0 at the start only.
        comm: Communicator whose ranks train together; by default, all ranks.
        optimizer: Function that returns an elementwise optimizer of mpiring.optim (not of
            torch.optim), given a model: `SGD`, or `functools.partial(AdamW, lr=1e-3)`.
        staleness: Number of pushes by which a rank may be ahead of the slowest rank; None for no
            limit. See ParameterServer.
        damped: If true, gradients of older weights have smaller learning rates. See
            ParameterServer.

    Attributes:
        module: The module.
        server: The ParameterServer. `server.state_dict()` returns weights and optimizer state.

    Raises the errors of ParameterServer.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, module: nn.Module, comm: Communicator | None = None, *,
                 optimizer: Callable[[Any], optimizers.Optimizer], staleness: int | None = 4,
                 damped: bool = True) -> None:
        comm = world.or_world(comm)
        trained = adapter.modules.broadcast_model(module, comm)
        super().__init__(module)
        self._comm = comm
        share_cores(comm)
        self.server = ParameterServer(trained, comm, optimizer=optimizer, staleness=staleness,
                                      damped=damped)
        self._gradients = [(p, adapter.tensors.tensor_of(self.server.grads[name]), p.data_ptr())
                           for name, p in trained.items()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def step(self) -> bool:
        """Push the gradients and pull the weights; return whether the gradients were finite.

        A missing gradient counts as zero.

        Raises:
            GradientError: No parameter has a gradient.
            ConfigError: Parameters were moved or replaced.
            StallError: Raised as by `ParameterServer.pull`.

        Collective: no. Blocking: yes.
        """
        if all(p.grad is None for p, _, _ in self._gradients):
            raise GradientError(f"rank {self._comm.rank}: step() without gradients; call backward()"
                                f" before each step()")
        if any(p.data_ptr() != address for p, _, address in self._gradients):
            raise ConfigError(f"rank {self._comm.rank}: parameters were moved or replaced; wrap "
                              f"the module after that")
        for p, gradient, _ in self._gradients:
            if p.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            p.grad = None
        return self.server.step()

    @property
    def statistics(self) -> Statistics:
        """Costs of this rank's pushes and pulls so far."""
        return self.server.statistics

    def close(self) -> None:
        """Wait until all ranks have finished; all then have the same weights and buffers.

        Collective: yes. Blocking: yes, while other ranks train.
        """
        if not self.server.closed:
            self.server.close()
            broadcast_parameters(self.module.buffers(), self._comm)

    def __enter__(self) -> "AsyncDataParallel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            self.close()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigError, because the next `step` would overwrite the loaded weights.

        Args:
            state_dict, args, kwargs: Arguments of `torch.nn.Module.load_state_dict`.
        """
        raise ConfigError(
            f"rank {self._comm.rank}: weights are the owners' here; load the module before it is "
            f"wrapped, or model.server.load_state_dict(...) what its state_dict() has returned")
