"""Tests the parameter server on real MPI; its clocks are tests/asynchronous's."""

import copy
import functools
import logging

import ml_dtypes
import numpy as np
import models
import pytest
from models import bits, same_on_all_ranks
from mpi4py import MPI

import mpiring
from mpiring import BufferMismatchError, ClosedError, ConfigError, StallError
from mpiring.asynchronous import ParameterServer
from mpiring.sharding.sliced import whole
from mpiring.numpy import DataParallel
from mpiring.optim import LAMB, SGD, AdamW

pytestmark = pytest.mark.mpi

model = functools.partial(models.model, dtypes={
    "w2": np.float64, "w3": ml_dtypes.bfloat16, "b3": np.float64})
METHODS = {
    "SGD": SGD,
    "Nesterov": functools.partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1,
                                  no_decay=("b*",), groups={"w1": {"lr": 0.3}}),
    "AdamW": functools.partial(AdamW, lr=lambda step: 0.1 / (1 + step), groups={"b3": {"eps": 1}}),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_without_staleness_it_is_synchronous_training(comm, method):
    runs = []
    for _ in range(2):
        # Rank 0's weights count.
        with ParameterServer(model(comm.rank), comm, optimizer=method, staleness=0) as server:
            for step in range(4):
                for name, x in model(comm.rank, step).items():
                    server.grads[name][...] = x
                assert server.step()
                assert server.clock == step + 1 and server.clocks[comm.rank] >= step + 1
                assert same_on_all_ranks(comm, server.params)
        runs.append(server.params)
    assert bits(runs[0]) == bits(runs[1])
    dp = DataParallel(model(comm.rank), comm)
    optimizer = method(dp)
    for step in range(4):
        for name, x in model(comm.rank, step).items():
            dp.grads[name][...] = x
            dp.ready(name)
        optimizer.step()
    for name, x in dp.params.items():
        tolerance = 0.05 if name == "w3" else 1e-5
        np.testing.assert_allclose(runs[0][name].astype("f8"), x.astype("f8"), tolerance, tolerance)


@pytest.mark.parametrize("staleness", [0, 3, None])
def test_every_push_counts_once_however_many_a_rank_makes(comm, staleness, caplog):
    params = {"w": np.zeros((5, 7), np.float32), "b": np.zeros(100)}
    steps = [3 + 4 * (rank % 2) for rank in range(comm.size)]
    with caplog.at_level(logging.WARNING), ParameterServer(
            params, comm, optimizer=functools.partial(SGD, lr=1.0), staleness=staleness,
            damped=False) as server:
        for step in range(steps[comm.rank]):
            g = {name: np.full_like(x, comm.rank + 1) for name, x in params.items()}
            if step == 1 and comm.rank == comm.size - 1:
                g["b"][3] = np.nan
            assert server.step(g) == np.isfinite(g["b"][3])
            if staleness is None and np.isfinite(g["b"][3]):
                server.push(g)
        assert server.refused == (comm.rank == comm.size - 1)
        assert server.statistics.operations >= 2 * steps[comm.rank]
        assert (server.statistics.bytes_sent > 0) == (comm.size > 1)
        server.finish()
        with pytest.raises(ClosedError, match=f"rank {comm.rank}: push.. after finish"):
            server.push(g)
    refused = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(refused) == server.refused
    assert all("NaN or Inf in the gradients of b" in text for text in refused)
    pushes = [[rank + 1 for rank in range(comm.size) if step < steps[rank]
               and (step != 1 or rank != comm.size - 1)] for step in range(max(steps))]
    if staleness == 0:
        # One rank's is the whole clock's where others are void.
        expected = sum(np.mean(its) for its in pushes if its)
    else:
        expected = sum(map(sum, pushes)) * (2 if staleness is None else 1)
    for x in params.values():
        np.testing.assert_allclose(x, -expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["whole", "sliced"])
def test_resume_is_bit_equal(comm, kind):
    method = functools.partial(AdamW, lr=0.1)

    def train(server, comm, first, last):
        for step in range(first, last):
            server.step(model(comm.rank, step))

    with ParameterServer(model(0), comm, optimizer=method, staleness=0) as server:
        train(server, comm, 0, 3)
        state = server.state_dict() if kind == "whole" else server.sharded_state_dict()
        train(server, comm, 3, 5)
    if kind == "sliced":
        # As a checkpoint does.
        parts = comm.allgather_object(state)
        state = {**state, "tensors": {name: {
            vector: x.merged([part["tensors"][name][vector] for part in parts[:comm.rank]
                              + parts[comm.rank + 1:]])
            for vector, x in its.items()} for name, its in state["tensors"].items()}}
    with ParameterServer(model(7), comm, optimizer=method, staleness=0) as resumed:
        resumed.load_state_dict(state)
        train(resumed, comm, 3, 5)
        with pytest.raises(ConfigError, match="the state of AdamW lacks w1, b1"):
            resumed.load_state_dict({**state, "tensors": {}})
    assert bits(resumed.params) == bits(server.params)
    # Another number of ranks.
    with comm.split(comm.rank) as alone, ParameterServer(
            model(0), alone, optimizer=method, staleness=0) as other:
        other.load_state_dict(state)
        other_state = other.state_dict()
    assert other_state["steps"] == 3
    for name, its in whole(state["tensors"]).items():
        assert bits(its) == bits(other_state["tensors"][name])


