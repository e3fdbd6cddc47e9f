"""Runs rounds among other operations, under chance: see programs/rounds.py."""

import pytest
from jobs import run
from launching import PROGRAMS

# Rounds need nothing of MPI.
pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.mark.parametrize(("ranks", "operations", "how"), [
    (2, 4000, "auto"), (4, 1200, "python"), (4, 1200, "auto")])
def test_whatever_way_each_rank_takes_all_sums_are_right(ranks, operations, how, machine_code):
    ended = run(ranks, PROGRAMS / "rounds.py", str(operations), how,
                MPIRING_TUNING_FOLDER=str(machine_code))
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{operations} right") == ranks
    form = "compiled" if how == "auto" else "in Python"
    assert ended.output.count(f"fast, {form},") == ranks
    # Only compiled code combines vectors where they lie.
    assert ended.output.count(", 0 places") == (0 if how == "auto" else ranks), ended.output
