"""Holds every optimizer to a plain text of its paper, on threads as ranks.

Sharded or not, in float32 on 1 to 5 ranks, in float64 and 16 bits on fewer; by numba, whose bits
are NumPy's; tensors of one element, without dimensions, of prime sizes, and larger than a bucket.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from launching import needed
from pages import example
from threads import TrainingComm, on_ranks

from mpiring.jit import loops
from mpiring.numpy import DataParallel
from mpiring.optim import LAMB, LARS, SGD, Adam, AdamW
from mpiring.sharding.sliced import whole

SHAPES = {"w1": (7, 11), "b1": (1,), "scale": (), "w2": (1009,), "w3": (13, 3), "none": (0, 3),
          "b3": (97,)}
BUCKET_BYTES = 1000
STEPS = 4
NO_DECAY = ("b*", "scale")
HEAD = {"w3": {"lr": 0.02, "weight_decay": 0.3}}


def rate(step):
    return 0.1 / (1 + step)


# Papers: what becomes of a tensor in step t, from 1; `s` is its state, of zeros at first, and n(x)
# the norm of a whole tensor.

def sgd(w, g, s, t, *, lr, weight_decay, momentum=0.0, nesterov=False, adapts):
    g = g + weight_decay * w
    s["b"] = momentum * s["b"] + g
    return w - lr * (g + momentum * s["b"] if nesterov else s["b"])


def adam(w, g, s, t, *, lr, weight_decay, betas=(0.9, 0.999), eps=1e-8, adapts, decouples=False):
    if not decouples:
        g = g + weight_decay * w
    s["m"] = betas[0] * s["m"] + (1 - betas[0]) * g
    s["v"] = betas[1] * s["v"] + (1 - betas[1]) * g**2
    m, v = s["m"] / (1 - betas[0]**t), s["v"] / (1 - betas[1]**t)
    return w - lr * m / (np.sqrt(v) + eps) - (lr * weight_decay * w if decouples else 0)


def adamw(*arguments, **settings):
    return adam(*arguments, **settings, decouples=True)


def lars(w, g, s, t, *, lr, weight_decay, momentum=0.9, trust=0.001, adapts):
    ratio = trust * n(w) / (n(g) + weight_decay * n(w)) if adapts and n(w) and n(g) else 1
    s["v"] = momentum * s["v"] + lr * ratio * (g + weight_decay * w)
    return w - s["v"]


def lamb(w, g, s, t, *, lr, weight_decay, betas=(0.9, 0.999), eps=1e-6, adapts,
         bias_correction=True):
    s["m"] = betas[0] * s["m"] + (1 - betas[0]) * g
    s["v"] = betas[1] * s["v"] + (1 - betas[1]) * g**2
    m, v = s["m"], s["v"]
    if bias_correction:
        m, v = m / (1 - betas[0]**t), v / (1 - betas[1]**t)
    r = m / (np.sqrt(v) + eps) + weight_decay * w
    ratio = n(w) / n(r) if adapts and n(w) and n(r) else 1
    return w - lr * ratio * r


def adagrad(w, g, s, t, *, lr, weight_decay, eps=1e-8, adapts):
    g = g + weight_decay * w
    s["h"] = s["h"] + g**2
    return w - lr * g / (np.sqrt(s["h"]) + eps)


def from_page(name):
    """Return the optimizer that docs/how_to/write_an_optimizer.md shows: it joins the table."""
    shown = example("docs/how_to/write_an_optimizer.md", f"class {name}").shown
    namespace = {}
    exec(shown.partition("\nparams = ")[0], namespace)  # noqa: S102  # of our own page
    return namespace[name]


def n(x):
    return math.sqrt((x**2).sum())


OPTIMIZERS = {
    "sgd": (SGD, sgd, {}),
    "momentum": (SGD, sgd, {"momentum": 0.8}),
    "nesterov": (SGD, sgd, {"momentum": 0.8, "nesterov": True}),
    "adam": (Adam, adam, {}),
    "adamw": (AdamW, adamw, {"betas": (0.8, 0.9), "eps": 1e-3}),
    "lars": (LARS, lars, {"trust": 0.1}),
    "lamb": (LAMB, lamb, {"eps": 1e-3}),
    "adagrad of the page": (from_page("Adagrad"), adagrad, {"eps": 1e-3}),
    "plain lamb": (LAMB, lamb, {"bias_correction": False, "max_norm": 1.0}),
}
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16,
          "float16": np.float16}


def gradient(step, rank, name, dtype):
    """Return a rank's gradient; now and then zero, on all ranks."""
    if name == "b3" and step == 1:
        return np.zeros(SHAPES[name], dtype)
    random = np.random.default_rng([step, rank, *name.encode()])
    return np.asarray(random.integers(-8, 9, SHAPES[name]) / 8, dtype)


def model(dtype):
    """Return the model; LARS and LAMB have to start b3, which is zero."""
    random = np.random.default_rng(7)
    return {name: np.asarray(random.standard_normal(shape) * (name != "b3"), dtype)
            for name, shape in SHAPES.items()}


