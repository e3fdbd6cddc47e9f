"""Parses command lines: types of arguments, and errors that a job prints once."""

import difflib
import itertools
import shutil
import textwrap
import time
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, HelpFormatter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from .. import ConfigError
from ..provisional import arguments, launch
from .terminal import WIDTH
from .units import parse_count

T = TypeVar("T")
# Largest number of ranks of a job that a command starts on this machine.
MAX_STARTED = 4096
# Largest number of seconds, steps or the like: about 30 years.
_MOST = 1e9
# Seconds by which other ranks outlive the rank that prints an error. Some launchers end all ranks
# when one fails.
_OUTLIVE_S = 2.0
# Least similarity of names that are suggested, from 0 to 1: "gpu" does not mean "cpu".
_SIMILAR = 0.7


class UsageError(ConfigError):
    """The options of a command contradict each other, or the job; the same on all ranks."""


class _Formatter(HelpFormatter):
    """Wraps paragraphs of a description; indented lines are unchanged."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(WIDTH, shutil.get_terminal_size().columns) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        groups = itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " "))
        return textwrap.indent("\n".join(
            "\n".join(lines) if fixed else textwrap.fill(" ".join(lines), width - len(indent))
            for fixed, lines in groups), indent)


class Parser(ArgumentParser):
    """An argument parser that prints once per job, and suggests names for unknown ones.

    The line `advice` follows its error messages.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})
        self.advice = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; refuse unknown ones here, where the usage shows the known ones."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
            self.error(f"unrecognized arguments: {' '.join(unknown)}"
                       f"{_suggestion(wrong.partition('=')[0], self._option_string_actions)}")
        return options, unknown

    def _check_value(self, action: Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except ArgumentError as exc:
            exc.message += _suggestion(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Print the usage and an error, and exit with status 2."""
        super().error(f"{message}\n{self.advice}".rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit; with an error, after the rank that prints the message."""
        if status:
            outlive_message()
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if launch.prints_for_job():
            super()._print_message(message, file)


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Return a question about the known name that was probably meant; "" if none is similar.

    Dashes at the beginning of the unknown name do not count.
    """
    names = {word.lstrip("-"): word for word in known}
    bare = name.lstrip("-")
    close = [word for word in names if bare and word.startswith(bare)] or (
        difflib.get_close_matches(bare, names, 1, _SIMILAR))
    return f"; did you mean {names[close[0]]}?" if close else ""


def outlive_message() -> None:
    """Wait until the rank that prints messages has printed one, if this is another rank."""
    if not launch.prints_for_job():
        time.sleep(_OUTLIVE_S)


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


def positive(text: str, least: int = 1, most: int = arguments.MAX_INT32) -> int:
    """Parse a whole number that is at least `least` and at most `most`."""
    digits = text if text.isdecimal() else "-1"
    if len(digits) > len(str(arguments.MAX_INT32)) or int(digits) > most:
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
