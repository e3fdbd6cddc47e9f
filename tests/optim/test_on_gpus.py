"""Holds optimisers on simulated GPUs to the bits of the host, on threads as ranks."""

import ml_dtypes
import numpy as np
import pytest
import simulated_gpu
from threads import TrainingComm, on_ranks

from mpiring.numpy import DataParallel, DiLoCo
from mpiring.optim import LAMB, LARS, SGD, AdamW

SHAPES = {"w": (70, 11), "b": (1,), "scale": (), "none": (0,), "v": (600,)}


def start(put, dtype):
    return {name: put(np.random.default_rng(1).standard_normal(shape).astype(dtype)
                      if shape else np.array(0.5, dtype)) for name, shape in SHAPES.items()}


def trained(comm, make, dtype, sharded, put, **settings):
    """Return weights and state after some steps, one of which is skipped."""
    params = start(put, dtype)
    dp = DataParallel(params, comm, bucket_bytes=2000)
    optimizer = make(dp, lr=0.1, weight_decay=0.1, no_decay=("b",), sharded=sharded, **settings)
    for step in range(4):
        for name in sorted(SHAPES):
            gradient = np.random.default_rng([step, comm.rank]).standard_normal(SHAPES[name])
            gradient = np.asarray(np.inf if step == 2 and comm.rank == 1 else gradient, dtype)
            dp.grads[name][...] = put(np.broadcast_to(gradient, SHAPES[name]).copy())
            dp.ready(name)
        assert optimizer.step() == (step != 2)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    return {name: x.get() if hasattr(x, "get") else x for name, x in params.items()}, state


CASES = {
    "sgd": (SGD, {}, np.float32, True),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}, ml_dtypes.bfloat16, True),
    "adamw": (AdamW, {}, np.float32, True),
    "adamw on whole tensors": (AdamW, {}, np.float16, False),
    "lars": (LARS, {"trust": 0.1}, np.float32, True),
    "lamb": (LAMB, {"max_norm": 1.0}, ml_dtypes.bfloat16, True),
    "lamb on whole tensors": (LAMB, {}, np.float64, False),
}


@pytest.mark.parametrize(("make", "settings", "dtype", "sharded"), CASES.values(), ids=CASES)
def test_they_have_the_bits_of_the_host(make, settings, dtype, sharded, monkeypatch):
    def run(put):
        return on_ranks(2, lambda comm: trained(comm, make, dtype, sharded, put, **settings),
                        TrainingComm)

    wanted, _ = run(lambda x: x)[0]
    gpu = simulated_gpu.installed(monkeypatch)
    results = run(gpu.put)
    # Norms are added up in another order.
    tolerance = 0 if make in (SGD, AdamW) else 1e-6
    for name, x in wanted.items():
        for params, _ in results:
            np.testing.assert_allclose(params[name].astype("f8"), x.astype("f8"), tolerance or 0,
                                       tolerance)
    assert len({params["w"].tobytes() for params, _ in results}) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_local_training_has_the_bits_of_the_host(sharded, monkeypatch):
    def run(put):
        def program(comm):
            params = start(put, "f4")
            outer = DiLoCo(params, comm, every=3, fragments=2, delay=1, sharded=sharded)
            for step in range(7):
                for name, x in params.items():
                    x *= np.float32(0.5 + comm.rank / 4)
                outer.step()
                outer.load_state_dict(outer.state_dict()) if step == 4 else None
            outer.synchronize()
            return [x.get() if hasattr(x, "get") else x for x in params.values()]

        return on_ranks(2, program, TrainingComm)

    wanted = run(lambda x: x)[0]
    for params in run(simulated_gpu.installed(monkeypatch).put):
        assert [x.tobytes() for x in params] == [x.tobytes() for x in wanted]
