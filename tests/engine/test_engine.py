"""Tests when operations advance, without MPI: requests are flags that the test sets."""

import gc
import signal
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
from launching import SOON_S, until

from mpiring import ClosedError, Config, ProcessFailedError, StallError, TransportError
from mpiring.operations.agreement import Call
from mpiring.engine.engine import Engine, Pause
from mpiring.record.flight import Flight
from mpiring.engine.handle import Handle
from mpiring.transport.base import Task, run_together

pytestmark = pytest.mark.usefixtures("own_engines")


class Flag:
    """A request that is complete when the test says so."""

    def __init__(self):
        self.complete = False
        self.looks = 0

    def test(self):
        self.looks += 1
        return self.complete


def waits_for(*flags, result=None, log=None):
    for flag in flags:
        yield (flag,)
        if log is not None:
            log.append(threading.current_thread().name)
    return result


def breaks(flag):
    yield (flag,)
    raise ValueError("broken schedule")


class Setup:
    def __init__(self, threaded, **settings):
        self.ended = []
        self.engine = Engine(Config(**settings), threaded=threaded, end_job=self.ended.append)
        self.queue = self.engine.join(Mock())
        self.number = -1

    def handle(self, schedule, queue=None):
        self.number += 1
        return Handle(queue or self.queue, Flight(Call("test"), self.number), Task(schedule))

    def run(self, schedule):
        """Make a blocking call, as Group does."""
        handle = self.handle(schedule)
        try:
            self.engine.run(handle)
        except BaseException as error:
            self.engine.fail(error)
            raise
        return handle.task.result

    def submit(self, schedule, queue=None):
        return self.engine.submit(self.handle(schedule, queue))


@pytest.fixture
def background():
    setup = Setup(threaded=True)
    yield setup
    setup.engine.stop()


@pytest.fixture
def inline():
    return Setup(threaded=False)


def test_the_thread_advances_what_nobody_waits_for(background):
    flags, log = [Flag(), Flag()], []
    handle = background.submit(waits_for(*flags, result="sum", log=log))
    assert not handle.test()
    flags[0].complete = flags[1].complete = True
    until(lambda: handle.complete)
    assert log == ["mpiring", "mpiring"]
    assert handle.wait() == "sum"
    assert background.queue.operations == 1
    assert background.queue.communication_s > 0 and background.queue.exposed_s == 0


def test_the_thread_leaves_alone_what_its_caller_will_wait_for(background, monkeypatch):
    monkeypatch.setattr("mpiring.transport.waiting.QUEUE_PAUSE_S", 1000.0)
    flags, log, queue = [Flag() for _ in range(4)], [], background.engine.join(Mock())
    background.queue.pause()
    resting = background.submit(waits_for(flags[0], log=log))
    # That of another communicator does not rest: once it is done, the thread was there.
    other = background.submit(waits_for(flags[1]), queue)
    flags[0].complete = flags[1].complete = True
    until(lambda: other.complete)
    assert not resting.complete
    resting.wait()
    after = background.submit(waits_for(flags[2], log=log))
    flags[2].complete = True
    until(lambda: after.complete)
    # Nothing rests for long.
    monkeypatch.setattr("mpiring.transport.waiting.QUEUE_PAUSE_S", 0.01)
    background.queue.pause()
    flags[3].complete, last = True, background.submit(waits_for(flags[3], log=log))
    until(lambda: last.complete)
    assert log == [threading.current_thread().name, "mpiring", "mpiring"]


def test_the_thread_looks_less_and_less_often(background):
    flag = Flag()
    background.submit(waits_for(flag))
    until(lambda: flag.looks > 10)
    began, before = time.monotonic(), flag.looks
    time.sleep(0.2)
    # Without a pause there would be some hundred thousand more; at 2 ms, four hundred.
    assert flag.looks - before < 5000 * (time.monotonic() - began)


def test_a_pause_settles_at_a_part_of_the_time_between_movements():
    """On a clock of the test's own, since a loaded machine sleeps as long as it likes."""
    pause = Pause(2e-3)
    pauses = [pause.after(False) for _ in range(50)]
    assert pauses[0] < 1e-4 and max(pauses) == pauses[-1] == 2e-3
    for interval_s in (1e-4, 1e-3, 5e-3):
        pause, now_s, looks, late_s = Pause(2e-3), 0.0, [], []
        for event in range(1, 200):
            looks.append(0)
            while True:
                moved = now_s >= event * interval_s
                if moved:
                    late_s.append(now_s - event * interval_s)
                now_s += pause.after(moved)
                looks[-1] += 1
                if moved:
                    break
        assert max(looks[20:]) <= 6, "the pause begins anew after each movement"
        assert max(late_s[20:]) <= min(interval_s, 2e-3)


