"""Tests Reducers behind DataParallel on real MPI, with each rank as a node of its own."""

import numpy as np
import pytest

import mpiring
from mpiring.numpy import DataParallel, LossScaler
from mpiring.reducers import Adasum, Cast, ErrorFeedback, Int8, Mean, OneBit, PowerSGD, TopK

pytestmark = pytest.mark.mpi

SHAPES = {"w1": (40, 60), "b1": (60,), "w2": (60, 50), "b2": (50,), "scale": ()}
ODD_ORDER = ["b2", "w1", "scale", "b1", "w2"]
# tests/reducers tries more of them without MPI.
MAKERS = {
    "int8 + feedback": lambda: ErrorFeedback(Int8(64)),
    "onebit": lambda: OneBit(64, warmup_steps=1),
    "topk": lambda: TopK(0.02, momentum=0.9, warmup_steps=10),
    "powersgd": lambda: PowerSGD(2, start_step=1, reducer=Cast("bfloat16")),
    "mixed": lambda: {"w1": PowerSGD(1, start_step=0), "w*": OneBit(64, warmup_steps=0)},
}


def parameters():
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def wrapped(comm, reducer, **options):
    return DataParallel(parameters(), comm, bucket_bytes=6000, reducer=reducer, **options)


def step(dp, number, spoiled=None):
    """Take a step with gradients of its own; return the means, on this rank."""
    random = np.random.default_rng([number, dp.comm.rank])
    for name in ODD_ORDER:
        dp.grads[name][...] = random.standard_normal(SHAPES[name])
        if spoiled == name and dp.comm.rank == dp.comm.size - 1:
            dp.grads[name].reshape(-1)[-1:] = np.nan
        dp.ready(name)
    dp.wait()
    return b"".join(dp.grads[name].tobytes() for name in SHAPES)


def each(reducer):
    return list(reducer.values()) if isinstance(reducer, dict) else [reducer]


@pytest.mark.parametrize(("name", "late"), [
    *((name, False) for name in MAKERS), ("int8 + feedback", True), ("mixed", True)])
def test_a_run_goes_on_bit_by_bit(apart, name, late):
    """Loaded before the model is wrapped, or after, with buckets in another order at first.

    All ranks have the same means.
    """
    reducer, fresh = MAKERS[name](), MAKERS[name]()
    dp = wrapped(apart, reducer)
    for number in range(3):
        step(dp, number)
    states = [part.state_dict() for part in each(reducer)]
    resumed = wrapped(apart, fresh) if late else None
    for part, state in zip(each(fresh), states):
        part.load_state_dict(state)
    resumed = resumed or wrapped(apart, fresh)
    for number in range(3, 6):
        means = step(dp, number)
        assert means == step(resumed, number)
        assert set(apart.allgather_object(means)) == {means} and dp.finite


@pytest.mark.parametrize(("name", "spoiled"), [
    *((name, "w2") for name in MAKERS), ("mixed", "b2")])
def test_a_nan_on_one_rank_is_skipped_by_all(apart, name, spoiled):
    """In whichever bucket it is, those of the others leave no trace either."""
    # Buckets that are built anew after the first step would be rounded elsewhere.
    dp, undisturbed = (wrapped(apart, MAKERS[name](), deterministic=True) for _ in range(2))
    for number in range(3):
        step(dp, 99 - number, spoiled)
        assert apart.allgather_object(dp.finite) == [False] * apart.size
        assert step(dp, number) == step(undisturbed, number) and dp.finite


def test_a_scaled_loss_changes_nothing_but_the_scale(apart):
    """Residuals follow the scale, up and down."""
    dp, plain = (wrapped(apart, ErrorFeedback(Cast("bfloat16"))) for _ in range(2))
    scaler = LossScaler(dp, initial_scale=8, growth_interval=2)
    for number in range(6):
        if number == 3:
            for name in ODD_ORDER:
                dp.grads[name][...] = np.inf
                dp.ready(name)
            dp.wait()
            assert not scaler.step() and scaler.scale == 8
        random = np.random.default_rng([number, apart.rank])
        for name in ODD_ORDER:
            gradient = random.standard_normal(SHAPES[name]).astype(np.float32)
            plain.grads[name][...] = gradient
            dp.grads[name][...] = gradient * scaler.scale
            plain.ready(name)
            dp.ready(name)
        plain.wait()
        dp.wait()
        assert scaler.step()
        for name in SHAPES:
            np.testing.assert_array_equal(scaler.unscaled(name), plain.grads[name])
    assert scaler.scale == 16


