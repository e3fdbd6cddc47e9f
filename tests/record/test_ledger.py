"""The ledger: what rounds leave in its words, as operations of reports."""

import time

from mpiring.launch import forks
from mpiring.operations.agreement import Call
from mpiring.record.ledger import Ledger
from mpiring.record.flight import Flight
from mpiring.record.recorder import CAPACITY, Recorder
from mpiring.transport.layout import (
    GATE_CLOSED, GATE_FORKED, LEDGER_GATE, LEDGER_NANOSECONDS, LEDGER_RING, LEDGER_ROUNDS, RING,
    RING_WORDS)


def note(ledger, identity, sequence, began_s, ended_s):
    """Note a round, as who completes one does."""
    words, count = ledger.words, ledger.words[LEDGER_ROUNDS]
    entry = LEDGER_RING + count % RING * RING_WORDS
    for word, value in enumerate((identity, sequence, int(began_s * 1e9), int(ended_s * 1e9))):
        words[entry + word] = value
    words[LEDGER_ROUNDS] += 1
    words[LEDGER_NANOSECONDS] += int(ended_s * 1e9) - int(began_s * 1e9)


def test_rounds_stand_among_the_other_operations_in_the_order_of_their_calls():
    ledger, recorder = Ledger(), Recorder()
    recorder.ledgers.add(ledger)
    ledger.group = "ranks 0-1"
    now = time.monotonic()
    recorder.add(Flight(Call("first"), 0, called_s=now - 3))
    recorder.add(Flight(Call("third"), 2, called_s=now - 1))
    call = Call("second", "of rounds", nbytes=8)
    note(ledger, ledger.identity_of(call, "eager"), 1, now - 2, now - 1.9995)
    first, second, third = recorder.lines()
    assert "#0 first" in first and "#2 third" in third
    assert "#1 second of rounds, 8 bytes, eager, among ranks 0-1: queued 0.0, took 0.5" in second
    assert recorder.lines(2) == [second, third]
    assert recorder.lines(0) == []
    assert ledger.rounds == 1 and 0.0004 < ledger.rounds_s < 0.0006


def test_the_last_rounds_are_known_and_the_first_forgotten():
    ledger, recorder = Ledger(), Recorder()
    recorder.ledgers.add(ledger)
    identity = ledger.identity_of(Call("allreduce"), "eager")
    for sequence in range(RING + 10):
        note(ledger, identity, sequence, sequence + 1.0, sequence + 2.0)
    assert [flight.sequence for flight in ledger.flights()] == list(range(10, RING + 10))
    assert [flight.sequence for flight in ledger.flights(3)] == list(range(RING + 7, RING + 10))
    assert len(recorder.lines()) == CAPACITY


def test_calls_without_end_are_forgotten_but_not_those_in_the_ring():
    ledger = Ledger()
    first = ledger.identity_of(Call("first"), "eager")
    lost = ledger.identity_of(Call("lost"), "eager")
    note(ledger, first, 0, 1.0, 2.0)
    for number in range(10 * RING):
        ledger.identity_of(Call(f"call {number}"), "eager")
    assert len(ledger._calls) <= 4 * RING
    note(ledger, lost, 1, 2.0, 3.0)
    assert [str(flight.call) for flight in ledger.flights()] == [
        "first", "a round of a call long ago"]


def test_a_gate_stays_closed_and_closes_in_a_fork(monkeypatch):
    ledger = Ledger()
    assert not ledger.words[LEDGER_GATE]
    ledger.close(GATE_CLOSED)
    held = ledger.lock
    held.acquire()
    monkeypatch.setattr(forks, "in_fork", False)
    monkeypatch.setattr("sys.exit", None)
    monkeypatch.setattr(forks, "gates", {ledger})
    forks._begin()
    assert ledger.words[LEDGER_GATE] == GATE_CLOSED | GATE_FORKED
    # The thread that held it is not in the fork.
    assert ledger.lock is not held
