"""Trains a NumPy model on several ranks that do not wait for each other."""

from collections.abc import Mapping
from typing import Any

from ..asynchronous import ParameterServer
from ..errors import GradientError


class AsyncDataParallel(ParameterServer):
    """A NumPy model that all ranks update, each at its own pace; see ParameterServer.

        dp = AsyncDataParallel(params, comm, optimizer=partial(SGD, lr=0.1), staleness=4)
        ...
        dp.step()                               # in the place of optimizer.step()
        ...
        dp.close()                              # all ranks have the same weights

    Between steps, gradients are written into `dp.grads` and marked by `dp.ready(name)`, as with a
    DataParallel.

    Args: see ParameterServer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ready: set[str] = set()
        super().__init__(*args, **kwargs)

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: no. Blocking: no.
        """
        if name not in self.grads or name in self._ready:
            what = "was marked ready twice" if name in self._ready else "is unknown"
            raise GradientError(f"rank {self._comm.rank}: gradient {name!r} {what}; call step() "
                                f"after each backward pass, and ready() once per parameter")
        self._ready.add(name)
        self._comm.poke()

    def step(self, gradients: Mapping[str, Any] | None = None) -> bool:
        """Push this rank's gradients, pull the weights; return whether gradients were finite.

        Args:
            gradients: In the place of those in `grads`.

        Raises:
            GradientError: Gradients were not marked ready; names them.
            StallError: As `pull`.

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