def test_statistics_tell_what_compression_does(apart):
    dp = DataParallel({"w": np.zeros(1 << 18, np.float32)}, apart, reducer=Int8())
    for _ in range(2):
        dp.grads["w"][...] = 1
        dp.ready("w")
        dp.wait()
    cost, p = dp.statistics, apart.size
    assert cost.dense_bytes == 2 * (p - 1) * (4 << 18) // p
    if p == 1:
        assert cost.compression_ratio == 1 and cost.encode_s == 0
    else:
        assert 3.9 < cost.compression_ratio < 4
        assert min(cost.encode_s, cost.wire_s, cost.decode_s) > 0


def test_on_one_node_nothing_is_compressed(comm):
    dp = wrapped(comm, OneBit(warmup_steps=0))
    for number in range(2):
        for name in ODD_ORDER:
            dp.grads[name][...] = comm.rank + number
            dp.ready(name)
        dp.wait()
        for grad in dp.grads.values():
            assert (grad == (comm.size - 1) / 2 + number).all()
    if comm.num_nodes == 1:
        assert dp.statistics.dense_bytes == 0 and dp.statistics.compression_ratio == 1


@pytest.mark.parametrize("nodes", ["one", "each"])
def test_replicas_that_adasum_trains_are_equal_and_learn(comm, apart, nodes):
    """With buckets of several tensors, which are built anew after the first step."""
    comm = apart if nodes == "each" else comm
    params = {name: np.full(shape, 2, np.float32) for name, shape in SHAPES.items()}
    dp = DataParallel(params, comm, bucket_bytes=20000, reducer=Adasum())
    for number in range(20):
        random = np.random.default_rng([number, comm.rank])
        for name in ODD_ORDER:
            # Of |x|² / 2, seen through noise.
            dp.grads[name][...] = params[name] + random.normal(0, 0.1, SHAPES[name])
            dp.ready(name)
        dp.wait()
        assert dp.finite
        for name, x in params.items():
            x -= 0.2 * dp.grads[name]
    dp.compare_replicas()
    assert all(np.abs(x).mean() < 0.2 for x in params.values())


class NoSchedule:
    def __repr__(self):
        return "NoSchedule()"

    def reduce(self, collectives, bucket):
        """Lack `yield from`."""
        collectives.allreduce(bucket.flat, op="mean")


def test_misuse_is_named(apart):
    with pytest.raises(mpiring.ConfigError, match="no parameter has such a name; there are w1"):
        wrapped(apart, {"layer*": Int8()})
    for make in (lambda: OneBit(33), lambda: Cast("float32"), lambda: PowerSGD(reducer=OneBit()),
                 lambda: ErrorFeedback(Mean())):
        with pytest.raises(mpiring.ConfigError, match="expected|multiple"):
            make()
    for wrong in (Int8, "int8", {"w1": None}):
        with pytest.raises(mpiring.ConfigError, match="expected a Reducer, such as"):
            wrapped(apart, wrong)
    dp = wrapped(apart, NoSchedule())
    with pytest.raises(mpiring.ConfigError, match=rf"rank {apart.rank}: reduce of NoSchedule\(\) "
                                                  "returns a NoneType; expected a generator"):
        step(dp, 0)
    reducer = ErrorFeedback(Int8())
    dp = wrapped(apart, reducer)
    with pytest.raises(mpiring.ConfigError, match="serves another model already"):
        wrapped(apart, reducer)
    other = DataParallel({"v": np.zeros(3, np.float32)}, apart, reducer=ErrorFeedback(Int8()))
    state = reducer.state_dict()
    with pytest.raises(mpiring.ConfigError, match="of another model: it has .*w1"):
        loaded = ErrorFeedback(Int8())
        loaded.load_state_dict(state)
        DataParallel({"v": np.zeros(3, np.float32)}, apart, reducer=loaded)
    del dp, other
    wrapped(apart, reducer)
