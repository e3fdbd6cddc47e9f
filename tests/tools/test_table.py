"""Tests tables and the lines above them."""

import re
import sys

import pytest
from launching import needed

from mpiring.tools import table
from mpiring.tools.table import Column

ABOUT = {
    "ranks": 4, "nodes": 1, "cpu": "A CPU", "mpi_library": "MPICH 5", "thread_level": "multiple",
    "mpiring": "1", "cores": 2, "mpi4py": "4", "numpy": "2", "python": "3"}


def test_a_table():
    columns = [Column("name", -6), Column("value", 7, 3)]
    assert table.head(columns) == "name      value"
    assert table.line({"name": "a", "value": 1234.5}, columns) == "a         1,234"
    assert table.line({"name": "b", "value": float("nan")}, columns) == "b             -"
    assert table.line({"value": 0.0}, columns) == "-          0.00"
    assert table.line({"value": 2.0}, columns, best=["value"]) == "-          2.00*"


def test_a_table_in_a_terminal(monkeypatch):
    """It has the same content, but the best value is bold."""
    columns = [Column("name", -6), Column("value", 7, 3), Column("more", 4, 1)]
    row = {"name": "a[b]", "value": 1.0, "more": 123456.0}
    plain = table.head(columns), table.line(row, columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert (table.head(columns), table.line(row, columns)) == plain
    monkeypatch.undo()
    needed("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = table.head(columns), table.line(row, columns, best=["value"])
    assert tuple(re.sub(r"\x1b\[\d*m", "", line) for line in lines) == plain
    assert re.search(r"\x1b\[1m *1.00\x1b\[0m", lines[1])


@pytest.mark.parametrize(("value", "text"), [
    (1.0, "1.00"), (0.001234, "0.00123"), (12.345, "12.3"), (123456.7, "123,457"), (99.96, "100.0"),
])
def test_significant_digits(value, text):
    assert table.significant(value, 3) == text


def test_the_lines_above_a_table():
    text = table.about("allreduce", ABOUT)
    assert "bench allreduce: 4 ranks on 1 node, thread level multiple" in text
    assert "1 rank on 2 nodes" in table.about("x", {**ABOUT, "ranks": 1, "nodes": 2})
