"""Finds each gradient's Reducer, where a mapping gives them by names and patterns."""

import fnmatch
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from .compressor import Compressor
from .reducer import Mean, Reducer

Wish = Reducer | Mapping[str, Reducer] | None


def reducers_of(names: Iterable[str], wish: Wish) -> dict[str, Reducer]:
    """Return each gradient's Reducer.

    Args:
        names: Of all gradients.
        wish: One for all, None for plain means, or a mapping, in which the exact name counts,
            or else the first pattern (as of files: `*`, `?`, `[a-c]`) that fits; without any, the
            mean is plain.

    Raises:
        ConfigError: It is none of these, or a pattern fits no name.
    """
    names, plain = list(names), Mean()
    if wish is None:
        return dict.fromkeys(names, plain)
    if not isinstance(wish, Mapping):
        _refuse_other_than_reducers(wish)
        return dict.fromkeys(names, wish)
    known = set(names)
    for pattern, reducer in wish.items():
        _refuse_other_than_reducers(reducer)
        if not isinstance(pattern, str):
            raise ConfigError(f"reducer[{pattern!r}]: expected the name of a parameter, or a "
                              f"pattern, as 'layer1*'")
        if pattern not in known and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"reducer[{pattern!r}]: no parameter has such a name; there are {', '.join(names)}")

    def of(name: str) -> Reducer:
        if name in wish:
            return wish[name]
        return next((reducer for pattern, reducer in wish.items()
                     if fnmatch.fnmatchcase(name, pattern)), plain)

    return {name: of(name) for name in names}


def _refuse_other_than_reducers(reducer: object) -> None:
    if isinstance(reducer, type) or not callable(getattr(reducer, "reduce", None)):
        raise ConfigError(
            f"reducer={reducer!r}: expected a Reducer, such as mpiring.reducers.PowerSGD(rank=2), "
            f"or a mapping from names or patterns to Reducers")


def compressors(reducers: Iterable[Reducer]) -> list[Compressor]:
    """Return those that compress, each once, in their order."""
    different = {id(reducer): reducer for reducer in reducers}
    return [reducer for reducer in different.values() if isinstance(reducer, Compressor)]
