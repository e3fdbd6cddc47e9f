"""Tests what a TrainState saves, how it restores it, and that it refuses what does not fit."""

import re

import numpy as np
import pytest
from threads import on_ranks

from mpiring import CheckpointError, ConfigError
from mpiring.numpy import Checkpoints, TrainState
from mpiring.resilience import Sliced


class Counter:
    """A part that is equal on all ranks."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if repr(state["value"]) == "13":
            raise KeyError("thirteen")
        self.value = state["value"]


class Drawn(Counter):
    """A part that may be behind what was drawn."""

    def state_dict(self, *, seen=None):
        return {"value": self.value if seen is None else seen}


class Halves(Counter):
    """A part in slices, which adds a state of each rank's own."""

    def __init__(self, comm, value):
        self.comm, self.value, self.rest = comm, np.full(6, value), comm.rank * value

    def sharded_state_dict(self):
        start, stop = (6 * rank // self.comm.size for rank in (self.comm.rank, self.comm.rank + 1))
        return {"value": Sliced((6,), {(start, stop): self.value[start:stop]})}

    def load_state_dict(self, state):
        self.value = state["value"].whole()

    def own_state_dict(self):
        return {"rest": self.rest}

    def load_own_state_dict(self, state):
        self.rest = state["rest"]


def parts(comm, value):
    """Return parts of all kinds, and what tells their state."""
    counter, halves, sampler = Counter(value), Halves(comm, value), Drawn(value)
    dice = np.random.default_rng(10 * value + comm.rank)
    arrays = {"w": np.full(3, value), "nested": [np.float32(value), value, None]}
    own = Counter(100 * value + comm.rank)
    state = TrainState(comm, seed=4, counter=counter, halves=halves, sampler=sampler, dice=dice,
                       arrays=arrays, own={"mine": own})
    return state, lambda: (
        counter.value, halves.value.tolist(), halves.rest, sampler.value, own.value,
        arrays["w"].tolist(), arrays["nested"], dice.bit_generator.state)


def test_all_parts_come_back(tmp_path):
    def run(comm):
        state, _ = parts(comm, 3)
        assert state.restore(None) == state.restore(tmp_path) == state.save_s == 0
        state.save(None, 3)
        state.save(tmp_path, 4)
        state.save(tmp_path, 5)
        expected = parts(comm, 3)[1]()
        with parts(comm, 8)[0] as other:
            assert other.step == 0 and state.step == 5
            state.close()
        other, facts = parts(comm, 8)
        assert other.restore(tmp_path) == other.step == 5
        assert facts() == expected
        other.close()
        assert state.save_s == 0
    on_ranks(2, run)


def test_another_number_of_ranks_leaves_each_ranks_own_state(tmp_path):
    def save(comm):
        with parts(comm, 3)[0] as state:
            state.save(tmp_path, 5, seen=44)

    def load(comm):
        state, facts = parts(comm, 8)
        assert state.restore(tmp_path) == 5
        state.close()
        counter, halves, rest, sampler, own, *_ = facts()
        assert (counter, halves, rest, sampler, own) == (
            3, [3] * 6, 8 * comm.rank, 44, 800 + comm.rank)
    on_ranks(3, save)
    on_ranks(2, load)


def drawing(comm, *seeds):
    """Return a state with generators: `shared` has one seed on all ranks, the others have many."""
    shared, legacy, single = seeds
    random = {"shared": np.random.default_rng(shared), "legacy": np.random.RandomState(legacy),
              "single": np.random.default_rng([single, comm.rank])}
    return TrainState(comm, counter=Counter(1), own={"mine": Counter(comm.rank)}, **random), random


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1), (1, 2)])
def test_generators_that_are_equal_on_all_ranks_fit_any_number(tmp_path, caplog, saving, loading):
    def save(comm):
        state, random = drawing(comm, 1, 2, 3)
        with state:
            for generator in random.values():
                generator.random(10)
            state.save(tmp_path, 5)

    def load(comm):
        state, random = drawing(comm, 11, 12, 13)
        with state:
            state.restore(tmp_path)
        assert random["shared"].random() == np.random.default_rng(1).random(11)[-1]
        assert random["legacy"].random_sample() == np.random.RandomState(2).random_sample(11)[-1]
        if saving > 1:
            assert random["single"].random() == np.random.default_rng([13, comm.rank]).random()
    on_ranks(saving, save)
    on_ranks(loading, load)
    (text,) = [record.message for record in caplog.records]
    assert f"{tmp_path / '000001-step-5'}: the own state of {saving} rank" in text
    assert f"does not fit {loading} rank" in text and "; mine, which keep their present" in text
    assert "Not restored: random numbers (single). Ranks draw from new seeds: data order" in text
    assert "differ from an uninterrupted run" in text


