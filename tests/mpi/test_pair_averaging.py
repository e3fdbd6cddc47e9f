"""Tests pair averaging, and the NumPy wrapper of the parameter server, on real MPI."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest

import mpiring
from mpiring import BufferMismatchError, ClosedError, ConfigError, GradientError, StallError
from mpiring.asynchronous import PairAveraging
from mpiring.numpy import AsyncDataParallel
from mpiring.optim import SGD

pytestmark = pytest.mark.mpi


def model(rank):
    return {"w": np.full((30, 11), rank + 1.0), "scale": np.array(0.5 + rank, np.float32),
            "h": np.full(5, rank, ml_dtypes.bfloat16)}


def totals(comm, params):
    everybodys = comm.allgather_object({name: x.astype("f8") for name, x in params.items()})
    return {name: sum(its[name] for its in everybodys) for name in params}


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_the_mean_is_conserved_and_all_agree(comm, delay):
    params = model(comm.rank)
    with PairAveraging(params, comm, seed=1, delay=delay) as pairs:
        # All begin as rank 0.
        assert params["w"][0, 0] == 1 and params["scale"] == 0.5 and params["h"][0] == 0
        learnt = 0.0
        # Uneven ends, and speeds.
        for step in range(6 + 5 * comm.rank):
            params["w"] += comm.rank + step
            learnt += comm.rank + step
            if comm.rank == 1 and step % 3 == 0:
                time.sleep(0.003)
            pairs.step()
        pairs.agree()
        expected = 1 + np.mean(comm.allgather_object(learnt))
        np.testing.assert_allclose(params["w"], expected, rtol=1e-12)
        params["w"] += comm.rank
        pairs.step()
        assert (pairs.statistics.bytes_sent > 0) == (comm.size > 1)
    np.testing.assert_allclose(params["w"], expected + (comm.size - 1) / 2, rtol=1e-12)
    assert len({params["w"].tobytes() for params in comm.allgather_object(params)}) == 1


def test_one_round_is_half_of_the_difference(comm):
    params = {"w": np.zeros(3)}
    with PairAveraging(params, comm, seed=5, delay=0) as pairs:
        params["w"][...] = comm.rank
        pairs.step()
        partners = [partner if partner is not None else comm.rank for partner in
                    comm.allgather_object(pairs._partner(0))]
        assert (params["w"] == (comm.rank + partners[comm.rank]) / 2).all()


def test_resume_is_bit_equal(comm):
    def train(params, pairs, first, last):
        for step in range(first, last):
            params["w"] -= 0.1 * np.random.default_rng([step, comm.rank]).standard_normal((30, 11))
            pairs.step()

    params = model(0)
    with PairAveraging(params, comm, seed=2, delay=1) as pairs:
        train(params, pairs, 0, 4)
        if pairs._exchange is not None:
            with pytest.raises(ConfigError, match="is in progress; call agree"):
                pairs.state_dict()
        pairs.agree()
        saved, state = {name: x.copy() for name, x in params.items()}, pairs.state_dict()
        train(params, pairs, 4, 8)
    with PairAveraging(saved, comm, delay=1) as pairs:
        pairs.load_state_dict(state)
        train(saved, pairs, 4, 8)
    assert all(saved[name].tobytes() == x.tobytes() for name, x in params.items())


def test_what_is_not_finite_is_kept_from_others(comm):
    params = {"w": np.zeros(3)}
    with PairAveraging(params, comm, delay=0) as pairs:
        if comm.rank == 0:
            params["w"][1] = np.nan
        for _ in range(3):
            pairs.step()
        assert np.isnan(params["w"]).any() == (comm.rank == 0)
        params["w"][...] = 0


@pytest.mark.parametrize("delay", [0, 1])
def test_arrays_may_be_replaced_by_their_like(comm, delay):
    params, right = {"w": np.zeros(3)}, {"w": np.zeros(3)}
    with PairAveraging(params, comm, delay=delay) as pairs, PairAveraging(
            right, comm, delay=delay) as others:
        for step in range(6):
            params["w"] = params["w"] - 0.1 * (params["w"] - comm.rank)
            pairs.step()
            right["w"] -= 0.1 * (right["w"] - comm.rank)
            others.step()
        params["w"] = params["w"].copy()
        for averaging in (pairs, others):
            averaging.agree()
        np.testing.assert_allclose(params["w"], right["w"], rtol=1e-12)
        assert len({its["w"].tobytes() for its in comm.allgather_object(params)}) == 1
        before, params["w"] = params["w"], np.zeros(3, np.float32)
        with pytest.raises(ConfigError, match=f"rank {comm.rank}: .* w float32 .* in the place of "
                                              r"w float64 \(3,\)"):
            pairs.agree()
        params["w"] = before


def test_mistakes(comm):
    with PairAveraging(model(0), comm) as pairs:
        state = pairs.state_dict()
    for late in (pairs.step, pairs.agree, lambda: pairs.load_state_dict(state)):
        with pytest.raises(ClosedError, match=f"rank {comm.rank}: .* after close.. of this Pair"):
            late()
    if comm.size > 1:
        odd = comm.rank == comm.size - 1
        with PairAveraging(model(0), comm) as pairs:
            for wrong, text in (({"seed": 3 + odd, "rounds": 2}, "seed=4, but on rank 0 it is 3"),
                                ({"seed": 3} if odd else {"seed": 3, "rounds": 2}, "lacks rounds")):
                with pytest.raises(ConfigError, match=text):
                    pairs.load_state_dict(wrong)
            assert pairs.state_dict() == {"seed": 0, "rounds": 0}
        with pytest.raises(ConfigError, match="params is 3; pass a dict of the model's arrays"):
            PairAveraging(3 if odd else model(0), comm)
        with pytest.raises(BufferMismatchError, match=".0.=.w float64"):
            PairAveraging({"w": np.ones(3 + odd)}, comm)


def test_async_data_parallel_is_a_data_parallel_with_another_step(comm):
    target = np.arange(20.0)
    dp = AsyncDataParallel({"w": np.zeros(20), "b": np.zeros(1)}, comm,
                           optimizer=functools.partial(SGD, lr=0.3), staleness=2)
    with dp:
        for _ in range(40):
            dp.grads["w"][...] = dp.params["w"] - target
            dp.ready("w")
            with pytest.raises(GradientError, match="with 1 of 2 gradients missing: b; call ready"):
                dp.step()
            with pytest.raises(GradientError, match="'w' was marked ready twice"):
                dp.ready("w")
            dp.grads["b"][...] = 0
            dp.ready("b")
            assert dp.step()
        with pytest.raises(GradientError, match="'c' is unknown"):
            dp.ready("c")
    np.testing.assert_allclose(dp.params["w"], target, atol=1e-3)


def test_a_partner_that_does_not_answer_is_named(comm):
    if comm.size == 1:
        pytest.skip(reason="there is no partner")
    params = {"w": np.full(3, float(comm.rank))}
    with mpiring.init(config=mpiring.Config(stall_timeout_s=1.0)) as impatient, PairAveraging(
            params, impatient, seed=3, delay=1) as pairs:
        late = next(x for x in comm.allgather_object(pairs._partner(0)) if x is not None)
        if pairs._partner(0) == late:
            pairs.step()
            with pytest.raises(StallError, match=f"exchange with rank {late} in round 0: Timed "
                                                 f"out after 1 s(.|\n)*\n  rank {late} "):
                pairs.step()
        comm.barrier()