def test_a_stall_is_counted_from_the_last_movement_of_any_part(inline):
    flags = [Flag() for _ in range(3)]
    handle = inline.submit(run_together([waits_for(flag) for flag in flags], in_flight=3))
    for number, flag in enumerate(flags):
        time.sleep(0.02)
        before = handle.waited_s
        handle.test()
        assert handle.waited_s >= before, "nothing has moved"
        flag.complete, began = True, time.monotonic()
        assert handle.test() == (number == 2)
        waited_s = handle.waited_s
        assert time.monotonic() - waited_s >= began


def test_who_waits_looks_itself_and_often():
    class Patient(Flag):
        """A request that is complete once the caller has looked often."""

        def test(self):
            if threading.current_thread() is threading.main_thread():
                looked_s.append(time.monotonic())
            return len(looked_s) > 50

    # With pauses that grow to 10 s, the thread would look fifty times in minutes.
    setup, looked_s = Setup(threaded=True, max_pause_s=10.0), []
    handle = setup.submit(waits_for(Patient()))
    looked_s.clear()
    handle.wait(SOON_S)
    assert setup.queue.exposed_s >= looked_s[-1] - looked_s[0]
    assert handle.flight.exposed_s >= looked_s[-1] - looked_s[0]


def test_inline_progress_is_made_by_calls_only(inline):
    flag = Flag()
    handle = inline.submit(waits_for(flag))
    flag.complete = True
    time.sleep(0.05)
    assert not handle.complete
    assert handle.test() and handle.done


def test_operations_start_in_order_and_few_at_a_time():
    setup = Setup(threaded=False, operations_in_flight=2)
    flags = [Flag() for _ in range(4)]
    handles = [setup.submit(waits_for(flag)) for flag in flags]
    setup.engine.advance()
    assert [flag.looks > 0 for flag in flags] == [True, True, False, False]
    flags[1].complete = flags[3].complete = True
    setup.engine.advance()
    setup.engine.advance()
    assert [handle.complete for handle in handles] == [False, True, False, False]
    assert flags[2].looks and not flags[3].looks
    flags[0].complete = flags[2].complete = True
    assert handles[3].wait() is None


def test_communicators_do_not_queue_behind_each_other():
    """Else two ranks that call those of two communicators in different orders would deadlock."""
    setup = Setup(threaded=False, operations_in_flight=1)
    other, flags = setup.engine.join(Mock()), [Flag() for _ in range(3)]
    setup.submit(waits_for(flags[0]))
    setup.submit(waits_for(flags[1]))
    setup.submit(waits_for(flags[2]), other)
    setup.engine.advance()
    assert [flag.looks > 0 for flag in flags] == [True, False, True]


def test_an_exception_from_a_signal_handler_leaves_no_lock_behind():
    """Such as Ctrl-C, at any moment of a wait; afterwards the next call must not hang."""
    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    # Python drops what is raised within a callback of its collector; Hypothesis has one.
    gc.disable()
    try:
        for attempt in range(200):
            setup = Setup(threaded=True)
            handle = setup.submit(waits_for(Flag()))
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + attempt * 1e-5)
                while True:
                    handle.wait()
            done = Flag()
            done.complete = True
            with suppress(KeyboardInterrupt, TransportError):
                assert setup.run(waits_for(done, result=5)) == 5
            setup.engine.stop()
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_blocking_operation_overtakes_the_queue():
    setup = Setup(threaded=False, operations_in_flight=1)
    setup.submit(waits_for(Flag()))
    setup.submit(waits_for(Flag()))
    done = Flag()
    done.complete = True
    assert setup.run(waits_for(done, result=5)) == 5


def test_an_error_is_raised_where_somebody_waits(inline):
    flag = Flag()
    handle, later = inline.submit(breaks(flag)), inline.submit(waits_for(Flag()))
    flag.complete = True
    with pytest.raises(ValueError, match="broken schedule"):
        handle.wait()
    for attempt in (handle.wait, handle.test, later.wait, lambda: inline.submit(waits_for())):
        with pytest.raises(TransportError, match="earlier operation failed: .*broken schedule"):
            attempt()
    assert not handle.complete, "a failed operation must never look complete"