def test_a_checkpoint_without_equal_random_numbers_is_still_read(tmp_path, caplog):
    """Version 0.1 did not compare generators."""
    state = np.random.default_rng(5).bit_generator.state

    def save(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(3, replicated={"counter": {"value": 7}}, own={
                "random": TrainState.framework.random_state(), "parts": {"dice": state},
                "of parts": {}})

    def load(comm):
        counter, dice = Counter(), np.random.default_rng(6)
        with TrainState(comm, counter=counter, dice=dice) as state_of_job:
            assert state_of_job.restore(tmp_path) == 3 and counter.value == 7
        expected = 5 if comm.size == 2 else 6
        assert dice.random() == np.random.default_rng(expected).random()
    on_ranks(2, save)
    on_ranks(2, load)
    assert not caplog.records
    on_ranks(1, load)
    assert "Not restored: random numbers (python, numpy, dice). Ranks draw" in caplog.text


def test_own_state_that_is_left_out_has_an_effect(tmp_path, caplog):
    def save(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(3, replicated=1, own=comm.rank)

    def load(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            assert checkpoints.load().own is None
    on_ranks(2, save)
    on_ranks(1, load)
    assert "own state of 2 ranks does not fit 1 rank, and is left out" in caplog.text
    assert "data order and dropout that depend on them differ" in caplog.text


def test_slices_fit_a_part_that_wants_them_whole(tmp_path):
    def run(comm):
        with TrainState(comm, halves=Halves(comm, 3)) as state:
            state.save(tmp_path, 1)
        counter = Counter()
        with TrainState(comm, halves=counter) as state:
            state.restore(tmp_path)
        assert counter.value.tolist() == [3] * 6
    on_ranks(2, run)


class Local(Counter):
    """A part that says that each rank has its own model."""

    global_parameters = None


@pytest.mark.parametrize(("given", "own", "error"), [
    ({"model": object()}, None, "model is a object and has no state_dict() and load_state_dict()"),
    ({"step": 3}, None, "step is a int and has no state_dict() and load_state_dict(); pass an "),
    ({"net": {"w": [object()]}}, None, "net['w'][0] is a object; pass an object with state_dict()"),
    ({"a": Counter()}, {"a": Counter()}, "a: given by keyword and in own; each part is either"),
    ({}, [Counter()], "own is a list; pass a dict of parts by name"),
    ({"outer": Local()}, None, "outer is a Local, which leaves each rank its own weights:")])
def test_parts_without_a_state_are_refused_on_all_ranks(given, own, error):
    def run(comm):
        its = (given, own) if comm.rank else ({"x": Counter()}, None)
        with pytest.raises(ConfigError, match="rank 1: " + re.escape(error)):
            TrainState(comm, own=its[1], **its[0])
    on_ranks(2, run)


def test_ranks_give_the_same_parts():
    def run(comm):
        with pytest.raises(ConfigError, match=r"rank 1: TrainState has parts\[0\]=.*'b'"):
            TrainState(comm, **{"ab"[comm.rank]: Counter()})
        state = TrainState(comm, a=Counter())
        with pytest.raises(ConfigError, match="seen=3, but no part has a position"):
            state.save("never", 1, seen=3)
    on_ranks(2, run)


@pytest.mark.parametrize(("given", "error"), [
    ({"a": Counter(), "c": Counter()},
     "checkpoint 000001-step-6 in .* lacks the state of c and has the state of b besides: give "),
    ({"a": Counter()}, "has the state of b besides"),
    ({"a": Counter(), "b": Counter(), "d": Counter()}, "lacks the state of d: give TrainState"),
    ({"a": Counter(), "b": np.zeros(2)}, "b is missing in the state, but float64 .2,. here; make"),
    ({"a": Counter(), "b": {"value": np.zeros(2)}}, r"b\['value'\] is no array in the state, but"),
])
def test_a_checkpoint_of_other_parts_is_refused(tmp_path, given, error):
    def run(comm):
        with TrainState(comm, a=Counter(1), b=Counter(2)) as state:
            state.save(tmp_path, 6)
        with TrainState(comm, **given) as state, pytest.raises(
                (CheckpointError, ConfigError), match=error):
            state.restore(tmp_path)
    on_ranks(2, run)


def test_a_part_that_refuses_its_state_is_named_on_all_ranks(tmp_path):
    def run(comm):
        own = Counter(13 if comm.rank else 2)
        with TrainState(comm, own={"mine": own}) as state:
            state.save(tmp_path, 6)
            with pytest.raises(CheckpointError, match="rank 1: mine cannot take its state from "
                               "checkpoint 000001-step-6 in .*: KeyError: 'thirteen'"):
                state.restore(tmp_path)
    on_ranks(2, run)


def test_a_checkpoint_that_no_train_state_has_saved_is_refused(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, replicated={"a": 1}, own=3)
        with TrainState(comm, a=Counter()) as state, pytest.raises(
                CheckpointError, match="was not saved by a TrainState; read it with Checkpoints"):
            state.restore(tmp_path)
    on_ranks(2, run)


def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    def run(comm):
        with TrainState(comm, seed=1, a=Counter()) as state:
            state.save(tmp_path, 1)
        with TrainState(comm, seed=2, a=Counter()) as state, pytest.raises(
                CheckpointError, match="it is of seed 1, not 2"):
            state.restore(tmp_path)
    on_ranks(1, run)
