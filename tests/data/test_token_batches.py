"""Tests that each sample comes once per epoch, on any number of ranks, however often resumed."""

import numpy as np
import pytest
import threads
from drawn_batches import LENGTHS, Comm, counts, drawn, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring import ConfigError
from mpiring.data import TokenBatches


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=400), size=st.integers(1, 9),
       tokens=st.integers(40, 900), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans())
def test_each_sample_once_per_epoch_in_the_same_batches_on_any_ranks(
        lengths, size, tokens, seed, shuffle):
    options = {"lengths": lengths, "tokens": tokens, "longest": 40, "seed": seed,
               "shuffle": shuffle, "window": 3}
    alone, several = on_ranks(1, **options), on_ranks(size, **options)
    for epoch in range(2):
        assert alone[0].epoch == several[-1].epoch == epoch
        expected = len(several[-1])
        batches = drawn(several)
        assert batches == drawn(alone) and len(batches) == expected
        assert np.all(counts(batches, len(lengths)) == 1)
        assert all(sum(min(lengths[i], 40) for i in batch) <= tokens for batch in batches)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_an_epoch_goes_on_anywhere_with_other_settings(data):
    """Stopped some times, each time resumed by other ranks with other budgets."""
    lengths, seen, state = LENGTHS[:1200], [], None
    for _ in range(data.draw(st.integers(1, 4))):
        ranks = on_ranks(data.draw(st.integers(1, 5)), lengths, state,
                         tokens=data.draw(st.sampled_from([900, 2500, 6000])),
                         longest=data.draw(st.sampled_from([None, 300])),
                         window=data.draw(st.sampled_from([1, 64])), seed=5)
        stop = data.draw(st.integers(1, 20))
        batches = drawn(ranks, stop + data.draw(st.integers(0, 3)))
        # What was drawn ahead was not trained on.
        trained = min(stop, len(batches))
        seen += batches[:trained]
        states = [batches.state_dict(seen=trained) for batches in ranks]
        assert states[1:] == states[:-1]
        state = states[0]
    rest = on_ranks(2, lengths, state, seed=5)
    seen += drawn(rest)
    assert np.all(counts(seen, 1200) == 1)
    assert rest[0].epoch == rest[1].epoch == 1
    assert drawn(rest) == drawn(on_ranks(3, lengths, {**state, "epoch": 1, "history": []}, seed=5))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_resumed_with_the_same_settings_the_same_batches_come(size):
    epoch = drawn(on_ranks(1))
    for done in (0, 1, 50, len(epoch) - 1, len(epoch)):
        ranks = on_ranks(2)
        first = drawn(ranks, done) if done else []
        state = ranks[0].state_dict(seen=done)
        resumed = on_ranks(size, state=state)
        assert len(resumed[0]) == len(epoch) - done
        assert first + drawn(resumed) == epoch


def test_epochs_differ_and_move_on_by_themselves():
    (batches,) = on_ranks(1)
    epochs = []
    while batches.epoch < 3:
        epochs.append(drawn([batches]))
    assert len({epoch[0] for epoch in epochs}) == 3
    batches.set_epoch(1)
    assert drawn([batches]) == epochs[1] and batches.epoch == 2
    batches.set_epoch(2)
    assert drawn([batches]) == epochs[2]
    assert drawn(on_ranks(1, seed=1)) != epochs[0]
    same = on_ranks(1, shuffle=False)
    assert drawn(same) == drawn(same)


def test_an_iteration_that_is_broken_off_begins_again():
    (batches,) = on_ranks(1)
    epoch = drawn(on_ranks(1))
    assert drawn([batches], 5) == drawn([batches], 5) == epoch[:5]
    assert batches.epoch == 0 and len(batches) == len(epoch)
    # Unless it is said to go on.
    state = batches.state_dict()
    assert state["history"][-1][-1] == sum(map(len, epoch[:5]))
    batches.load_state_dict(state)
    assert len(batches) == len(epoch) - 5
    assert drawn([batches], 3) == epoch[5:8]
    # It begins where the resumed one had begun.
    assert drawn([batches]) == epoch[5:]
    assert batches.epoch == 1


def test_a_framework_may_say_the_epoch_that_was_resumed():
    (batches,) = on_ranks(1)
    batches.set_epoch(4)
    epoch = drawn(on_ranks(1, state={**batches.state_dict(), "epoch": 4}))
    drawn([batches], 7)
    (resumed,) = on_ranks(1, state=batches.state_dict())
    resumed.set_epoch(4)
    assert drawn([resumed]) == epoch[7:] and resumed.epoch == 5


