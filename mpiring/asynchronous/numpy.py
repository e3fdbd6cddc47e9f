"""Trains a NumPy model on several ranks that do not wait for each other."""

from collections.abc import Mapping
from typing import Any

from .. import GradientError
from .server import ParameterServer


class AsyncDataParallel(ParameterServer):
    """A NumPy model that all ranks update, each at its own pace; see ParameterServer.

        dp = AsyncDataParallel(params, comm, optimizer=partial(SGD, lr=0.1), staleness=4)
        ...
        dp.step()                               # instead of optimizer.step()
        ...
        dp.close()                              # all ranks have the same weights

    Between steps, write gradients into `dp.grads` and mark them by `dp.ready(name)`, as with a
    DataParallel.

    Args:
        args, kwargs: Arguments of ParameterServer: `params`, `comm`, `optimizer`, `staleness` and
            `damped`.

    Raises the same errors as ParameterServer.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ready: set[str] = set()
        super().__init__(*args, **kwargs)

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written.

        Args:
            name: Name of the parameter.

        Raises:
            GradientError: The name is unknown, or the gradient was already marked in this step.

        Collective: no. Blocking: no.
        """
        if name not in self.grads or name in self._ready:
            mistake = "was marked ready twice" if name in self._ready else "is unknown"
            raise GradientError(f"rank {self._comm.rank}: gradient {name!r} {mistake}; call step() "
                                f"after each backward pass, and ready() once per parameter")
        self._ready.add(name)
        self._comm.poke()

    def step(self, gradients: Mapping[str, Any] | None = None) -> bool:
        """Push the gradients, and pull the weights; return True if the gradients were finite.

        Args:
            gradients: Gradients by name, to use instead of `grads`.

        Raises:
            GradientError: Gradients were not marked as ready; names them.
            StallError: Other ranks did not answer, as in `pull`.

        Collective: no. Blocking: yes.
        """
        missing = [name for name in self.grads if name not in self._ready]
        if missing and gradients is None:
            raise GradientError(
                f"rank {self._comm.rank}: step() with {len(missing)} of {len(self.grads)} gradients"
                f" missing: {', '.join(missing)}; call ready(name) for each, also for one that is "
                f"zero in this step")
        self._ready.clear()
        return super().step(gradients)
