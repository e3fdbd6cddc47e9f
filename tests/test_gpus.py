"""Tests that ranks take GPUs in turn, and that sharing one is logged once."""

from types import SimpleNamespace

import pytest

from mpiring.gpus import assign_gpu


@pytest.mark.parametrize(("visible", "chosen", "sharing"), [
    # What each rank of two nodes sees, the index that it takes, how many share.
    ([["a", "b"]] * 4, [0, 1, 0, 1], 0),
    ([["a"]] * 4, [0, 0, 0, 0], 2),
    # As Slurm does with --gpus-per-task=1.
    ([["a"], ["b"], ["a"], ["b"]], [0, 0, 0, 0], 0),
    ([["a", "b"], ["b", "a"]] * 2, [0, 1, 0, 1], 2)])
def test_ranks_take_turns(caplog, visible, chosen, sharing):
    everybodys = [(rank // 2, names[index])
                  for rank, (names, index) in enumerate(zip(visible, chosen))]
    for rank, names in enumerate(visible):
        comm = SimpleNamespace(rank=rank, local_rank=rank % 2, node_rank=rank // 2,
                               allgather_object=lambda obj: everybodys)
        assert assign_gpu(comm, len(names), names.__getitem__) == chosen[rank]
    assert caplog.text.count("ranks share GPU") == (sharing > 0)
    assert (f"{sharing} ranks share GPU" in caplog.text) == (sharing > 0)
