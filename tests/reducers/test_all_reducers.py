"""Holds every Reducer to one table, on simulated clusters of 1 to 8 ranks."""

import ml_dtypes
import numpy as np
import pytest
from reducing import SHAPES, Model, count

from mpiring.buckets.bucket import TensorSpec
from mpiring.errors import ConfigError
from mpiring.reducers import Adasum, Cast, ErrorFeedback, Int8, Mean, OneBit, PowerSGD, TopK

# With small blocks, so that a few numbers make several.
MAKERS = {
    "mean": Mean,
    "float16": lambda: Cast("float16"),
    "bfloat16": lambda: Cast("bfloat16"),
    "int8": lambda: Int8(64),
    "float16 + feedback": lambda: ErrorFeedback(Cast("float16")),
    "bfloat16 + feedback": lambda: ErrorFeedback(Cast("bfloat16")),
    "int8 + feedback": lambda: ErrorFeedback(Int8(64)),
    "onebit": lambda: OneBit(64, warmup_steps=1),
    "onebit + feedback": lambda: ErrorFeedback(OneBit(64, warmup_steps=0)),
    "topk": lambda: TopK(0.02),
    "topk, many": lambda: TopK(0.6),
    "topk, warm-up": lambda: TopK(0.01, warmup_steps=10),
    "powersgd": lambda: PowerSGD(2, start_step=1),
    "powersgd, rank 4, cast": lambda: PowerSGD(4, start_step=0, reducer=Cast("bfloat16")),
    "powersgd, int8": lambda: PowerSGD(2, start_step=0, reducer=Int8(64)),
}
FEEDING_BACK = [name for name, make in MAKERS.items() if getattr(make(), "feeds_back", False)]
MOMENTUM = {"topk, momentum": lambda: TopK(0.02, momentum=0.9, clip_norm=5.0)}
# Means of another kind.
ALL = MAKERS | MOMENTUM | {"adasum": Adasum}
STATELESS = "mean", "adasum"
CLUSTERS = {
    **{f"p={p}": list(range(p)) for p in (1, 2, 3, 5, 8)},
    "one node": [0, 0, 0], "2 x 2": [0, 0, 1, 1], "round-robin": [0, 1, 0, 1, 0, 1],
    "uneven": [0, 0, 0, 1, 2, 2],
}