def test_an_error_of_the_thread_is_raised_in_the_main_thread(background):
    flag = Flag()
    handle = background.submit(breaks(flag))
    flag.complete = True
    until(lambda: background.engine.failure)
    with pytest.raises(ValueError, match="broken schedule"):
        handle.wait()
    time.sleep(0.1)
    assert background.ended == []


@pytest.mark.parametrize("of_thread", [True, False])
def test_after_a_failure_the_thread_answers_whoever_ends_the_job(background, of_thread):
    answer, flag = background.queue.watch.answer, Flag()
    background.submit(breaks(flag))
    if of_thread:
        flag.complete = True
    else:
        background.engine.fail(ValueError("of a caller"))
    until(lambda: answer.called)
    answer.side_effect = TransportError("MPI has failed")
    until(lambda: answer.call_count > 3)
    answer.assert_called_with(failed=True)
    background.queue.dropped = True
    until(lambda: not background.engine._thread.is_alive())


def test_an_error_of_the_thread_that_nobody_takes_ends_the_job(background, monkeypatch):
    monkeypatch.setattr("mpiring.transport.waiting.GRACE_S", 0.1)
    flag = Flag()
    background.submit(breaks(flag))
    flag.complete = True
    until(lambda: background.ended)
    assert isinstance(background.ended[0], ValueError)


def test_a_death_that_the_thread_hears_of_is_left_to_the_next_call(background, monkeypatch):
    """So are all calls of MPI: the main thread may recover."""
    monkeypatch.setattr("mpiring.transport.waiting.GRACE_S", 0.1)

    def dies(flag):
        yield (flag,)
        raise ProcessFailedError("a rank has died")

    flag = Flag()
    handle = background.submit(dies(flag))
    flag.complete = True
    until(lambda: not background.engine._thread.is_alive())
    assert background.ended == [] and not background.queue.watch.answer.called, "others may go on"
    with pytest.raises(ProcessFailedError, match="a rank has died"):
        handle.wait()


def test_giving_up_returns_what_is_under_way_and_fails_every_later_call(background):
    first_flag, second_flag = Flag(), Flag()
    first = background.submit(run_together([waits_for(first_flag), waits_for(second_flag)]))
    second = background.submit(waits_for(Flag()))
    queued = background.submit(waits_for(Flag()))
    left = background.engine.give_up(ProcessFailedError("a rank has died"))
    assert left == [first.task, second.task], "what was not begun has posted nothing"
    assert list(first.task.requests()) == [first_flag, second_flag]
    assert not background.engine._thread.is_alive()
    for handle in (first, second, queued):
        with pytest.raises(TransportError, match="a rank has died"):
            handle.wait()
    with pytest.raises(TransportError, match="a rank has died"):
        background.submit(waits_for())


@pytest.mark.parametrize("threaded", [True, False])
def test_an_operation_that_mpi_did_not_outlive_fails(threaded):
    setup = Setup(threaded)
    handle = setup.submit(waits_for(Flag()))
    setup.engine.leave(setup.queue)
    with pytest.raises(ClosedError, match="MPI ended before all operations did"):
        handle.wait()


@pytest.mark.parametrize("threaded", [True, False])
def test_actions_are_called_in_the_order_in_which_they_were_asked_for(threaded):
    setup, flags, called = Setup(threaded), [Flag(), Flag(), Flag()], []
    handles = [setup.submit(waits_for(flag)) for flag in flags[:2]]
    for i, handle in enumerate(handles):
        handle.when_done(lambda error, i=i: called.append((i, error)))
    flags[1].complete = True
    handles[1].wait()
    assert called == [], "the first operation is not complete"
    flags[0].complete = True
    handles[0].wait()
    until(lambda: len(called) == 2)
    assert called == [(0, None), (1, None)]
    handles[0].when_done(lambda error: called.append("late"))
    assert called[2:] == ["late"], "what is complete already is told at once"


def test_an_action_may_wait_for_another_operation_in_the_background():
    setup, flags, called = Setup(threaded=True), [Flag(), Flag()], []
    first, second = (setup.submit(waits_for(flag)) for flag in flags)
    first.when_done(lambda error: called.append(second.wait()))
    flags[0].complete = True
    threading.Timer(0.05, lambda: setattr(flags[1], "complete", True)).start()
    until(lambda: called)
    assert called == [None] and second.complete