def expected(paper, settings, size, dtype):
    """Return the weights in float64 after all steps, as the paper has it."""
    settings = dict(settings)
    max_norm = settings.pop("max_norm", None)
    ws = {name: x.astype(np.float64) for name, x in model(dtype).items()}
    states = {name: dict.fromkeys("bmvh", np.zeros(shape)) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        means = {}
        for name in SHAPES:
            rows = [gradient(step, rank, name, dtype) for rank in range(size)]
            wide = np.float64 if dtype is np.float64 else np.float32
            means[name] = np.mean([row.astype(wide) for row in rows], axis=0, dtype=wide).astype(
                dtype).astype(np.float64)
        total = math.sqrt(sum(n(g)**2 for g in means.values()))
        for name, g in means.items():
            exempt = name[0] == "b" or name == "scale"
            its = {"lr": rate(step), "weight_decay": 0.2, **settings, **HEAD.get(name, {})}
            its |= {"weight_decay": 0.0} if exempt else {}
            clipped = g if max_norm is None else g * min(1, max_norm / total)
            ws[name] = paper(ws[name], clipped, states[name], step + 1, adapts=not exempt, **its)
    return ws


def train(comm, make, settings, dtype, sharded, steps=range(STEPS), state=None, start=None):
    """Return weights and the state after some steps."""
    params = start or model(dtype)
    dp = DataParallel({name: x.copy() for name, x in params.items()}, comm,
                      bucket_bytes=BUCKET_BYTES)
    optimizer = make(dp, lr=rate, weight_decay=0.2, no_decay=NO_DECAY, groups=HEAD,
                     sharded=sharded, **settings)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in steps:
        # In the first step of each, others than the order in which tensors are fused.
        for name in sorted(SHAPES, reverse=step % 2):
            dp.grads[name][...] = gradient(step, comm.rank, name, dtype)
            dp.ready(name)
        assert optimizer.step()
    return dp.params, optimizer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_paper_has_it(name, dtype):
    make, paper, settings = OPTIMIZERS[name]
    tolerance = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    # Of other dtypes, few: sums differ, not who has which slice.
    for size in (1, 2, 3, 5) if dtype == "float32" else (1, 3):
        wanted = expected(paper, settings, size, DTYPES[dtype])
        for sharded in (False, True):
            def program(comm):
                params, optimizer = train(comm, make, settings, DTYPES[dtype], sharded)
                return params, optimizer.state_dict()

            results = on_ranks(size, program, TrainingComm)
            bits = [[x.tobytes() for x in params.values()] for params, _ in results]
            assert bits == bits[:1] * size
            params, state = results[0]
            for tensor, w in wanted.items():
                np.testing.assert_allclose(params[tensor].astype(np.float64), w, tolerance,
                                           tolerance)
                if "master" in state["tensors"][tensor]:
                    np.testing.assert_allclose(state["tensors"][tensor]["master"], w, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numba_and_numpy_have_the_same_bits(name, dtype, monkeypatch):
    needed("numba")
    make, _, settings = OPTIMIZERS[name]

    def run():
        (params, _), = on_ranks(1, lambda comm: train(comm, make, settings, DTYPES[dtype], True),
                                TrainingComm)
        return [x.tobytes() for x in params.values()]

    compiled = run()
    monkeypatch.setattr(loops, "loop", lambda *arguments: None)
    assert run() == compiled


@pytest.mark.parametrize(("name", "dtype"), [
    ("momentum", "float32"), ("adamw", "bfloat16"), ("lars", "float64"), ("lamb", "float32"),
    ("lamb", "bfloat16")])
def test_a_state_fits_any_number_of_ranks(name, dtype):
    """Saved by 4 ranks, whole or in slices, it goes on at 3 and 1, bit by bit."""
    make, _, settings = OPTIMIZERS[name]

    def on(size, sharded, **more):
        def program(comm):
            params, optimizer = train(comm, make, settings, DTYPES[dtype], sharded, **more)
            return params, optimizer.state_dict(), optimizer.sharded_state_dict()

        return on_ranks(size, program, TrainingComm)

    saved = on(4, True, steps=range(2))
    params, full, _ = saved[0]
    pieces = merged([own_pieces for _, _, own_pieces in saved])
    assert equal(pieces, full)
    for size in (3, 1):
        for state in (full, pieces):
            for sharded in (False, True):
                for _, again, _ in on(size, sharded, steps=range(0), state=state, start=params):
                    assert equal(again, full)
            # The buckets that are fused anew have the state as well.
            first, second = [on(size, sharded, steps=range(2, 4), start=params, state=state)[0][0]
                             for sharded in (False, True)]
            for tensor, x in first.items():
                np.testing.assert_allclose(
                    x.astype("f8"), second[tensor].astype("f8"),
                    1e-2 if dtype == "bfloat16" else 1e-5, 1e-6)


def merged(states):
    """Return the state of all ranks' pieces."""
    first = states[0]
    return {**first, "tensors": {
        name: {vector: leaf.merged(state["tensors"][name][vector] for state in states[1:])
               for vector, leaf in its.items()} for name, its in first["tensors"].items()}}


def equal(first, second):
    first, second = whole(first), whole(second)
    assert (first["steps"], first["optimizer"]) == (second["steps"], second["optimizer"])
    return all(np.array_equal(x, second["tensors"][name][vector])
               for name, its in first["tensors"].items() for vector, x in its.items())
