"""Prints rows as a table of fixed columns, so that it can begin before the last row is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text import ranks_on_nodes
from .files import Environment, Row


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: Of the rows.
        title: Its head.
        width: In characters; negative to begin at the left.
        digits: Significant digits of numbers; None for text.
    """

    key: str
    title: str
    width: int
    digits: int | None = None


def head(columns: Sequence[Column]) -> str:
    """Return the line above a table."""
    return _line([_placed(column.title, column) for column in columns])


def line(row: Row, columns: Sequence[Column]) -> str:
    """Return a row; what is missing is a dash."""
    return _line([_placed(_text(row.get(column.key), column), column) for column in columns])


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cells).rstrip()


def _placed(text: str, column: Column) -> str:
    return f"{text:<{-column.width}}" if column.width < 0 else f"{text:>{column.width}}"


def _text(value: Any, column: Column) -> str:
    if value is None or value != value:
        return "-"
    if column.digits is None:
        return str(value)
    return significant(float(value), column.digits)


def significant(value: float, digits: int) -> str:
    """Return a number with so many significant digits, but all those before the point."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def about(benchmark: str, environment: Environment) -> str:
    """Return the lines that stand above a table: where and with what it was measured."""
    where = ranks_on_nodes(environment["ranks"], environment["nodes"])
    return "\n".join([
        f"# mpiring {environment['mpiring']} bench {benchmark}: {where}, "
        f"thread level {environment['thread_level']}",
        f"# {environment['cpu']}, {environment['cores']} cores; {environment['mpi_library']}; "
        f"mpi4py {environment['mpi4py']}, NumPy {environment['numpy']}, "
        f"Python {environment['python']}"])
