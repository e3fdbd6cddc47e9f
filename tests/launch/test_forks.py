"""Tests that forks of a rank leave MPI alone."""

import pytest
from launching import PROGRAMS, launch

pytestmark = pytest.mark.launch


def test_forks_end_by_themselves_and_do_no_harm():
    """On one rank a thread advances operations, on the other one none does."""
    ended = launch(2, PROGRAMS / "forks.py")
    ended.assert_well(2)
    # Each traceback shows it twice; what the two print may mix.
    assert ended.output.count("a bug in a fork") == 4 and "the job ends" not in ended.output
    assert ended.output.count("what it says") == 2
