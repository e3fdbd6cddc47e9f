"""Checks the fields of entries in files that may be damaged, edited, or of another version."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Larger numbers are damage: in microseconds, this limit is 31 years.
LARGEST = 10**15


class Field(NamedTuple):
    """The values that a field may have; `expected` completes the message "expected ..."."""

    fits: Callable[[Any], bool]
    expected: str
    optional: bool = False


def number(least: float = -LARGEST, *, nan: bool = False, optional: bool = False) -> Field:
    """Return a field of real numbers from `least` to LARGEST; with `nan`, also of NaN."""
    def fits(x: Any) -> bool:
        return type(x) in (int, float) and (least <= x <= LARGEST or nan and x != x)
    return Field(fits, f"a number from {least:g} to {LARGEST:g}", optional)


def whole(least: int = -LARGEST, most: int = LARGEST, *, optional: bool = False) -> Field:
    """Return a field of whole numbers in a range."""
    return Field(lambda x: type(x) is int and least <= x <= most,
                 f"a whole number from {least} to {most}", optional)


def text(*, optional: bool = False) -> Field:
    """Return a field of strings that can be drawn: without half of a character."""
    def fits(x: Any) -> bool:
        return isinstance(x, str) and (x.isascii() or x == x.encode(errors="replace").decode())
    return Field(fits, "text", optional)


def listed(item: Field, *, optional: bool = False) -> Field:
    """Return a field of lists whose items have the values of one field."""
    return Field(lambda x: isinstance(x, list) and all(map(item.fits, x)),
                 f"a list, and in it {item.expected} each time", optional)


OBJECT = Field(lambda x: isinstance(x, dict), "an object")
FLAG = Field(lambda x: isinstance(x, bool), "true or false")


def problem_of(entry: Any, fields: Mapping[str, Field]) -> str:
    """Return what is wrong with the fields of an entry, or ""; other fields are ignored."""
    if not isinstance(entry, dict):
        return f"it is a {type(entry).__name__}: expected an object"
    for name, field in fields.items():
        if name in entry and not field.fits(entry[name]):
            return f"{name}={_shown(entry[name])}: expected {field.expected}"
        if name not in entry and not field.optional:
            return f"{name} is missing: expected {field.expected}"
    return ""


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"
