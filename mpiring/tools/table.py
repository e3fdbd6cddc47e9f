"""Formats rows as lines of a table with fixed columns, which can be printed one by one."""

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .terminal import line_width, renderer
from .units import ranks_on_nodes

# A result; and the machine and the software with which results were measured.
Row = dict[str, Any]
Environment = dict[str, Any]
# Follows the best value of a row if there is no bold type.
_MARK = "*"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        width: Width in characters; negative to align left.
        digits: Number of significant digits of numbers; None for text.
        title: Heading; by default the key, with spaces for underscores.
        interval: If true, rows also contain the ends of the value's interval; their keys have the
            suffixes "_low" and "_high".
    """

    key: str
    width: int
    digits: int | None = None
    title: str | None = None
    interval: bool = False


def head(columns: Sequence[Column]) -> str:
    """Return the header line of a table."""
    cells = [column.key.replace("_", " ") if column.title is None else column.title
             for column in columns]
    return _line(cells, columns, dict.fromkeys(range(len(columns)), "underline"))


def line(row: Row, columns: Sequence[Column], best: Collection[str] = ()) -> str:
    """Return the line of a row; a dash stands for a missing value.

    Values with keys in `best` are bold in a terminal, and marked with * elsewhere.
    """
    cells = [_text(row, column) for column in columns]
    numbers = [number for number, column in enumerate(columns) if column.key in best]
    return _line(cells, columns, dict.fromkeys(numbers, "bold"))


def show(rows: Iterable[Row], columns: Sequence[Column]) -> list[Row]:
    """Print a table, each row as soon as it is known; return the rows."""
    print(head(columns), flush=True)
    shown = []
    for row in rows:
        print(line(row, columns), flush=True)
        shown.append(row)
    return shown


def _line(cells: Sequence[str], columns: Sequence[Column], styles: dict[int, str]) -> str:
    """Return cells side by side; a style is "bold" or "underline", by the number of a cell."""
    render = renderer()
    aligned = [(f"{cell:{'<' if column.width < 0 else '>'}{abs(column.width)}}",
                styles.get(number, ""))
               for number, (cell, column) in enumerate(zip(cells, columns))]
    return " ".join(f"{render(*cell)} " if render else _marked(*cell) for cell in aligned).rstrip()


def _marked(cell: str, style: str) -> str:
    return cell + (_MARK if style == "bold" else " ")


def _text(row: Row, column: Column) -> str:
    value = row.get(column.key)
    if value is None or value != value:
        return "-"
    if column.digits is None:
        return str(value)
    low, high = (row.get(f"{column.key}_{end}", math.nan) for end in ("low", "high"))
    text = significant(float(value), column.digits)
    if not column.interval or low != low or low == high:
        return text
    return f"{text} ({significant(low, column.digits)}-{significant(high, column.digits)})"


def significant(value: float, digits: int) -> str:
    """Return a number with `digits` significant digits, but all digits before the point."""
    exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def note(text: str) -> str:
    """Return a note above a table, wrapped in lines that begin with "# "."""
    return textwrap.fill(text, line_width(), initial_indent="# ", subsequent_indent="# ")


def about(benchmark: str, environment: Environment) -> str:
    """Return the lines above a benchmark's table, which name the machine and the software."""
    where = ranks_on_nodes(environment["ranks"], environment["nodes"])
    return "\n".join([
        f"# mpiring {environment['mpiring']} bench {benchmark}: {where}, "
        f"thread level {environment['thread_level']}",
        f"# {environment['cpu']}, {environment['cores']} cores; {environment['mpi_library']}; "
        f"mpi4py {environment['mpi4py']}, NumPy {environment['numpy']}, "
        f"Python {environment['python']}"])
