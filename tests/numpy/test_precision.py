"""Tests loss scaling and master weights without MPI: on one rank, or on threads as ranks."""

import json
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from contract import same_bits
from threads import ThreadComm, on_ranks

import mpiring
from mpiring.numpy import LossScaler, MasterWeights
from mpiring.numpy.precision import HOPELESS_STEPS

SIXTEEN = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


class OneRank:
    """A communicator of one rank."""

    rank = 0

    def allgather_object(self, obj, *, label=None):
        return [obj]


class Model:
    """Has what precision needs of a DataParallel, and records what it is told."""

    def __init__(self, comm=None, **params):
        self.comm = comm or OneRank()
        self.gradients = SimpleNamespace(compared={})
        self.params = params
        self.grads = {name: np.zeros_like(array) for name, array in params.items()}
        self.steps, self.factors = 0, []

    @property
    def finite(self):
        return all(np.isfinite(grad).all() for grad in self.grads.values())

    def rescale(self, factor):
        self.factors.append(factor)

    def step(self, value):
        """Compute gradients."""
        for grad in self.grads.values():
            grad[...] = value
        self.steps += 1


def weights(dtype=np.float32, comm=None):
    return Model(comm, w=np.ones((2, 3), dtype), b=np.zeros((), dtype))


def test_the_scale_backs_off_and_grows():
    dp = weights()
    scaler = LossScaler(dp, initial_scale=8, growth=4, backoff=0.5, growth_interval=3,
                        smallest=4, largest=32)
    scales, answers = [], []
    for value in (1, np.inf, np.nan, 1, 1, np.inf, 1, 1, 1, 1, 1, 1, 1, 1, 1, -np.inf):
        dp.step(value)
        answers.append(scaler.step())
        scales.append(scaler.scale)
    assert answers == [True, False, False, True, True, False, *[True] * 9, False]
    assert scales == [8, 4, 4, 4, 4, 4, 4, 4, 16, 16, 16, 32, 32, 32, 32, 16]
    # What is kept between steps follows.
    assert dp.factors == [0.5, 4, 2, 0.5]


@pytest.mark.parametrize("dtype", [*SIXTEEN, "float32", "float64", "complex64", "longdouble"],
                         ids=str)
def test_gradients_are_unscaled_by_the_scale_of_their_step(dtype):
    dp = weights(dtype)
    scaler = LossScaler(dp, initial_scale=1024, growth_interval=1)
    for scale in (1024, 2048, 4096):
        assert scaler.scale == scale
        dp.step(2.0**-20 * scaler.scale)
        assert scaler.step()
        for name, grad in dp.grads.items():
            unscaled = scaler.unscaled(name)
            assert (unscaled == 2.0**-20).all() and unscaled.shape == grad.shape
            assert unscaled.dtype == np.promote_types(dtype, np.float32)
            assert unscaled is not grad and (grad == 2.0**-20 * scale).all()


def test_steps_are_asked_for_once_and_gradients_only_of_accepted_ones():
    dp = weights()
    dp.step(1)
    scaler = LossScaler(dp)
    with pytest.raises(mpiring.GradientError, match="once after each dp.wait"):
        scaler.step()
    with pytest.raises(mpiring.GradientError, match=r"unscaled\('w'\) of a step that was not"):
        scaler.unscaled("w")
    dp.step(1)
    with pytest.raises(mpiring.GradientError, match="where scaler.step"):
        scaler.unscaled("w")
    assert scaler.step() and (scaler.unscaled("w") == 2.0**-16).all()
    with pytest.raises(mpiring.GradientError, match="once after each dp.wait"):
        scaler.step()
    dp.step(np.nan)
    assert not scaler.step() and scaler.scale == 2.0**15
    with pytest.raises(mpiring.GradientError, match="where scaler.step"):
        scaler.unscaled("w")
    with pytest.raises(AttributeError):
        scaler.scale = 1


def test_what_is_never_finite_ends_with_an_error():
    dp = weights()
    scaler = LossScaler(dp, initial_scale=4)
    for _ in range(5):
        # A bad batch now and then, at the smallest scale, is none of this.
        for value in [np.inf] * (HOPELESS_STEPS - 1) + [1]:
            dp.step(value)
            scaler.step()
    assert scaler.scale == 1
    with pytest.raises(mpiring.GradientError, match=(
            rf"rank 0: {HOPELESS_STEPS} steps in a row .* smallest scale, 1: .* in b; look")):
        for _ in range(HOPELESS_STEPS):
            dp.step(1)
            dp.grads["b"][...] = np.nan
            assert not scaler.step()
    assert dp.steps == 6 * HOPELESS_STEPS


