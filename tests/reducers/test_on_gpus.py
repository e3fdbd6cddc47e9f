"""Holds the Reducers that work on GPUs to what they do on the host, on simulated GPUs."""

import ml_dtypes
import numpy as np
import pytest
import simulated_gpu
from reducing import SHAPES, Model, ModelOnGpus, count

from mpiring.buckets.bucket import TensorSpec
from mpiring.memory.pytrees import leaves
from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit

MAKERS = {
    "cast": lambda: Cast("float16"),
    "cast + feedback": lambda: ErrorFeedback(Cast("bfloat16")),
    "int8": lambda: Int8(64),
    "int8 + feedback": lambda: ErrorFeedback(Int8(64)),
    "onebit": lambda: OneBit(64, warmup_steps=1),
}
FEEDING_BACK = [name for name, make in MAKERS.items() if make().feeds_back]
CLUSTERS = {"one node": [0, 0], "apart": [0, 1, 2], "uneven": [0, 0, 1, 1, 1]}


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    simulated_gpu.installed(monkeypatch)


def gradients(step, node_of):
    return np.random.default_rng(step).standard_normal((len(node_of), count()), np.float32)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("node_of", CLUSTERS.values(), ids=CLUSTERS)
def test_they_have_the_bits_of_the_host(name, node_of):
    """Also after a step that was not finite, another scale of the loss, and a resumption."""
    host, model = Model(MAKERS[name], node_of), ModelOnGpus(MAKERS[name], node_of, seed=3)
    for step in range(4):
        rows = gradients(step, node_of)
        if step == 1:
            rows[-1, 7] = np.nan
        wanted, results = host.step(rows), model.step(rows)
        assert all(np.array_equal(x, wanted[0], equal_nan=True) for x in results), step
        for each in (host, model):
            if step == 2:
                for reducer in each.reducers:
                    reducer.rescale(0.3)
        if step == 2:
            assert bits(host.states()) == bits(model.states())
            model = ModelOnGpus(MAKERS[name], node_of, seed=4, states=host.states())


def bits(states):
    return [(path, np.asarray(leaf).tobytes()) for path, leaf in leaves(states)]


@pytest.mark.parametrize("name", FEEDING_BACK)
def test_residuals_follow_their_tensors_to_other_buckets(name):
    tensors = [TensorSpec(key, shape, np.dtype("float32")) for key, shape in SHAPES.items()]
    models = [kind(MAKERS[name], CLUSTERS["uneven"]) for kind in (Model, ModelOnGpus)]
    groups = [tensors[:1:-1], tensors[:2]]
    for model in models:
        for _ in range(2):
            model.step(gradients(0, model.node_of))
        model.use(groups)
    for index in range(2):
        residuals = [model.residual(index) for model in models]
        assert residuals[0].any() and residuals[0].tobytes() == residuals[1].tobytes()


DTYPES = "float16", ml_dtypes.bfloat16, "float64"
# Of a bucket: its Reducer, shapes and dtype.
OTHERS = [*(("int8 + feedback", SHAPES, dtype) for dtype in DTYPES),
          *((name, {"x": (n,)}, "float32") for name in MAKERS for n in (0, 1, 63))]


@pytest.mark.parametrize(("name", "shapes", "dtype"), OTHERS)
def test_other_dtypes_and_short_tensors(name, shapes, dtype):
    models = [kind(MAKERS[name], [0, 1, 2], shapes, dtype) for kind in (Model, ModelOnGpus)]
    for step in range(2):
        rows = gradients(step, [0, 1, 2])[:, :count(shapes)].astype(dtype)
        wanted, results = (model.step(rows) for model in models)
        assert all(x.tobytes() == wanted[0].tobytes() for x in results)
