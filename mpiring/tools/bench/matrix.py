"""Prints results as they arrive: table rows, or a line per size with a column per contender."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .. import table
from ..table import Column, Environment, Row
from .contenders import LIMITS, NATIVE

_WIDTH, _DIGITS = 6, 3
# Short names, with which all contenders fit into 100 columns.
_SHORT = {NATIVE: "MPI", "hierarchical": "hier.", "naive, pinned": "pinned", "multiple": "multi",
          "serialized": "serial", **dict.fromkeys(LIMITS, "copy")}
_MPI, _OURS = "MPI_", "mpiring "


class Line(NamedTuple):
    """The results of one size at one thread level of MPI, by column title.

    Times of contenders are in microseconds; `others` has further values.
    """

    times: Mapping[str, float]
    others: Mapping[str, float]


# Turns the rows of one size and thread level into a Line.
Matrix = Callable[[Sequence[Row]], Line]


class Report:
    """Prints the results of a benchmark.

    Args:
        layout: Columns of its table, or a function that puts results side by side.
        title: Function that returns the title of a row's table; None for one table without a title.
        has_levels: If true, there are results for several thread levels of MPI.
    """

    def __init__(self, name: str, layout: Sequence[Column] | Matrix,
                 title: Callable[[Row], str] | None, say: Callable[[str], None], *,
                 has_levels: bool) -> None:
        self._name, self._layout, self._say, self._has_levels = name, layout, say, has_levels
        self._title_of = title
        self._title, self._columns = "", [] if callable(layout) else [
            column for column in layout if has_levels or column.key != "thread_level"]

    def begin(self, about: Environment) -> None:
        """Print the header."""
        self._say(table.about(self._name, about))
        if self._title_of is None:
            self._say(table.head(self._columns))

    def add(self, rows: Sequence[Row]) -> None:
        """Print complete rows. If a table has columns and a title, pass all its rows at once."""
        if callable(self._layout):
            self._add_sizes(self._layout, rows)
            return
        columns = self._columns
        if self._title_of is not None:
            columns = [column for column in columns if column.digits is None or any(
                row[column.key] == row[column.key] for row in rows)]
        for row in rows:
            if self._title_of is not None and self._title_of(row) != self._title:
                self._begin_table(self._title_of(row), columns)
            self._say(table.line(row, columns))

    def _begin_table(self, title: str, columns: Sequence[Column]) -> None:
        self._title = title
        for line in ("", f"# {title}", table.head(columns)):
            self._say(line)

    def _add_sizes(self, matrix: Matrix, rows: Sequence[Row]) -> None:
        """Print a line for each size and thread level."""
        sizes: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for row in rows:
            sizes.setdefault((self._title_of(row) if self._title_of else "", row["size"]),
                             {}).setdefault(row["thread_level"], []).append(row)
        for (title, size), levels in sizes.items():
            lines = {level: matrix(members) for level, members in levels.items()}
            if title != self._title:
                self._columns = self._columns_of(lines.values())
                self._begin_table(title, self._columns)
            self._add_size(size, lines)

    def _columns_of(self, lines: Iterable[Line]) -> list[Column]:
        """Return the columns, without contenders that do not support the first size."""
        names = dict.fromkeys(name for line in lines for name, value in (
            *line.times.items(), *line.others.items()) if value == value)
        order = [name for line in lines for name in (*line.times, *line.others) if name in names]
        return [
            Column("size", 8), *[Column("threads", -7)] * self._has_levels,
            *(Column(name, max(_WIDTH, len(name))) for name in dict.fromkeys(order))]

    def _add_size(self, size: str, lines: Mapping[str, Line]) -> None:
        """Print the lines of one size."""
        times = [value for line in lines.values() for value in line.times.values()
                 if value == value]
        for level, line in lines.items():
            values = {**line.times, **line.others}.items()
            row = {"size": size, "threads": short(level),
                   **{name: _text(value) for name, value in values if value == value}}
            self._say(table.line(row, self._columns, best=[
                name for name, value in line.times.items() if value == min(times)]))
            size = ""


def _text(value: float) -> str:
    text = table.significant(value, _DIGITS).replace(",", "")
    return text if len(text) <= _WIDTH or value >= 1 else f"{value:.4f}"


def short(name: str) -> str:
    """Return the short name of a contender or thread level."""
    name = name.removeprefix(_OURS)
    return _SHORT.get(name, "MPI" if name.startswith(_MPI) else name)


def by_name(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Return a value of each row, by the column title of its contender."""
    return {short(row["contender"]): row.get(key, math.nan) for row in rows}


def over_native(rows: Sequence[Row], *names: str) -> dict[str, float]:
    """Return how many times faster contenders are than MPI's own call, by column title."""
    ratios = by_name(rows, "native_over_this")
    return {f"MPI/{name}": ratios[name] for name in names if name in ratios}
