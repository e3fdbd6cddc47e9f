"""Tests how ranks that share processors wait, compared with ranks that have a processor each."""

from mpiring.transport.waiting import (
    IDLE_CHECK_S, SHARED_CORE_SPINS, WAIT_PAUSE_S, Patience, patience)


def test_ranks_with_a_processor_each_spin():
    assert patience(1, 1) == patience(2, 2) == patience(3, 64) == Patience()


def test_more_ranks_than_processors_give_them_away_at_once():
    for ranks in (3, 4, 16, 64, 1000):
        crowded = patience(ranks, 2)
        assert crowded.spins == crowded.compiled_spins == SHARED_CORE_SPINS
        assert 1 <= crowded.yields <= Patience().yields
    assert patience(64, 2).yields < patience(4, 2).yields
    assert patience(64, 2).yield_s < patience(4, 2).yield_s


def test_pauses_grow_if_more_than_two_ranks_share_a_processor():
    assert patience(4, 2).pause_after(60.0) == WAIT_PAUSE_S
    pauses_s = [patience(5, 2).pause_after(waited_s) for waited_s in (0.0, 0.1, 1.0, 60.0, 600.0)]
    assert pauses_s[0] == WAIT_PAUSE_S < pauses_s[1] < pauses_s[2] < pauses_s[3] == IDLE_CHECK_S
    assert pauses_s[4] == IDLE_CHECK_S