def gradients(step, size, n, scale=1.0):
    rows = np.random.default_rng([step, size]).standard_normal((size, n)) * scale
    return rows.astype("float32")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_ranks_have_the_same_bits_and_what_is_not_sent_is_kept(name, cluster):
    """The means and the residual are, over all steps, the mean of the inputs."""
    node_of = CLUSTERS[cluster]
    model = Model(ALL[name], node_of, seed=1)
    wanted, received = np.zeros(count()), np.zeros(count())
    for step in range(4):
        rows = gradients(step, len(node_of), count())
        results = model.step(rows)
        assert all(x.tobytes() == results[0].tobytes() for x in results)
        assert np.isfinite(results[0]).all()
        if step == 0 and len(set(node_of)) == 1 and name in MAKERS:
            # Within a node nothing is compressed.
            np.testing.assert_allclose(results[0], rows.mean(axis=0), rtol=1e-5, atol=1e-6)
        wanted += rows.mean(axis=0, dtype="float64")
        received += results[0]
        if name in FEEDING_BACK:
            np.testing.assert_allclose(received + model.residual(), wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("make", [
    lambda: OneBit(64, warmup_steps=2), lambda: PowerSGD(2, start_step=2),
    lambda: ErrorFeedback(OneBit(64, warmup_steps=2))])
@pytest.mark.parametrize("nodes", [1, 2])
def test_rank_0_says_once_that_the_warm_up_ends(caplog, make, nodes):
    """On one node nothing is ever compressed."""
    model = Model(make, [0, nodes - 1])
    for step, says in enumerate((False, nodes > 1, False)):
        model.step(gradients(step, 2, count()))
        said = [record.message for record in caplog.records]
        assert said == [f"{model.reducers[0]!r}: after 2 steps with plain means, gradients are "
                        f"compressed between nodes from now on"] * says
        caplog.clear()


class Six:
    """A user's Reducer, which knows nothing of slices."""

    def reduce(self, collectives, bucket):
        yield from collectives.allreduce(bucket.vector, op="mean", algorithm="ring")


@pytest.mark.parametrize("name", [*ALL, "a user's"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_slices_have_the_bits_of_the_whole(name, cluster):
    """Of whole numbers, whose sums are exact in any order."""
    node_of, make = CLUSTERS[cluster], (ALL | {"a user's": Six})[name]
    model, slices = Model(make, node_of), Model(make, node_of, scatters=True)
    for step in range(2):
        rows = np.rint(gradients(step, len(node_of), count(), scale=100))
        wanted = model.step(rows)[0].tobytes()
        assert [x.tobytes() for x in slices.step(rows)] == [wanted] * len(node_of)


TOLERANCES = {"mean": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 0.06}


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("node_of", [[0, 1, 2], [0, 0, 1, 1, 1]])
def test_quantised_means_are_near(name, node_of):
    for n in (0, 1, 2, 63, 64, 65, 1000):
        rows = gradients(n, len(node_of), n)
        result = Model(MAKERS[name], node_of, {"x": (n,)}).step(rows)[0]
        np.testing.assert_allclose(result, rows.mean(axis=0), rtol=1e-4, atol=TOLERANCES[name])


OTHERS = [*(({"x": (n,), "y": (1, n)}, "float32") for n in (0, 1, 3, 64)),
          *((SHAPES, dtype) for dtype in ("float16", ml_dtypes.bfloat16, "float64"))]


@pytest.mark.parametrize("name", ALL)
def test_short_tensors_and_other_dtypes(name):
    for shapes, dtype in OTHERS:
        model = Model(ALL[name], [0, 1, 2], shapes, dtype)
        for step in range(3):
            results = model.step(gradients(step, 3, count(shapes)).astype(dtype))
            assert all(x.tobytes() == results[0].tobytes() for x in results)
            assert results[0].dtype == np.dtype(dtype) and np.isfinite(results[0]).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-45, 3e-39])
def test_zeros_and_denormal_numbers(name, value):
    model = Model(ALL[name], [0, 1, 2])
    for _ in range(3):
        result = model.step(np.full((3, count()), value, "float32"))[0]
        assert np.isfinite(result).all() and np.abs(result).max() <= 20 * abs(value)
        if not value:
            assert not result.any()
    # And it goes on as usual.
    rows = gradients(0, 3, count())
    assert np.abs(model.step(rows)[0]).max() > 0.1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("node_of", [[0, 1, 2, 3], [0, 0, 1, 1, 1]])
def test_a_step_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(name, node_of):
    """Also one that is refused since another bucket of the step was not finite."""
    size, n = len(node_of), count()
    model, undisturbed = (Model(ALL[name], node_of) for _ in range(2))
    for step in range(3):
        rows = gradients(step, size, n)
        for i, place in enumerate((0, n // 2, n - 1)):
            spoiled = rows.copy()
            spoiled[size - 1, place] = (np.nan, np.inf, -np.inf)[(step + i) % 3]
            results = model.step(spoiled)
            assert not np.isfinite(results[0]).all()
            assert all(x.tobytes() == results[0].tobytes() for x in results)
        model.step(gradients(99, size, n), taken=False)
        assert model.step(rows)[0].tobytes() == undisturbed.step(rows)[0].tobytes()


@pytest.mark.parametrize("name", [name for name in ALL if name not in STATELESS])
@pytest.mark.parametrize("node_of", [[0], [0, 1, 2], [0, 0, 1, 1, 1]])
def test_a_run_that_is_resumed_is_equal_to_one_that_was_not(name, node_of):
    def rows(step):
        return gradients(step, len(node_of), count())

    model = Model(ALL[name], node_of)
    for step in range(3):
        model.step(rows(step))
    resumed = Model(ALL[name], node_of, states=model.states())
    for step in range(3, 6):
        assert model.step(rows(step))[0].tobytes() == resumed.step(rows(step))[0].tobytes()


def test_states_that_do_not_fit_are_refused():
    states = Model(lambda: ErrorFeedback(Int8()), [0, 1, 2, 3]).states()
    with pytest.raises(ConfigError, match="the state is of ErrorFeedback.*settings"):
        Model(lambda: OneBit(), [0, 1, 2, 3], states=states)
    for node_of in ([0, 1], [0, 0, 1, 1]):
        with pytest.raises(ConfigError, match="cannot be redistributed"):
            Model(lambda: ErrorFeedback(Int8()), node_of, states=states)
    with pytest.raises(ConfigError, match="rank 0 of 4.*is of rank 1"):
        Model(lambda: ErrorFeedback(Int8()), [0, 1, 2, 3], states=states[1:] + states[:1])
    with pytest.raises(ConfigError, match="state of ErrorFeedback.*lacks edition"):
        ErrorFeedback(Int8()).load_state_dict({"step": 3})


@pytest.mark.parametrize("name", FEEDING_BACK)
@pytest.mark.parametrize("node_of", [[0, 1, 2], [0, 0, 1, 1, 1]])
def test_residuals_follow_their_tensors_to_other_buckets(name, node_of):
    tensors = [TensorSpec(key, shape, np.dtype("float32")) for key, shape in SHAPES.items()]
    model = Model(MAKERS[name], node_of)
    rows = gradients(0, len(node_of), count())
    for _ in range(2):
        model.step(rows)
    before = model.residual()
    ends = np.cumsum([tensor.size for tensor in tensors])
    by_name = {tensor.name: part for tensor, part in zip(tensors, np.split(before, ends[:-1]))}
    model.use([tensors[:1:-1], tensors[:2]])
    for index, group in enumerate((tensors[:1:-1], tensors[:2])):
        want = np.concatenate([by_name[tensor.name] for tensor in group])
        np.testing.assert_allclose(model.residual(index), want, rtol=1e-6, atol=1e-7)


def test_complex_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"cannot compress complex64.*map these names to Mean"):
        Model(lambda: Int8(), [0, 1], dtype="complex64")