def test_the_end_of_an_epoch_is_the_end_of_one_iteration():
    """With the last batch drawn, the epoch has nothing left; only its end begins the next."""
    (batches,) = on_ranks(1)
    length = len(batches)
    iteration = iter(batches)
    for _ in range(length):
        next(iteration)
    before = batches.state_dict()
    assert batches.epoch == 0 and before["history"][-1][-1] == len(LENGTHS)
    assert next(iteration, None) is None
    after = batches.state_dict()
    assert batches.epoch == after["epoch"] == 1 and after["history"][-1][-1] == 0
    # Training may be behind.
    assert batches.state_dict(seen=length) == before
    assert batches.state_dict(seen=0)["epoch"] == 0
    (resumed,) = on_ranks(1, state=before)
    assert drawn([resumed]) == [] and drawn([resumed]) == drawn(on_ranks(1, state=after))
    # Also if what is left, nothing, is to be packed anew.
    (resumed,) = on_ranks(1, state=before, tokens=500)
    assert len(resumed) == 0 and resumed.padding == resumed.imbalance == 0
    assert drawn([resumed]) == [] and resumed.epoch == 1


def test_who_never_asks_for_the_end_comes_to_the_next_epoch_all_the_same():
    """As Lightning, which counts batches by len()."""
    (batches,) = on_ranks(1)
    epochs = []
    for _ in range(3):
        iteration = iter(batches)
        epochs.append([next(iteration) for _ in range(len(batches))])
    (others,) = on_ranks(1)
    assert epochs == [[*others], [*others], [*others]] and epochs[0] != epochs[1]
    assert batches.epoch == 2 and others.epoch == 3
    # Unless it was broken off before: then it begins again.
    next(iter(batches))
    assert [*batches] == [*others]
    # The same epoch again is one to go back to.
    iteration = iter(batches)
    for _ in range(len(batches)):
        next(iteration)
    batches.set_epoch(4)
    assert [*batches] == [*others] and next(iteration, None) is None and batches.epoch == 5


def test_an_old_iteration_moves_nothing():
    (batches,) = on_ranks(1)
    old = iter(batches)
    next(old)
    state = batches.state_dict()
    batches.set_epoch(5)
    assert len([*old]) == len(drawn(on_ranks(1))) - 1
    assert batches.epoch == 5 and batches.state_dict()["history"][-1][-1] == 0
    old = iter(batches)
    next(old)
    batches.load_state_dict(state)
    assert [*old] and batches.epoch == 0 and batches.state_dict() == state
    # A generator that was never asked has begun nothing, as loaders leave some.
    next(iter(batches))
    iter(batches)
    assert batches.state_dict(seen=1)["history"][-1][-1] > state["history"][-1][-1]


def test_padding_and_imbalance():
    lengths = [10] * 8 + [6] * 4
    (batches, *_) = on_ranks(4, lengths, tokens=104, shuffle=False)
    # Of 104 tokens in one batch: 26 for each rank, which pads to 30.
    assert len(batches) == 1
    assert batches.padding == pytest.approx(1 - 104 / 120) and batches.imbalance == 0
    (batches, *_) = on_ranks(3, [10, 10, 10, 10], tokens=40)
    assert batches.padding == 0 and batches.imbalance == pytest.approx(20 / (40 / 3) - 1)
    # Another epoch has others.
    (batches,) = on_ranks(1, np.tile(LENGTHS, 3), window=1)
    first = batches.padding
    batches.set_epoch(1)
    assert 0 < first < 0.1 and batches.padding != first


@pytest.mark.parametrize(("lengths", "message"), [
    ([], "rank 1: lengths is empty: expected the length of at least one sample"),
    ([3, 0, 5], r"rank 1: lengths\[1\]=0: expected a whole number of at least 1"),
    (np.array([3, 5, -1]), r"lengths\[2\]=-1: expected"),
    ([3, 2.5], r"lengths\[1\]=2.5: expected"),
    ([3, 2.0], r"array of float64: expected whole numbers, such as lengths.astype\(np.int64\)"),
    (np.array([3, 2, np.nan]), r"lengths\[2\]=nan"),
    ([3, True], r"lengths\[1\]=True"),
    ([[1, 2], [3]], r"lengths\[0\]=\[1, 2\]"),
    (np.array(["17"]), r"lengths\[0\]='17'"),
    (np.ones((2, 2), int), r"shape \(2, 2\): expected a vector"),
    ([3, 2**70], r"an array of object"),
    ([3, 5001], r"sample 1 has 5001 tokens, more than a batch of all ranks may have: tokens=5000, "
                r"longest=None; raise tokens, or cut samples to longest=5000 or less"),
    (np.array([1, 2**63], np.uint64), "sample 1 has 9223372036854775808 tokens"),
])
def test_wrong_lengths_are_named(lengths, message):
    with pytest.raises(ConfigError, match=message):
        TokenBatches(lengths, Comm(1, 2), tokens=5000)


