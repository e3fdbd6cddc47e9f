"""Types of command-line arguments, for argparse."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from ..arguments import MAX_INT32
from ..errors import ConfigError
from .units import parse_count

T = TypeVar("T")
# Largest number of ranks of a job that a command starts on this machine.
MAX_STARTED = 4096
# Largest number of seconds, steps or the like: about 30 years.
_MOST = 1e9


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


def positive(text: str, least: int = 1, most: int = MAX_INT32) -> int:
    """Parse a whole number that is at least `least` and at most `most`."""
    digits = text if text.isdecimal() else "-1"
    if len(digits) > len(str(MAX_INT32)) or int(digits) > most:
        raise ArgumentTypeError(f"{text!r:.80}: expected at most {most}")
    if int(digits) < least:
        raise ArgumentTypeError(f"{text!r:.80}: expected {least} or more")
    return int(digits)


def ranks(text: str) -> int:
    """Parse the number of ranks of a job that starts on this machine."""
    return positive(text, most=MAX_STARTED)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    return positive(text, 0)


def above_zero(text: str, most: float = _MOST) -> float:
    """Parse a number above 0 that is at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise ArgumentTypeError(f"{text!r:.80}: expected a number above 0, at most {most:g}")
    return value


def share(text: str) -> float:
    """Parse a number above 0 that is at most 1."""
    return above_zero(text, 1.0)


counts = listed(checked(parse_count))
seeds = listed(not_negative)
