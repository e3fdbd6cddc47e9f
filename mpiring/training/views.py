"""Tensors by name that can be written into, but not replaced."""

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from ..errors import GradientError


class Views(Mapping[str, NDArray[Any]]):
    """Tensors by name, which can be written into, but not replaced.

    Args:
        views: The tensors; may change.
        holder: What the user calls this mapping, for messages.
    """

    def __init__(self, views: Mapping[str, NDArray[Any]], holder: str) -> None:
        self._views, self._holder = views, holder

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __setitem__(self, name: str, value: object) -> None:
        """Accept the end of `views[name] += value`, which has written in place already.

        Raises:
            GradientError: Another array is assigned, which no bucket would hold.
        """
        if value is not self._views.get(name):
            what = f"{self._holder}[{name!r}]"
            raise GradientError(f"{what} lies in a bucket and cannot be replaced; write into it: "
                                f"{what}[...] = ...")
