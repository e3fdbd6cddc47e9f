"""Tests who compiles what ahead of use."""

import pytest
from mpi4py import MPI

import mpiring
from mpiring.jit import cache

pytestmark = pytest.mark.mpi


@pytest.fixture
def compiled(monkeypatch):
    """What this rank would have compiled, in order."""
    asked = []
    monkeypatch.setattr(cache, "code", lambda label, *_, compiles: (
        asked.append(label) if compiles else None))
    monkeypatch.setattr(cache, "_folder", None)
    return asked


@pytest.mark.parametrize("rounds", ["auto", "python", "off"])
def test_ranks_share_the_work_and_who_keeps_nothing_does_none(compiled, rounds, tmp_path):
    world = MPI.COMM_WORLD
    keeps = world.rank < world.size - 1
    config = mpiring.Config(tuning_folder=str(tmp_path) if keeps else "", rounds=rounds)
    with mpiring.Communicator(world, config=config) as comm:
        shares = len(comm.memory_groups) == 1 and comm.size > 1
        comm.prepare(["float16"])
    if not (keeps and shares):
        assert not compiled
        return
    # Those on a node also add up private vectors, piece by piece, whatever `rounds` says.
    assert {"sums of float16 on a node", "sums of float32 on a node",
            "long sums of float32"} <= set(compiled)
    everything = sorted(set(compiled))
    mine = compiled[:-len(everything)]
    assert sorted(compiled[len(mine):]) == everything and set(mine) < set(everything)
