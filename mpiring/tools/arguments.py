"""Types of command-line arguments, for argparse."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from ..errors import ConfigError
from .units import parse_count

T = TypeVar("T")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser that raises argparse's error, which names the option, for ConfigError."""
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as exc:
            raise ArgumentTypeError(str(exc)) from exc
    return parsed


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of lists like "A,B", which drops repeated items."""
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a parser of lists of these names."""
    def parsed(name: str) -> str:
        if name not in known:
            raise ArgumentTypeError(f"{name!r}: expected some of {', '.join(known)}")
        return name
    return listed(parsed)


def positive(text: str, least: int = 1) -> int:
    """Parse a whole number that is at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r}: expected {least} or more")
    return int(text)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    return positive(text, 0)


def above_zero(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


counts = listed(checked(parse_count))
seeds = listed(not_negative)