@pytest.mark.parametrize(("options", "message"), [
    ({"tokens": 0}, "rank 1: tokens=0: expected a whole number from 1 to 2147483647"),
    ({"tokens": 1.5}, "tokens=1.5"), ({"tokens": 1 << 31}, "tokens=2147483648"),
    ({"tokens": 9, "longest": 0}, "rank 1: longest=0"),
    ({"tokens": 9, "longest": 10}, "sample 0 has 20 tokens, more than .*longest=10; raise"),
    ({"tokens": 9, "longest": True}, "longest=True"), ({"tokens": 99, "seed": -1}, "seed=-1"),
    ({"tokens": 99, "seed": 1 << 31}, "seed=2147483648"), ({"tokens": 99, "window": 0}, "window=0"),
])
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        TokenBatches([20], Comm(1, 2), **options)


def test_lengths_may_be_of_any_kind_of_whole_numbers():
    epoch = drawn(on_ranks(1, [*range(1, 90)]))
    for lengths in (range(1, 90), np.arange(1, 90, dtype=np.uint64), tuple(np.arange(1, 90)),
                    np.arange(178)[1::2] // 2 + 1):
        assert drawn(on_ranks(1, lengths)) == epoch
    lengths = np.arange(1, 90)
    (batches,) = on_ranks(1, lengths)
    lengths[:] = 1
    assert drawn([batches]) == epoch
    with pytest.raises(ConfigError, match="comm is a int"):
        TokenBatches(lengths, 3, tokens=9)


@pytest.mark.parametrize(("options", "told"), [
    ({"lengths": [5, 6, 7]}, "samples=3, but on rank 0 it is 2"),
    ({"lengths": [5, 300]}, r"lengths\[1\]=300, but on rank 0 it is 6"),
    ({"tokens": 301}, "tokens=301, but on rank 0 it is 300"),
    ({"longest": None}, "longest=None, but on rank 0 it is 10"),
    ({"window": 2}, "window=2, but on rank 0 it is 64"),
    ({"seed": 9}, "seed=9, but on rank 0 it is 0"),
    ({"shuffle": False}, "shuffle=False, but on rank 0 it is True")])
def test_ranks_that_differ_are_named(options, told):
    def rank(comm):
        usual = {"lengths": [5, 6], "tokens": 300, "longest": 10}
        with pytest.raises(ConfigError, match=(
                f"^rank 1: TokenBatches has {told}; give every rank the same lengths, in the "
                f"same order, and the same settings")):
            TokenBatches(comm=comm, **usual | (options if comm.rank == 1 else {}))
    threads.on_ranks(3, rank)


def test_states_of_other_batches_are_refused():
    (batches,) = on_ranks(1)
    drawn([batches], 5)
    good = batches.state_dict()
    others = {
        r"lengths=4999, .*, but these have lengths=5000, digest": {
            **on_ranks(1, LENGTHS[1:])[0].state_dict()},
        r"rank 0: the state is of batches with seed=9, but these have seed=0; resume with": {
            **good, "seed": 9},
        r"batches with shuffle=False, but these have shuffle=True": {**good, "shuffle": False},
        r"digest=\w+, but these have digest=\w+;": on_ranks(1, LENGTHS[::-1])[0].state_dict(),
        r"epoch=-1: expected": {**good, "epoch": -1},
        r"history is \[\[1, 2\]\]: pass": {**good, "history": [[1, 2]]},
        r"history: samples=5001: expected a whole number from 0 to 5000": {
            **good, "history": [[6000, None, 64, 5001]]},
        r"history: longest=0": {**good, "history": [[6000, 0, 64, 17]]},
        r"has 17 samples done by Budget\(tokens=6000, longest=None, window=64\), but no batch "
        r"ends there": {**good, "history": [[6000, None, 64, 17]]},
        r"state of TokenBatches lacks history": {"epoch": 3},
        r"state of TokenBatches is a int": 3,
    }
    for message, state in others.items():
        with pytest.raises(ConfigError, match=message):
            batches.load_state_dict(state)
        # Nothing has changed.
        assert batches.state_dict() == good
    batches.load_state_dict(good)


def test_who_would_share_the_batches_once_more_is_refused():
    (batches,) = on_ranks(1)
    with pytest.raises(ConfigError, match="no batch_size.*leave the loader out of Accelerate"):
        getattr(batches, "batch_size", None)


@pytest.mark.parametrize("seen", [-1, 6, 2.5, True])
def test_no_more_were_seen_than_were_drawn(seen):
    (batches,) = on_ranks(1)
    assert batches.state_dict(seen=0) == batches.state_dict()
    with pytest.raises(ConfigError, match="from 0 to 0"):
        batches.state_dict(seen=1)
    drawn([batches], 5)
    with pytest.raises(ConfigError, match=f"in this iteration\\)={seen}: .* from 0 to 5"):
        batches.state_dict(seen=seen)