def test_mistakes(comm):
    good = {"optimizer": SGD, "staleness": 1}
    for wrong, text in [
            ({"optimizer": LAMB}, "cannot update a slice alone: it takes norms"),
            ({"optimizer": functools.partial(SGD, max_norm=1.0)}, "without max_norm"),
            ({"optimizer": functools.partial(SGD, sharded=True)}, "or sharded=True"),
            ({"optimizer": "SGD"}, "pass what makes one, as mpiring.optim.SGD"),
            ({"optimizer": functools.partial(SGD, rate=1)}, "cannot be made of a model alone"),
            ({"optimizer": functools.partial(SGD, groups={"x*": {}})}, "no parameter has such a"),
            ({"staleness": -1}, "staleness=-1: expected a whole number of at least 0"),
            ({"damped": "no"}, "damped='no': expected True or False")]:
        with pytest.raises(ConfigError, match=text):
            ParameterServer(model(0), comm, **{**good, **wrong})
    for params, text in [({}, "pass a dict of the model's arrays"),
                         ({1: np.ones(3)}, "names must be strings"),
                         ({"n": np.ones(3, int)}, "it is int64, which has no gradient"),
                         ({"l": [1.0]}, "it is list; expected a NumPy array")]:
        with pytest.raises(ConfigError, match=text):
            ParameterServer(params, comm, **good)
    with ParameterServer(model(0), comm, **good) as server:
        for nothing, text in (({}, "gradients and parameters differ by b1, b3, .*; push one of"),
                              (3, "gradients are 3; pass a dict of arrays"),
                              ({"b1": 3}, "gradient 'b1': it is int")):
            with pytest.raises(ConfigError, match=f"rank {comm.rank}: {text}"):
                server.push(nothing)
        with pytest.raises(ConfigError, match="differ by w1; push one of each"):
            server.push({name: x for name, x in model(0, 0).items() if name != "w1"})
        with pytest.raises(ConfigError, match=r"gradient of 'b1' is float32 \(1,\); expected"):
            server.push(model(0, 0) | {"b1": np.ones(1, np.float32)})
        assert server.clock == 0
    with pytest.raises(ClosedError, match="this ParameterServer is closed"):
        server.state_dict()
    if comm.size > 1:
        odd = comm.rank == comm.size - 1
        with pytest.raises(BufferMismatchError, match=f"rank {comm.size - 1}: .*=.w1 float"):
            ParameterServer({"w1": np.ones(3 + odd)}, comm, optimizer=SGD)


def test_weights_are_pulled_into_the_arrays_that_are_there(comm):
    params = {"w": np.zeros(3)}
    with ParameterServer(params, comm, optimizer=functools.partial(SGD, lr=1.0), staleness=0,
                         ) as server:
        kept, params["w"] = params["w"], np.full(3, 99.0)
        server.params["w"] = np.full(3, 98.0)
        server.push({"w": np.ones(3)})
        assert server.pull()["w"] is params["w"] is server.params["w"]
        assert (params["w"] == -1).all() and (kept == 0).all()
        params["w"] = kept
    assert (kept == -1).all()


def test_states_that_differ_are_refused_and_change_nothing(comm):
    if comm.size == 1:
        pytest.skip(reason="there is no other rank")
    odd, method = comm.rank == comm.size - 1, functools.partial(SGD, lr=1.0, momentum=0.5)
    with ParameterServer(model(0), comm, optimizer=method, staleness=0) as server:
        server.step(model(comm.rank, 0))
        saved = server.state_dict()
        server.step(model(comm.rank, 1))
        before = server.state_dict()
        state = copy.deepcopy(saved)
        state["tensors"]["w1"]["b"][3, 4] += odd
        with pytest.raises(ConfigError, match=f"rank {comm.size - 1}: the state of a ParameterServ"
                                              r"er has .*'w1'.*'b'.*3, 4\]="):
            server.load_state_dict(state)
        now = server.state_dict()
        assert now["steps"] == 2 and server.clock == 2
        for name, its in before["tensors"].items():
            assert bits(its) == bits(now["tensors"][name])
        server.load_state_dict(saved)


def test_states_of_ranks_at_different_clocks(comm):
    with ParameterServer({"w": np.zeros(3)}, comm, optimizer=SGD, staleness=None) as server:
        for _ in range(comm.rank):
            server.push({"w": np.ones(3)})
        assert server.state_dict()["steps"] == sum(range(comm.size))
    if comm.size > 1:
        with ParameterServer({"w": np.zeros(3)}, comm, optimizer=SGD, staleness=0) as server:
            if comm.rank:
                server.push({"w": np.ones(3)})
            with pytest.raises(ConfigError, match=r"pushed \[0, 1.* ask for the state after the"):
                server.state_dict()
            if not comm.rank:
                server.push({"w": np.ones(3)})
            assert server.pull()["w"][0] == np.float64(-1e-3)


def test_a_rank_that_stays_behind_is_named(comm):
    if comm.size == 1:
        pytest.skip(reason="there is no other rank")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip(reason="without a thread, a rank that waits elsewhere serves nobody")
    late = comm.size - 1
    with mpiring.init(config=mpiring.Config(stall_timeout_s=1.0)) as impatient, ParameterServer(
            model(0), impatient, optimizer=SGD, staleness=1) as server:
        server.step(model(comm.rank, 0))
        if comm.rank != late:
            server.push(model(comm.rank, 1))
            with pytest.raises(StallError) as caught:
                for step in range(2, 5):
                    server.pull()
                    server.push(model(comm.rank, step))
            assert str(caught.value).startswith(
                f"rank {comm.rank} waits at clock 3\n  rank {late} is behind: it has pushed 1 "
                f"times, and staleness=1 wants 2\n"), str(caught.value)
        # It only was late.
        comm.barrier()
        if comm.rank == late:
            for step in range(1, 3):
                server.push(model(comm.rank, step))
        server.pull()
        server.finish()
        comm.barrier()
    assert same_on_all_ranks(comm, server.params)
