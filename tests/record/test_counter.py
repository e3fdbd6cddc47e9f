"""The counter: what rounds leave in its words, as operations of reports."""

import threading
import time

from mpiring.launch import forks
from mpiring.operations.agreement import Call
from mpiring.record.counter import OperationCounter
from mpiring.record.flight import Flight
from mpiring.record.recorder import CAPACITY, Recorder
from mpiring.transport.layout import ENTRY_WORDS, GATE_CLOSED, GATE_FORKED, RING


def note(counter, identity, sequence, began_s, ended_s):
    """Note a round, as who completes one does."""
    entry = counter.fast_calls % RING * ENTRY_WORDS
    for word, value in enumerate((identity, sequence, int(began_s * 1e9), int(ended_s * 1e9))):
        counter.ring[entry + word] = value
    counter.fast_calls += 1
    counter.fast_ns += int(ended_s * 1e9) - int(began_s * 1e9)


def test_rounds_stand_among_the_other_operations_in_the_order_of_their_calls():
    counter, recorder = OperationCounter(), Recorder()
    recorder.counters.add(counter)
    counter.group = "ranks 0-1"
    now = time.monotonic()
    recorder.add(Flight(Call("first"), 0, called_s=now - 3))
    recorder.add(Flight(Call("third"), 2, called_s=now - 1))
    call = Call("second", "of rounds", nbytes=8)
    note(counter, counter.identity_of(call, "eager"), 1, now - 2, now - 1.9995)
    first, second, third = recorder.lines()
    assert "#0 first" in first and "#2 third" in third
    assert "#1 second of rounds, 8 bytes, eager, among ranks 0-1: queued 0.0, took 0.5" in second
    assert recorder.lines(2) == [second, third]
    assert recorder.lines(0) == []
    assert counter.fast_calls == 1 and 0.0004 < counter.fast_s < 0.0006


def test_the_last_rounds_are_known_and_the_first_forgotten():
    counter, recorder = OperationCounter(), Recorder()
    recorder.counters.add(counter)
    identity = counter.identity_of(Call("allreduce"), "eager")
    for sequence in range(RING + 10):
        note(counter, identity, sequence, sequence + 1.0, sequence + 2.0)
    assert [flight.sequence for flight in counter.flights()] == list(range(10, RING + 10))
    assert [flight.sequence for flight in counter.flights(3)] == list(range(RING + 7, RING + 10))
    assert len(recorder.lines()) == CAPACITY


def test_calls_that_are_made_once_do_not_displace_others():
    counter = OperationCounter()
    lasting = counter.identity_of(Call("lasting"), "eager")
    for number in range(10 * RING):
        note(counter, counter.identity_of(Call(f"call {number}"), "eager", once=True), number, 1, 2)
    note(counter, lasting, 10 * RING, 2, 3)
    assert [str(flight.call) for flight in counter.flights()] == [
        *(f"call {number}" for number in range(9 * RING + 1, 10 * RING)), "lasting"]
    assert len(counter._calls) <= 2 * RING + 1


def test_calls_without_end_are_forgotten_but_not_those_in_the_ring():
    counter = OperationCounter()
    first = counter.identity_of(Call("first"), "eager")
    lost = counter.identity_of(Call("lost"), "eager")
    note(counter, first, 0, 1.0, 2.0)
    for number in range(10 * RING):
        counter.identity_of(Call(f"call {number}"), "eager")
    assert len(counter._calls) <= 4 * RING
    note(counter, lost, 1, 2.0, 3.0)
    assert [str(flight.call) for flight in counter.flights()] == [
        "first", "a fast call of long ago"]


def test_a_gate_stays_closed_and_closes_in_a_fork(monkeypatch):
    counter = OperationCounter()
    assert not counter.gate
    counter.close(GATE_CLOSED)
    counter.__enter__()
    assert counter.held == 1
    monkeypatch.setattr(forks, "in_fork", False)
    monkeypatch.setattr("sys.exit", None)
    monkeypatch.setattr(forks, "gates", {counter})
    # This process is none, and must not ignore these signals from now on.
    monkeypatch.setattr(forks, "_STOPPING", ())
    forks._begin()
    assert counter.gate == GATE_CLOSED | GATE_FORKED
    # The thread that held it is not in the fork.
    assert counter.held == 0
    thread = threading.Thread(target=counter.__enter__)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
