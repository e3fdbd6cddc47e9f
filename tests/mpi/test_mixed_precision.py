"""Tests loss scaling and master weights on real MPI, at any number of ranks."""

import numpy as np
import pytest

from mpiring.numpy import DataParallel, LossScaler, MasterWeights

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


@pytest.mark.parametrize(("bad", "bucket_bytes"), [
    (np.inf, 1), (-np.inf, 25 << 20), (np.nan, 1), (np.nan, 25 << 20)])
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


def test_masters_are_equal_on_all_ranks(comm):
    dp = DataParallel(model(comm.rank), comm)
    scaler, masters = LossScaler(dp, initial_scale=2.0**10, growth_interval=2), MasterWeights(dp)
    before = {name: array.copy() for name, array in masters.items()}
    for number in range(8):
        # 2**-14 is too small an update for float16.
        bad = number == 3 and comm.rank == 0
        if step(dp, scaler, np.inf if bad else 2.0**-14 * (comm.rank + 1)):
            for name, master in masters.items():
                master -= scaler.unscaled(name)
            masters.round_off()
    assert (masters["w"] == before["w"] - 7 * 2.0**-15 * (comm.size + 1)).all()
    bits = [array.tobytes() for array in (*masters.values(), *dp.params.values())]
    assert comm.broadcast_object(bits, root=0) == bits