@pytest.mark.parametrize("save", [dict, lambda state: json.loads(json.dumps(state)),
                                  lambda state: {k: np.asarray(v) for k, v in state.items()}])
def test_a_scaler_goes_on_exactly(save):
    values = np.where(np.random.default_rng(1).random(200) < 0.2, np.inf, 1)

    def new():
        dp = weights()
        return dp, LossScaler(dp, initial_scale=16, growth_interval=5, largest=64)

    def go_on(dp, scaler, values):
        for value in values:
            dp.step(value)
            yield scaler.step(), scaler.scale

    uninterrupted = list(go_on(*new(), values))
    assert len({scale for _, scale in uninterrupted}) > 3
    for stop in (1, 7, 50, 199):
        (dp, scaler), (again, other) = new(), new()
        first = list(go_on(dp, scaler, values[:stop]))
        other.load_state_dict(save(scaler.state_dict()))
        assert other.state_dict() == scaler.state_dict()
        assert first + list(go_on(again, other, values[stop:])) == uninterrupted


def test_settings_and_states_that_cannot_work_are_refused():
    dp = weights()
    for settings, message in (
            ({"initial_scale": 1000}, "initial_scale=1000: expected a power of two from 1 to 1.67"),
            ({"initial_scale": 0.5}, "initial_scale=0.5: expected a power of two from 1 to"),
            ({"growth": 1.5}, "growth=1.5: expected a power of two from 2 to"),
            ({"growth": 1}, "growth=1"),
            ({"backoff": 1}, "backoff=1: expected a power of two from .* to 0.5"),
            ({"growth_interval": 0}, "growth_interval=0: expected a whole number of at least 1"),
            ({"growth_interval": 1e3}, "growth_interval=1000.0"),
            ({"smallest": 0}, "smallest=0"), ({"smallest": 2.0**17}, "initial_scale=65536.0"),
            ({"smallest": 4, "largest": 2}, "largest=2: expected a power of two from 4"),
            ({"largest": np.nan}, "largest=nan")):
        with pytest.raises(mpiring.ConfigError, match=message):
            LossScaler(dp, **settings)
    for make in (LossScaler, MasterWeights):
        with pytest.raises(mpiring.ConfigError, match="dp is a dict; pass a DataParallel"):
            make(dp.params)
    with pytest.raises(mpiring.ConfigError, match=r"write into it: masters\['w'\]\[...\] = "):
        MasterWeights(dp)["w"] = np.ones((2, 3), np.float32)
    scaler = LossScaler(dp)
    good = scaler.state_dict()
    for state, message in (
            ({"sclae": 1}, "lacks scale, taken_in_row, skipped_at_smallest and has sclae besides:"),
            ({**good, "scale": 3.0}, "scale=3.0: expected a power of two")):
        with pytest.raises(mpiring.ConfigError, match=message):
            scaler.load_state_dict(state)
    assert scaler.state_dict() == good


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_masters_keep_updates_too_small_for_16_bits(dtype, order):
    w = np.asarray(np.ones((3, 4)), dtype, order=order)
    dp = Model(w=w, b=np.ones(5, np.float32), c=np.ones((), dtype), d=np.ones(2))
    masters = MasterWeights(dp)
    assert masters["b"] is dp.params["b"] and masters["d"] is dp.params["d"]
    assert list(masters) == ["w", "b", "c", "d"] and len(masters) == 4
    for name in ("w", "c"):
        assert masters[name].dtype == np.float32 and (masters[name] == 1).all()
        assert masters[name].shape == dp.params[name].shape
    # A 16th of the way to the next smaller number: 100 of these make 6 bits, and 200 make 12.
    tiny = np.float32(2.0**-15 if dtype == np.float16 else 2.0**-12)
    alone = w.copy()
    for _ in range(100):
        alone -= tiny.astype(dtype)
        for master in masters.values():
            master -= tiny
        masters["w"] -= tiny
        masters.round_off()
    assert (alone == 1).all(), "16 bits alone lose it"
    assert dp.params["w"] is w
    assert (masters["w"] == 1 - 200 * tiny).all() and (masters["c"] == 1 - 100 * tiny).all()
    for name in ("w", "c"):
        assert (dp.params[name] < 1).all()
        assert same_bits(dp.params[name].ravel(), masters[name].astype(dtype).ravel())
    # To the nearest, of ties to the even.
    masters["w"][...] = 1 + np.arange(12).reshape(3, 4) * (8 * tiny)
    masters.round_off()
    assert same_bits(w.ravel(), masters["w"].astype(dtype).ravel())


