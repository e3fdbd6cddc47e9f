"""Prints rows as a table of fixed columns, so that it can begin before the last row is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text import ranks_on_nodes

# A result; and where and with what results were measured.
Row = dict[str, Any]
Environment = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: Of the rows.
        width: In characters; negative to align left.
        digits: Significant digits of numbers; None for text.
        title: Its head; by default the key, with blanks.
    """

    key: str
    width: int
    digits: int | None = None
    title: str | None = None


def head(columns: Sequence[Column]) -> str:
    """Return the line above a table."""
    return _line([column.key.replace("_", " ") if column.title is None else column.title
                  for column in columns], columns)


def line(row: Row, columns: Sequence[Column]) -> str:
    """Return a row; what is missing is a dash."""
    return _line([_text(row.get(column.key), column) for column in columns], columns)


def _line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    return "  ".join(f"{cell:{'<' if column.width < 0 else '>'}{abs(column.width)}}"
                     for cell, column in zip(cells, columns)).rstrip()


def _text(value: Any, column: Column) -> str:
    if value is None or value != value:
        return "-"
    return str(value) if column.digits is None else significant(float(value), column.digits)


def significant(value: float, digits: int) -> str:
    """Return a number with so many significant digits, and all digits before the point."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def about(benchmark: str, environment: Environment) -> str:
    """Return the lines above a benchmark's table: where and with what it was measured."""
    where = ranks_on_nodes(environment["ranks"], environment["nodes"])
    return "\n".join([
        f"# mpiring {environment['mpiring']} bench {benchmark}: {where}, "
        f"thread level {environment['thread_level']}",
        f"# {environment['cpu']}, {environment['cores']} cores; {environment['mpi_library']}; "
        f"mpi4py {environment['mpi4py']}, NumPy {environment['numpy']}, "
        f"Python {environment['python']}"])