@pytest.mark.parametrize("waiter", [True, False])
def test_actions_are_told_of_failures(waiter):
    setup, flag, called = Setup(threaded=True), Flag(), []
    setup.submit(breaks(flag))
    never = setup.submit(waits_for(Flag()))
    never.when_done(called.append)
    flag.complete = True
    if waiter:
        with pytest.raises(ValueError, match="broken"):
            never.wait()
    until(lambda: called)
    assert isinstance(called[0], ValueError)
    with suppress(ValueError, TransportError):
        never.test()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_wait_may_end_before_the_operation(threaded):
    setup, flag = Setup(threaded), Flag()
    handle = setup.submit(waits_for(flag, result=7))
    with pytest.raises(StallError, match="wait for #0 test: Timed out after 0.05 s"):
        handle.wait(0.05)
    flag.complete = True
    assert handle.wait(0.05) == 7


class Soon:
    """A request that is complete at the second look."""

    def __init__(self):
        self.looks = 0

    def test(self):
        self.looks += 1
        return self.looks > 1


def moves_for(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield (Soon(),)


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("waited_for", [True, False])
def test_a_wait_ends_in_time_whatever_else_moves(threaded, waited_for):
    setup = Setup(threaded)
    moving, stuck = setup.submit(moves_for(60)), setup.submit(waits_for(Flag()))

    def wait_for_it():
        with suppress(TransportError):
            moving.wait()

    other = threading.Thread(target=wait_for_it)
    if waited_for:
        other.start()
    began = time.monotonic()
    with pytest.raises(StallError, match="wait for #1 test: Timed out after 0.05 s"):
        stuck.wait(0.05)
    # 20 ms late on a quiet machine; what moves does so for 60 s.
    assert time.monotonic() - began < 20
    setup.engine.give_up(TransportError("the test is over"))
    if waited_for:
        other.join()


def test_communicators_count_for_themselves():
    setup, flags = Setup(threaded=False), [Flag() for _ in range(3)]
    other = setup.engine.join(Mock())
    handles = [setup.submit(waits_for(flags[0])), setup.submit(waits_for(flags[1]), other)]
    time.sleep(0.05)
    flags[1].complete = True
    handles[1].wait()
    assert (setup.queue.operations, other.operations) == (0, 1)
    assert setup.queue.communication_s == 0 and other.communication_s >= 0.05
    time.sleep(0.05)
    flags[0].complete = flags[2].complete = True
    setup.run(waits_for(flags[2]))
    handles[0].wait()
    assert (setup.queue.operations, other.operations) == (2, 1)
    assert setup.queue.communication_s >= 0.1
    assert 0 < setup.queue.exposed_s and 0 < other.exposed_s < other.communication_s


@pytest.mark.parametrize("threaded", [True, False])
def test_a_dropped_communicator_is_let_go_of_when_nothing_is_under_way(threaded):
    setup, flag, called = Setup(threaded), Flag(), []
    engine, queue, handle = setup.engine, setup.queue, setup.submit(waits_for(flag, result=7))
    handle.when_done(called.append)
    queue.dropped = True
    time.sleep(0.3)
    assert handle.test() is False and queue in engine._queues, "an operation is under way"
    flag.complete = True

    def let_go():
        handle.test()
        engine.advance()
        # Inline, actions are called by who waits.
        handle.when_done(lambda error: None)
        return queue not in engine._queues

    until(let_go)
    assert handle.wait() == 7 and called == [None]
    if threaded:
        until(lambda: not engine._thread.is_alive())
    # It is closed after all, at the end of the program.
    engine.take_back(queue)
    assert setup.run(waits_for(flag, result=8)) == 8
    engine.leave(queue)


def test_a_lane_may_take_any_number():
    setup, flags = Setup(threaded=False, operations_in_flight=1), [Flag() for _ in range(5)]
    queue = setup.engine.join(Mock(), 5)
    handles = [setup.handle(waits_for(flag), queue) for flag in flags]
    for handle in handles:
        setup.engine.submit(handle)
    for flag, handle in reversed(list(zip(flags, handles))):
        flag.complete = True
        assert handle.test()
        assert handle.complete
