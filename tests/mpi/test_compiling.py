"""Tests who compiles what ahead of use."""

import numpy as np
import pytest
from launching import installed
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
    by_any_rank = sorted(set(compiled))
    own = compiled[:-len(by_any_rank)]
    assert sorted(compiled[len(own):]) == by_any_rank and set(own) < set(by_any_rank)


@pytest.mark.parametrize("on_all", [True, False])
def test_slices_are_combined_from_fewer_bytes_on_if_every_rank_may_compile(on_all):
    installed("numba")
    world = MPI.COMM_WORLD
    config = mpiring.Config(machine_code=on_all or world.rank > 0)
    with mpiring.Communicator(world, config=config) as comm:
        if len(comm.memory_groups) > 1 or comm.size == 1:
            return
        for op, n, algorithm in (
                ("sum", 256, "eager"), ("max", 4096, "eager"), ("mean", 32768, "shared"),
                ("sum", 4096, "shared" if on_all else "eager")):
            expected = {"sum": sum(range(comm.size)), "max": comm.size - 1,
                        "mean": (comm.size - 1) / 2}[op]
            total = comm.persistent_allreduce(y := np.empty(n, np.float32), op=op)
            for _ in range(3):
                x = np.full(n, comm.rank, np.float32)
                comm.allreduce(x, op=op)
                assert f", {algorithm}: " in comm.recorder.lines(1)[-1]
                assert (x == expected).all()
                x[:] = y[:] = comm.rank
                # Calls that are started always use slots if they fit.
                handle = comm.iallreduce(x, op=op)
                total()
                assert (handle.wait() == expected).all() and (y == expected).all()
