"""Runs rounds among other operations, under chance: see programs/rounds.py."""

import pytest
from launching import PROGRAMS, launch

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("ranks", "operations"), [(2, 5000), (4, 1500)])
def test_whatever_way_each_rank_takes_all_sums_are_right(ranks, operations):
    ended = launch(ranks, PROGRAMS / "rounds.py", str(operations), "python")
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{operations} right") == ranks
