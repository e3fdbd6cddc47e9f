"""Tests that a method updates, saves and loads arrays without a model and without ranks."""

import numpy as np
from mpiring.buckets.bucket import BucketPlan, TensorSpec
from mpiring.optim.method import Layerwise, Method, UpdateRule
from mpiring.optim.parts import parts_of
from mpiring.optim.update import Update
from mpiring.sharding.sliced import whole
from mpiring.sharding.state import SliceState

MOMENTUM = Update("method_momentum", "w g b", "scale mu rate", """
    b = mu * b + scale * g
    w = w - rate * b
""")
RULE = UpdateRule(
    {"lr": lambda step: 0.5 / (1 + step), "momentum": 0.5}, lambda settings: MOMENTUM,
    lambda part: {"scale": part.scale, "mu": part.settings["momentum"],
                  "rate": part.settings["lr"] * part.ratio}, ["b"],
    layerwise=Layerwise(lambda part, w, g: w / g))
TENSORS = {name: TensorSpec(name, shape, np.dtype("f8"))
           for name, shape in {"a": (2, 3), "c": (17,)}.items()}


def arrays():
    """Return a new method, with weights and gradients by name, and the parts with both."""
    state = SliceState(plan := BucketPlan(tuple(TENSORS.values())), 0, plan.size, None)
    gradient = np.zeros(plan.size)
    weights = {name: np.arange(1.0, 1 + tensor.size) for name, tensor in TENSORS.items()}
    parts = parts_of(state, gradient, weights.values())
    return Method("momentum", RULE, TENSORS, no_decay=["c"]), weights, parts


def step(method, parts, t):
    for part in parts:
        part.gradient[...] = np.arange(part.size) + t
    method.update([parts], method.current, 2.0)


def test_a_method_updates_arrays_by_its_rule():
    method, weights, parts = arrays()
    w, b = {name: x.copy() for name, x in weights.items()}, {name: 0.0 for name in weights}
    for t in range(3):
        step(method, parts, t)
        for name, x in w.items():
            g = np.arange(x.size) + t
            # Tensors of `no_decay` are not adapted.
            ratio = np.linalg.norm(x) / np.linalg.norm(g) if name == "a" else 1.0
            b[name] = 0.5 * b[name] + 2.0 * g
            w[name] = x - 0.5 / (1 + t) * ratio * b[name]
            np.testing.assert_allclose(weights[name], w[name], rtol=1e-13)
    assert method.steps == 3


def test_another_method_continues_from_saved_state():
    method, weights, parts = arrays()
    step(method, parts, 0)
    saved, at_save = method.saved(parts), {name: x.copy() for name, x in weights.items()}
    assert saved["optimizer"] == "momentum" and saved["steps"] == 1
    assert whole(saved["tensors"])["a"]["b"].shape == (2, 3)
    other, resumed, its_parts = arrays()
    for name, x in at_save.items():
        resumed[name][...] = x
    other.load(other.checked(saved, its_parts))
    for t in 1, 2:
        step(method, parts, t)
        step(other, its_parts, t)
    for name, x in weights.items():
        assert x.tobytes() == resumed[name].tobytes()
