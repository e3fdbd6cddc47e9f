"""Tests messages beside the collectives, and groups of some ranks, on real MPI."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Config, ConfigError, StallError
from mpiring.operations.agreement import Call
from mpiring.engine.group import Group

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def group():
    """A group of all ranks."""
    opened = Group(MPI.COMM_WORLD, Config())
    yield opened
    opened.close()


def test_long_messages_travel_in_pieces(group, monkeypatch):
    messages, size = group.messages(), group.size
    monkeypatch.setattr(messages._transport, "piece_bytes", 100)
    right, left = (group.rank + 1) % size, (group.rank - 1) % size
    x, y = np.arange(1000) + group.rank, np.empty(1000, int)
    receives = [messages.irecv(y[:500], left, 3), messages.irecv(y[500:], left, 3)]
    sends = [messages.isend(x[:500], right, 3), messages.isend(x[500:], right, 3)]
    assert [request.wait(10) for request in receives] == [left, left]
    assert [request.wait(10) for request in sends] == [right, right]
    assert np.array_equal(y, np.arange(1000) + left)
    with pytest.raises(ConfigError, match="pass the source"):
        messages.irecv(y, None)


def test_tags_that_mpi_has_not(group):
    for tag in (-2, 1 << 62):
        with pytest.raises(ConfigError, match=f"tag={tag}: this MPI supports 0 to"):
            group.messages().isend(np.empty(1), 0, tag)


def test_messages_of_a_communicator(comm):
    """Ranks that send, receive from anybody, and wait in vain."""
    messages = comm.messages()
    assert messages is comm.messages()
    others = [rank for rank in range(comm.size) if rank]
    if comm.rank:
        messages.isend(np.full((2, 2), comm.rank), 0, tag=5).wait()
    else:
        boxes = [np.empty((2, 2), int) for _ in others]
        senders = [messages.irecv(box, None, tag=5).wait(10) for box in boxes]
        assert sorted(senders) == others
        assert [box[1, 1] for box in boxes] == senders
    for wrong in (-1, comm.size, 0.5):
        with pytest.raises(ConfigError, match=f"dest={wrong}: expected a whole number from 0"):
            messages.isend(np.empty(1), wrong)
    neighbor, x = (comm.rank + 1) % comm.size, np.ones(1)
    never = messages.irecv(x, neighbor, tag=9)
    with pytest.raises(StallError, match=f"recv 8 bytes from {neighbor}, tag 9: Timed") as caught:
        never.wait(0.2)
    if comm.size > 1:
        assert f"\n  rank {neighbor} " in str(caught.value)
    comm.barrier()
    messages.isend(np.ones(1), (comm.rank - 1) % comm.size, tag=9)
    assert never.wait() == neighbor


def test_memory_groups(comm, apart):
    assert comm.memory_groups == [[*range(comm.size)]]
    assert apart.memory_groups == [[rank] for rank in range(comm.size)]


def test_groups_of_some_ranks_and_beside_others(group):
    even = list(range(0, group.size, 2))
    x = np.full(10, float(group.rank))
    if group.rank in even:
        part = group.subgroup(even[::-1], 7, Config())
        assert part.rank == even[::-1].index(group.rank) and part.size == len(even)
        part.run(Call("allreduce"), lambda collectives: collectives.allreduce(x))
        assert x[0] == sum(even)
        part.close()
    duplicate = group.duplicate()
    of_group, of_duplicate = np.ones(5), np.ones(5)
    # Ranks may call those of the two groups in different orders.
    handles = [
        those.submit(Call("allreduce"), lambda collectives, y=y: collectives.allreduce(y))
        for those, y in ((group, of_group), (duplicate, of_duplicate))[::1 - 2 * (group.rank % 2)]]
    for handle in handles:
        handle.wait()
    duplicate.close()
    assert of_group[0] == of_duplicate[0] == group.size
