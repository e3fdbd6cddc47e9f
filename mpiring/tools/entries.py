"""Checks the fields of entries in files that may be damaged, edited, or of another version."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Larger numbers are damage: in microseconds, this limit is 31 years.
LARGEST = 10**15


class Kind(NamedTuple):
    """The values that a field may have.

    Attributes:
        fits: Function that returns whether a field may have this value.
        expected: Text that completes the message "expected ...".
        optional: Whether the field may be missing.
    """

    fits: Callable[[Any], bool]
    expected: str
    optional: bool = False


def number(least: float = -LARGEST, *, nan: bool = False, optional: bool = False) -> Kind:
    """Return the kind of real numbers from `least` to LARGEST; with `nan`, also of NaN."""
    def fits(x: Any) -> bool:
        return type(x) in (int, float) and (least <= x <= LARGEST or nan and x != x)
    return Kind(fits, f"a number from {least:g} to {LARGEST:g}", optional)


def whole(least: int = -LARGEST, most: int = LARGEST, *, optional: bool = False) -> Kind:
    """Return the kind of whole numbers in a range."""
    return Kind(lambda x: type(x) is int and least <= x <= most,
                f"a whole number from {least} to {most}", optional)


def text(*, optional: bool = False) -> Kind:
    """Return the kind of strings that can be printed and drawn: without half of a character."""
    def fits(x: Any) -> bool:
        return isinstance(x, str) and (x.isascii() or x == x.encode(errors="replace").decode())
    return Kind(fits, "text", optional)


def listed(kind: Kind, *, optional: bool = False) -> Kind:
    """Return the kind of lists whose items are of one kind."""
    return Kind(lambda x: isinstance(x, list) and all(map(kind.fits, x)),
                f"a list, and in it {kind.expected} each time", optional)


OBJECT = Kind(lambda x: isinstance(x, dict), "an object")
FLAG = Kind(lambda x: isinstance(x, bool), "true or false")


def problem_of(entry: Any, kinds: Mapping[str, Kind]) -> str:
    """Return what is wrong with the fields of an entry, or ""; other fields are ignored."""
    if not isinstance(entry, dict):
        return f"it is a {type(entry).__name__}: expected an object"
    for name, kind in kinds.items():
        if name in entry and not kind.fits(entry[name]):
            return f"{name}={_shown(entry[name])}: expected {kind.expected}"
        if name not in entry and not kind.optional:
            return f"{name} is missing: expected {kind.expected}"
    return ""


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"
