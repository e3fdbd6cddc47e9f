"""Tests that nothing grows: in 1,000 steps, and with communicators that are never closed."""

import re

import pytest
from jobs import run
from launching import PROGRAMS

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_nothing_grows_in_a_thousand_steps(progress):
    ended = run(2, PROGRAMS / "many_steps.py", MPIRING_PROGRESS=progress)
    assert ended.status == 0, ended.output
    grown = {name: (int(before), int(after)) for name, before, after in
             re.findall(r"^(\w+) (\d+) (\d+)$", ended.output, re.MULTILINE)}
    assert grown["windows"][0] >= 2, grown
    # The meeting place and the buckets stay; the last small arrays may wait for collection.
    for kind, most in (("windows", 2), ("files", 2), ("virtual", 2 << 20), ("resident", 2 << 20)):
        before, after = grown[kind]
        assert after <= before + most, grown


def test_dropped_communicators_give_back_what_is_theirs_alone():
    ended = run(2, PROGRAMS / "dropped.py")
    assert ended.status == 0 and ended.output.count("all is well") == 2, ended.output
