"""Tests what a Work makes of a handle whose operation fails, as PyTorch's own would."""

from types import SimpleNamespace

import numpy as np
import pytest
from launching import needed

from mpiring import BufferMismatchError, StallError, TransportError


@pytest.fixture(autouse=True)
def _torch():
    """Imported by tests only, not where they are collected, which takes seconds."""
    needed("torch")


class Handle:
    """An operation that fails when it is looked at, as the engine's do."""

    complete = False
    error = None

    def test(self):
        if self.error is not None and not self.complete:
            raise self.error
        return self.complete

    def wait(self, timeout_s=None):
        if not self.test():
            raise StallError("Timed out")


@pytest.fixture
def handle():
    return Handle()


@pytest.fixture
def work(handle):
    from mpiring.torch.works import Work
    return Work(handle, [], threaded=True)


@pytest.mark.parametrize("kind", [TransportError, BufferMismatchError, StallError, MemoryError])
def test_polling_raises_nothing_and_waiting_does(kind, handle, work):
    assert not work.is_completed() and work.exception() is None
    handle.error = first = kind("of this operation")
    assert work.is_completed() and not work.is_success() and work.exception() is first
    # As the engine: who asks again hears of an earlier operation.
    handle.error = TransportError("an earlier operation failed")
    assert work.is_completed() and work.exception() is first
    for _ in range(2):
        with pytest.raises(kind) as caught:
            work.wait()
        assert caught.value is first and work.exception() is first


def test_a_wait_that_timed_out_is_no_end(handle, work):
    with pytest.raises(StallError):
        work.wait()
    assert not work.is_completed() and isinstance(work.exception(), StallError)
    handle.complete = True
    assert work.is_completed() and work.is_success() and work.exception() is None and work.wait()


def test_several_works_as_one(handle, work):
    from mpiring.torch.works import DONE, Work, coalesced
    both = coalesced([Work(DONE, ["x"], threaded=True), work])
    assert not both.is_completed() and not both.is_success() and both.exception() is None
    handle.error = TransportError("of the second")
    assert both.is_completed() and not both.is_success() and both.exception() is handle.error
    with pytest.raises(TransportError):
        both.wait()
    done = coalesced([Work(DONE, [name], threaded=True) for name in "xy"])
    assert done.wait() and done.is_success() and done.result() == ["x", "y"]
    assert done.get_future().wait() == ["x", "y"]


@pytest.mark.parametrize("rests", [True, False])
def test_operations_of_a_backward_pass_rest_until_its_end(rests, handle):
    import torch

    from mpiring.torch.works import Work
    calls = []
    queue = SimpleNamespace(pause=lambda: calls.append("pause"))
    handle.wait = lambda timeout_s: calls.append("wait")
    handle.when_done = lambda action: None
    work = Work(handle, [], threaded=True, queues=[queue] * rests)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: work.get_future() and calls.append("hook"))
    (2 * x).backward()
    assert calls == ["pause"] * rests + ["hook", "wait"]


def cores_of(*ranks):
    """Return a communicator's `run` where ranks of (node, cores) tell each other what they have."""
    def run(call, build):
        build(SimpleNamespace(allgather_bytes=lambda data: None))
        return [np.array([node, *cores], np.int64).view(np.uint8) for node, cores in ranks]

    return run


HALVES = range(4), range(4, 8)


@pytest.mark.parametrize("ranks, share", [
    ([(0, range(8))], 8), ([(0, range(8))] * 2, 4), ([(0, range(8))] * 3, 8 / 3),
    # Each on cores of its own; on other nodes; and where some of them are others', too.
    ([(0, HALVES[0]), (0, HALVES[1])], 4), ([(0, HALVES[0])] * 2 + [(0, HALVES[1])] * 2, 2),
    ([(0, range(8)), (1, range(8))], 8), ([(0, range(4)), (0, range(2, 6))], 4 / 1.5)])
def test_cores_are_full(ranks, share, monkeypatch):
    import torch

    from mpiring.torch import threads
    monkeypatch.setattr(threads, "usable_processors", lambda: set(ranks[0][1]))
    assert threads.own_share(cores_of(*ranks), 0) == pytest.approx(share)
    for count in range(1, 9):
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)
        assert threads.fill_cores(share) == (count >= share)
