"""Counts again what the page on many ranks says, for few of them."""

import re
import statistics

import pytest
from launching import ROOT

from benchmarks import counts, main

PAGE = (ROOT / "docs/explanation/many_ranks.md").read_text()
ROW = re.compile(
    r"^\| (\w+(?:, (?:short|long))?) \| (messages|bytes|memory) \|(.*)\|$", re.MULTILINE)


def test_the_table_of_many_ranks_is_what_is_counted():
    ranks = [int(cell) for cell in re.search(r"^\| operation \| quantity \|(.*)\|$", PAGE,
                                             re.MULTILINE)[1].split("|")]
    rows = [(name, column, [int(cell.replace(",", "")) for cell in cells.split("|")])
            for name, column, cells in ROW.findall(PAGE)]
    assert {name for name, *_ in rows} == counts.OPERATIONS.keys() and ranks[-1] == 4096
    few = [p for p in ranks if p <= 64]
    counted = {(name, p): counts.count(name, p) for name in counts.OPERATIONS for p in few}
    for name, column, cells in rows:
        assert cells[:len(few)] == [getattr(counted[name, p], column) for p in few], name


@pytest.mark.parametrize("operation", [name for name in counts.OPERATIONS if "short" in name])
def test_short_operations_take_a_logarithm_of_messages(operation):
    messages = [counts.count(operation, p).messages for p in (64, 256)]
    assert messages[1] - messages[0] in (2, 4)
    assert statistics.mean(messages) < 20


def test_the_command_prints_a_row_for_each(capsys):
    assert main("counts", counts.declare, ["--ranks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(counts.OPERATIONS)
