"""Settings of an optimizer for each tensor: numbers, groups by pattern, and schedules."""

import fnmatch
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from ..arguments import number
from ..errors import ConfigError

# A number, or a function of the number of updates before this one: 0 for the first.
Scheduled = float | Callable[[int], float]
Betas = tuple[float, float]
Groups = Mapping[str, Mapping[str, Any]]
Settings = dict[str, Any]


def _nonnegative(name: str, value: Any) -> float:
    return number(name, value, lambda x: 0 <= x < math.inf, "a finite number of at least 0")


def _fraction(name: str, value: Any) -> float:
    return number(name, value, lambda x: 0 <= x < 1, "a number of at least 0, below 1")


def _positive(name: str, value: Any) -> float:
    return number(name, value, lambda x: 0 < x < math.inf, "a finite number above 0")


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{name}={value!r:.200}: expected two numbers, as (0.9, 0.999)")
    return _fraction(f"{name}[0]", value[0]), _fraction(f"{name}[1]", value[1])


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "lr": _nonnegative, "momentum": _fraction, "weight_decay": _nonnegative, "betas": _betas,
    "eps": _positive, "trust": _positive}
# Settings whose value may be a function.
_SCHEDULED = ("lr", "momentum")
# Whether LARS and LAMB adapt the rate of a tensor. Users set it by `no_decay` only.
ADAPTS = "adapts"


class TensorSettings(MutableMapping[str, Any]):
    """The settings of one tensor by name; `key` is equal for tensors with the same settings."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = dict(content)
        self.key = self._key()

    def _key(self) -> tuple[Any, ...]:
        # A callable object may be unhashable.
        return tuple(id(x) if callable(x) else x for x in self._content.values())

    def __getitem__(self, name: str) -> Any:
        return self._content[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a number, or a function of the number of updates; raise ConfigError if wrong."""
        if name == ADAPTS or name not in self._content:
            raise ConfigError(f"there is no setting {name!r} to be written; expected one of "
                              f"{', '.join(key for key in self._content if key != ADAPTS)}")
        if value is not self._content[name]:
            self._content[name] = _checked(name, value)
            self.key = self._key()

    def __delitem__(self, name: str) -> NoReturn:
        """Raise ConfigError: a setting cannot be deleted."""
        raise ConfigError(f"the setting {name!r} cannot be deleted; write a value")

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __repr__(self) -> str:
        return repr(dict(self._content))


def settings_of(names: Iterable[str], defaults: Settings, groups: Groups | None,
                no_decay: Sequence[str]) -> Mapping[str, TensorSettings]:
    """Return each tensor's settings.

    Args:
        groups: Settings that differ from the defaults, by name or pattern of a tensor. An exact
            name takes precedence; otherwise, the first pattern that matches applies.
        no_decay: Names and patterns of tensors that are neither decayed nor adapted.

    Raises:
        ConfigError: A setting is unknown or out of range, or a pattern matches no name.
    """
    names = list(names)
    checked_defaults = {name: _checked(name, value) for name, value in defaults.items()}
    known: dict[str, Settings] = {}
    for pattern, changes in _mapping("groups", {} if groups is None else groups).items():
        _refuse_unfit("groups", pattern, names)
        for name in _mapping(f"groups[{pattern!r}]", changes):
            if name not in checked_defaults:
                raise ConfigError(f"groups[{pattern!r}] has {name!r}: expected some of "
                                  f"{', '.join(checked_defaults)}")
        known[pattern] = checked_defaults | {name: _checked(name, x) for name, x in changes.items()}
    if isinstance(no_decay, str) or not isinstance(no_decay, Iterable):
        raise ConfigError(f"no_decay={no_decay!r:.200}: expected a tuple of names and patterns, as "
                          f"('b*', '*norm*')")
    no_decay = list(no_decay)
    for pattern in no_decay:
        _refuse_unfit("no_decay", pattern, names)

    def of(name: str) -> TensorSettings:
        group = name if name in known else next(
            (pattern for pattern in known if fnmatch.fnmatchcase(name, pattern)), None)
        exempt = any(fnmatch.fnmatchcase(name, pattern) or name == pattern for pattern in no_decay)
        settings = {**(checked_defaults if group is None else known[group]), ADAPTS: not exempt}
        return TensorSettings(settings | ({"weight_decay": 0.0} if exempt else {}))

    return MappingProxyType({name: of(name) for name in names})


def values_at(settings: Mapping[str, Any], step: int) -> Settings:
    """Return a tensor's settings, with checked values of functions after `step` updates."""
    return {name: _CHECKS[name](f"{name}({step})", value(step)) if callable(value) else value
            for name, value in settings.items()}


def all_values_at(settings: Mapping[str, TensorSettings], step: int) -> dict[str, Settings]:
    """Return `values_at` this step for each tensor; tensors with equal settings share a dict."""
    distinct = {tensor.key: tensor for tensor in settings.values()}
    values = {key: values_at(tensor, step) for key, tensor in distinct.items()}
    return {name: values[tensor.key] for name, tensor in settings.items()}


def described(settings: Mapping[str, TensorSettings]) -> dict[str, Any]:
    """Return settings as ranks compare them: functions by their value at step 0."""
    return {f"{name} of {tensor!r}": value
            for tensor, values in all_values_at(settings, 0).items()
            for name, value in values.items()}


def summarized(settings: Mapping[str, Settings]) -> str:
    """Return a short string for a result of `all_values_at`, different for different settings.

    The string has the settings of the first tensor, and settings in which other tensors differ. It
    ends with a digest that tells which tensor has which settings.
    """
    distinct = {id(values): values for values in settings.values()}
    first = next(iter(distinct.values()))
    texts = {i: " ".join(f"{name}={value!r}" for name, value in values.items()
                         if name != ADAPTS and (values is first or value != first[name]))
             for i, values in distinct.items()}
    if len(set(texts.values())) == 1:
        return texts[id(first)]
    owners = ",".join(texts[id(values)] for values in settings.values())
    return f"{' or '.join(filter(None, texts.values()))} of {zlib.crc32(owners.encode()):08x}"


def _checked(name: str, value: Any) -> Any:
    return value if name in _SCHEDULED and callable(value) else _CHECKS[name](name, value)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r:.200}: expected a mapping, as "
                          f"groups={{'head*': {{'lr': 0.01}}}}")
    return value


def _refuse_unfit(argument: str, pattern: Any, names: Sequence[str]) -> None:
    if not isinstance(pattern, str) or pattern not in names and not any(
            fnmatch.fnmatchcase(name, pattern) for name in names):
        raise ConfigError(f"{argument} has {pattern!r}: no parameter has such a name; there are "
                          f"{', '.join(names)}")
