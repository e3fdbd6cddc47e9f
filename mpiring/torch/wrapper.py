"""Lets a module that wraps another one be used, and saved, as the bare module."""

from typing import Any, NoReturn

from torch import nn

from ..errors import ConfigError


class Wrapper(nn.Module):
    """A module around another one, which is asked for what the wrapper does not have.

    Args:
        module: The bare module.

    Attributes:
        module: The same.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, under the names that the bare module has."""
        return self.module.state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} cannot be pickled or copied: it holds MPI's memory; save "
            f"model.state_dict(), or pickle model.module")
