"""Tests that without a background thread each wait and each poll advances all operations."""

import contract
import numpy as np
import pytest
from launching import SOON_S, until
from mpi4py import MPI

import mpiring
import mpiring.horovod as hvd
from mpiring import StallError
from mpiring.asynchronous import ParameterServer
from mpiring.optim import SGD
from mpiring.operations.agreement import Call
from mpiring.resilience import Stopping

pytestmark = pytest.mark.mpi

INLINE = {"progress": "inline", "stall_timeout_s": SOON_S}
LENGTH = 1_000_000


class World:
    """Communicators of two engines, and Horovod's functions, without threads."""

    def __init__(self):
        self.comm, self.other = (mpiring.Communicator(
            MPI.COMM_WORLD, config=mpiring.Config(**INLINE)) for _ in range(2))
        self.part = self.comm.split(0)
        self.x = np.ones(LENGTH)
        self.named = 0
        for comm in (self.comm, self.part, self.other):
            # From now on they are fast calls.
            for _ in range(3):
                comm.iallreduce(np.ones(2), op="max").wait()
                comm.allreduce(np.ones(2))
                comm.barrier()
                comm.broadcast_object("short")
        self.total = self.other.persistent_allreduce(np.ones(3))
        self.long_total = self.comm.persistent_allreduce(np.ones(LENGTH))
        self.messages = self.other.messages()

    def close(self):
        for comm in (self.part, self.other, self.comm):
            comm.close()

    def name(self):
        self.named += 1
        return f"operation {self.named}"


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIRING_PROGRESS", "inline")
        patch.setenv("MPIRING_STALL_TIMEOUT_S", str(SOON_S))
        hvd.init(MPI.COMM_WORLD)
        world = World()
        yield world
        world.close()
        hvd.shutdown()


def short(comm):
    return comm.iallreduce(np.ones(2), op="max")


def ordinary(comm):
    return comm.iallreduce(np.ones(7), algorithm="native")


def tell(world, wait):
    """Send to the next rank, and receive from the previous one."""
    comm, x = world.other, np.zeros(3)
    sent = world.messages.isend(np.ones(3), (comm.rank + 1) % comm.size)
    wait(world.messages.irecv(x, (comm.rank - 1) % comm.size))
    wait(sent)
    assert x.all()


def act(world):
    called = []
    ordinary(world.comm).when_done(called.append)
    until(lambda: world.comm.poke() or called)


def message_once(world):
    with world.other.split(0) as part:
        part.messages()


def serve(world):
    with ParameterServer({"w": np.ones(4)}, world.other, optimizer=SGD, staleness=0) as server:
        server.step({"w": np.ones(4)})


def stop(world):
    with Stopping(world.other, signals=()) as stopping:
        assert not stopping.now() and not stopping.now()


def started(world):
    world.total.start()
    world.total.wait()


# What a rank begins, and another rank waits for before it goes on.
BEGUN = {
    "a long operation": lambda world: world.comm.iallreduce(world.x).wait,
    "one of another communicator": lambda world: world.other.iallreduce(world.x).wait,
    "a persistent operation": lambda world: world.long_total.start() or world.long_total.wait,
    "a named operation": lambda world: (lambda handle: lambda: hvd.synchronize(handle))(
        hvd.allreduce_async(world.x, name=world.name())),
}
# What that rank does meanwhile.
POLLS = {
    "a fast call": lambda world: until(short(world.part).test),
    "a fast call of another communicator": lambda world: until(short(world.other).test),
    "whether a fast call is done": lambda world: (
        lambda handle: until(lambda: handle.done))(short(world.part)),
    "whether an operation is done": lambda world: (
        lambda handle: until(lambda: handle.done))(ordinary(world.other)),
    "an operation": lambda world: until(ordinary(world.other).test),
    "a message": lambda world: tell(world, lambda message: until(message.test)),
    "an action": act,
    "a named operation": lambda world: (lambda handle: until(lambda: hvd.poll(handle)))(
        hvd.allreduce_async(np.ones(5), name=world.name())),
}
WAITS = {
    "a fast call": lambda world: short(world.other).wait(),
    "an operation": lambda world: ordinary(world.other).wait(60),
    "an allreduce": lambda world: world.other.allreduce(np.ones(2)),
    "a barrier": lambda world: world.other.barrier(),
    "an object": lambda world: world.other.broadcast_object("short"),
    "a long object": lambda world: world.other.allgather_object("x" * 5000),
    "an own operation": lambda world: world.other.run(
        Call("test"), lambda collectives: collectives.barrier()),
    "an array": lambda world: world.other.empty(5),
    "a persistent operation": lambda world: world.total(),
    "a persistent operation that was started": started,
    "a message": lambda world: tell(world, lambda message: message.wait()),
    "messages": message_once,
    "a new communicator": lambda world: mpiring.Communicator(
        MPI.COMM_WORLD, config=mpiring.Config(**INLINE)).close(),
    "a part": lambda world: world.other.split(0).close(),
    "a duplicate": lambda world: world.other._group.duplicate().close(),
    "a trace": lambda world: world.other.start_trace(world.folder) or world.other.stop_trace(),
    "a server": serve,
    "a stop": stop,
    "a named operation": lambda world: hvd.allreduce(np.ones(5), name=world.name()),
    "a named barrier": lambda world: hvd.barrier(),
}
CASES = [pytest.param(begin, meanwhile, id=f"{name}, {verb} {other}")
         for name, begin in BEGUN.items()
         for verb, table in (("polls", POLLS), ("waits for", WAITS))
         for other, meanwhile in table.items()
         if contract.full or name in ("a long operation", "a named operation")
         or other in ("a fast call", "a barrier")]


@pytest.mark.parametrize(("begin", "meanwhile"), CASES)
def test_two_ranks_that_wait_for_different_operations(world, begin, meanwhile, tmp_path):
    """Rank 0 waits for the second one first, and all others for the first one."""
    world.folder = str(tmp_path)
    finish = begin(world)
    for step in (meanwhile, lambda _: finish())[::1 if world.comm.rank == 0 else -1]:
        step(world)


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_a_poll_for_a_rank_that_never_comes(breakable, progress):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        progress = "inline"
    comm = breakable(progress=progress, stall_warning_s=0, stall_timeout_s=0.5)
    short(comm).wait()
    comm.barrier()
    if comm.rank == 0 < comm.size - 1:
        handle = short(comm)
        with pytest.raises(StallError, match=r"Timed out after \d+ s in #\d+ allreduce max"):
            until(handle.test)