def test_masters_go_on_exactly(tmp_path):
    def train(dp, masters, steps):
        for number in steps:
            for name, master in masters.items():
                master -= np.float32(0.001 * number)
            masters.round_off()
        return [array.tobytes() for array in (*masters.values(), *dp.params.values())]

    def new(value):
        return Model(w=np.full(7, value, np.float16), b=np.full(3, value, np.float32))

    dp = new(1)
    uninterrupted = train(dp, MasterWeights(dp), range(20))
    dp = new(1)
    masters = MasterWeights(dp)
    train(dp, masters, range(9))
    state = masters.state_dict()
    np.savez(tmp_path / "masters.npz", **state)
    train(dp, masters, range(9, 12))
    assert not (state["b"] == masters["b"]).all(), "a state must not change with the training"
    dp = new(5)
    masters = MasterWeights(dp)
    with np.load(tmp_path / "masters.npz") as saved:
        masters.load_state_dict(saved)
    assert same_bits(dp.params["w"], masters["w"].astype(np.float16))
    assert train(dp, masters, range(9, 20)) == uninterrupted


def outcomes(call):
    """Return what each of two ranks raises, as type and text, and its state before and after."""
    def program(comm):
        dp = weights(np.float16, comm)
        dp.scaler, dp.masters = LossScaler(dp), MasterWeights(dp)
        dp.step(1)
        dp.scaler.step()
        before = repr((dp.scaler.state_dict(), dp.masters.state_dict(), dp.params))
        with pytest.raises(mpiring.ConfigError) as error:
            call(dp, comm.rank == 1)
        assert repr((dp.scaler.state_dict(), dp.masters.state_dict(), dp.params)) == before
        assert dp.scaler.unscaled("w").shape == (2, 3), "the step of before goes on"
        return str(error.value)

    return on_ranks(2, program, ThreadComm)


def load(change):
    def call(dp, odd):
        state = dp.scaler.state_dict()
        dp.scaler.load_state_dict(change(state) if odd else state)

    return call


def load_masters(change):
    def call(dp, odd):
        state = {**dp.masters.state_dict(), "b": np.float32(3) * np.ones((), np.float32)}
        dp.masters.load_state_dict(change(state) if odd else state)

    return call


@pytest.mark.parametrize(("call", "message"), [
    *((lambda dp, odd, its={name: value}: LossScaler(dp, **(its if odd else {})), message)
      for name, value, message in [
          ("initial_scale", 2.0, "LossScaler has initial_scale=2, but on rank 0 it is 65536; give"),
          ("growth", 4, "LossScaler has growth=4, but on rank 0 it is 2"),
          ("backoff", 0.25, "LossScaler has backoff=0.25, but on rank 0 it is 0.5"),
          ("growth_interval", 3, "LossScaler has growth_interval=3, but on rank 0 it is 2000"),
          ("smallest", 2, "LossScaler has smallest=2, but on rank 0 it is 1"),
          ("largest", 2.0**30, "LossScaler has largest=1073741824, but on rank 0 it is 16777216"),
          ("initial_scale", "x", "initial_scale='x': expected a power of two"),
          ("growth", None, "growth=None: expected a power of two")]),
    (load(lambda state: {**state, "scale": 4.0}),
     "the state of a LossScaler has scale=4, but on rank 0 it is 65536; load the same state on"),
    (load(lambda state: {**state, "taken_in_row": 7}), "has taken_in_row=7, but on rank 0 it is 1"),
    (load(lambda state: {**state, "skipped_at_smallest": -1}), "skipped_at_smallest=-1: expected"),
    (load(lambda state: {}), "the state of a LossScaler lacks scale, taken"),
    (load_masters(lambda state: {**state, "w": state["w"] + 1}),
     r"the state of the MasterWeights has arrays\['w'\]\[0, 0\]=2.0, but on rank 0 it is 1.0"),
    (load_masters(lambda state: {**state, "w": 3}), "'w' is a int in the state of the MasterW"),
    (load_masters(lambda state: {"w": state["w"]}), "the state of the MasterWeights lacks b"),
    (load_masters(lambda state: {**state, "v": 1}), "has v besides"),
    (load_masters(lambda state: {**state, "w": state["w"].T}),
     r"'w' is float32 \(3, 2\) .* but float32 \(2, 3\)"),
    (load_masters(lambda state: {**state, "w": state["w"].astype("f8")}),
     "'w' is float64 .* build the model"),
])
def test_what_differs_between_ranks_is_refused_on_all_and_changes_nothing(call, message):
    first, second = outcomes(call)
    assert first.startswith("rank 1: ") and re.search(message, first), first
    assert first.endswith(second)
