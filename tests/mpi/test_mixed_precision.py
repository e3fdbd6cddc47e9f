"""Tests loss scaling and master weights on real MPI, at any number of ranks."""

import numpy as np
import pytest

import mpiring
from mpiring.memory.arrays import is_finite
from mpiring.numpy import DataParallel, LossScaler, MasterWeights
from mpiring.reducers import Compressor, two_phase

pytestmark = pytest.mark.mpi


def model(rank, dtype=np.float16):
    random = np.random.default_rng(rank)
    return {"w": random.random((20, 30)).astype(dtype), "b": random.random(7).astype(np.float32)}


def step(dp, scaler, value):
    """Let all gradients be `value`, of the loss."""
    for name, grad in dp.grads.items():
        grad[...] = np.asarray(value * scaler.scale, grad.dtype)
        dp.ready(name)
    dp.wait()
    taken = scaler.step()
    everybodys = dp.comm.allgather_object((taken, scaler.scale, scaler.state_dict()))
    assert everybodys == everybodys[:1] * dp.comm.size
    return taken


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_an_overflow_on_one_rank_skips_the_step_on_all(comm, bad, bucket_bytes):
    dp = DataParallel(model(0), comm, bucket_bytes=bucket_bytes)
    assert dp.finite and dp.steps == 0
    scaler = LossScaler(dp, initial_scale=1024, growth_interval=2)
    scales = []
    for number in range(7):
        alone = number in (1, 2) and comm.rank == number % comm.size
        taken = step(dp, scaler, bad if alone else 2.0**-20)
        assert taken == dp.finite == (number not in (1, 2)) and dp.steps == number + 1
        if taken:
            assert (scaler.unscaled("w") == 2.0**-20).all()
        scales.append(scaler.scale)
    assert scales == [1024, 512, 256, 256, 512, 512, 1024]


def test_ranks_that_overflow_oppositely_are_noticed(comm):
    dp = DataParallel(model(0), comm)
    scaler = LossScaler(dp)
    assert not step(dp, scaler, np.inf if comm.rank % 2 else -np.inf)
    assert step(dp, scaler, 0)


def test_what_a_reducer_keeps_is_rescaled(comm):
    class Residual(Compressor):
        def __init__(self):
            super().__init__()
            self.scale = 3.0

        def __repr__(self):
            return "Residual()"

        def rescale(self, factor):
            self.scale *= factor

        def between(self, exchange, x, lost):
            yield from two_phase.average_dense(exchange, x)
            return is_finite(x)

    reducer = Residual()
    dp = DataParallel(model(0), comm, reducer=reducer)
    scaler = LossScaler(dp, initial_scale=8, growth_interval=1, backoff=0.25)
    step(dp, scaler, 1)
    assert reducer.scale == 6
    step(dp, scaler, np.inf)
    assert reducer.scale == 1.5 and scaler.scale == 4


def test_masters_are_equal_on_all_ranks_and_go_on_exactly(comm):
    def start():
        dp = DataParallel(model(comm.rank), comm)
        return dp, LossScaler(dp, initial_scale=2.0**10, growth_interval=2), MasterWeights(dp)

    def train(dp, scaler, masters, numbers):
        for number in numbers:
            # 2**-14 is too small an update for float16.
            bad = number == 3 and comm.rank == 0
            if step(dp, scaler, np.inf if bad else 2.0**-14 * (comm.rank + 1)):
                for name, master in masters.items():
                    master -= scaler.unscaled(name)
                masters.round_off()
        bits = [array.tobytes() for array in (*masters.values(), *dp.params.values())]
        assert comm.broadcast_object(bits, root=0) == bits
        return bits

    dp, scaler, masters = start()
    before = {name: array.copy() for name, array in masters.items()}
    whole = train(dp, scaler, masters, range(8))
    assert (masters["w"] == before["w"] - 7 * 2.0**-15 * (comm.size + 1)).all()
    dp, scaler, masters = start()
    train(dp, scaler, masters, range(5))
    states = scaler.state_dict(), masters.state_dict()
    dp, scaler, masters = start()
    scaler.load_state_dict(states[0])
    masters.load_state_dict(states[1])
    assert train(dp, scaler, masters, range(5, 8)) == whole


def test_ranks_with_different_scales_are_refused(comm):
    dp = DataParallel(model(0), comm)
    if comm.size > 1:
        with pytest.raises(mpiring.ConfigError, match=f"rank {comm.size - 1}: LossScaler has ini"):
            LossScaler(dp, initial_scale=4 if comm.rank == comm.size - 1 else 8)
    assert LossScaler(dp).scale == 2.0**16
