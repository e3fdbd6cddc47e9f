"""Tests state per slice as an optimizer uses it: momenta on the slices of several ranks."""

import numpy as np
import pytest
from cluster import run

from mpiring.buckets.bucket import Bucket, TensorSpec, plan
from mpiring.sharding.state import BucketStates
from mpiring.errors import ConfigError

TENSORS = [TensorSpec(name, shape, np.dtype("float32"))
           for name, shape in {"w": (7, 9), "b": (5,), "none": (0,), "v": (33,)}.items()]
BACKWARD = TENSORS[::-1]


def gradient(step, tensor):
    return np.random.default_rng([step, *tensor.name.encode()]).standard_normal(
        tensor.size).astype("float32")


def momenta(steps):
    """Return the plain momenta: the first and the second, by tensor."""
    m = {tensor.name: np.zeros(tensor.size, "float32") for tensor in TENSORS}
    v = {tensor.name: np.zeros(tensor.size, "float64") for tensor in TENSORS}
    for step in range(steps):
        for tensor in TENSORS:
            m[tensor.name] = np.float32(0.5) * m[tensor.name] + gradient(step, tensor)
            v[tensor.name] = 0.5 * v[tensor.name] + gradient(step, tensor)**2
    return m, v


class Optimizer:
    """Momenta of a rank's slices of some buckets, and the number of calls."""

    def __init__(self, rank):
        self.rank, self.states, self.buckets = rank, BucketStates(), []

    def rebuild(self, collectives, tensors, bucket_bytes):
        self.buckets = [Bucket(i, bucket_plan, np.empty) for i, bucket_plan in
                        enumerate(plan(tensors, bucket_bytes))]
        p = collectives.size
        return self.states.rebuild(
            self.buckets, lambda plan: {"m": "float32", "v": "float64"},
            lambda bucket: [r * bucket.flat.size // p for r in range(p + 1)],
            [self.rank], lambda x, bounds: collectives.allgather(x))

    def step(self, number, counts=True):
        for bucket in self.buckets:
            for tensor in bucket.plan.tensors:
                bucket.views[tensor.name].reshape(-1)[:] = gradient(number, tensor)
            state = self.states.of(bucket)
            (j, pieces), = state.slices.items()
            g = bucket.flat[state.bounds[j]:state.bounds[j + 1]]
            np.add(np.float32(0.5) * pieces.vector("m"), g, out=pieces.next("m"))
            np.add(0.5 * pieces.vector("v", "float64"), g**2, out=pieces.next("v"))
            for name in {part.name for part in pieces.ranges}:
                calls = pieces.array("calls", name, lambda: np.zeros(1))
                pieces.next("calls", name)[:] = calls + 1
        self.states.commit_step(counts)


def on_ranks(optimizers, method, *arguments):
    run(range(len(optimizers)), lambda collectives: getattr(
        optimizers[collectives.rank], method)(collectives, *arguments))


def joined(optimizers):
    """Put the pieces that all ranks have saved together."""
    states = [optimizer.states.state_dict() for optimizer in optimizers]
    return {tensor.name: {
        "steps": states[0][tensor.name]["steps"],
        "arrays": {name: x for state in states
                   for name, x in state[tensor.name]["arrays"].items()},
        "pieces": [piece for state in states for piece in state[tensor.name]["pieces"]],
    } for tensor in TENSORS}


def assert_equal(state, steps):
    for name, wanted in zip("mv", momenta(steps)):
        for tensor in TENSORS:
            assert state[tensor.name]["steps"] == steps
            pieces = sorted(state[tensor.name]["pieces"], key=lambda piece: piece["start"])
            # Some have padding only.
            momentum = [piece["vectors"][name] for piece in pieces if piece["start"] < tensor.size]
            momentum = np.concatenate([np.empty(0), *momentum])[:tensor.size]
            assert momentum.tolist() == wanted[tensor.name].tolist()


@pytest.mark.parametrize("p", [1, 2, 5])
def test_momenta_follow_their_tensors_to_other_buckets(p):
    """Steps that do not count leave no trace in them."""
    ranks = [Optimizer(rank) for rank in range(p)]
    on_ranks(ranks, "rebuild", BACKWARD, 1 << 20)
    for number in range(3):
        if number == 2:
            on_ranks(ranks, "rebuild", TENSORS, 100)
            assert_equal(joined(ranks), 2)
        for rank in ranks:
            rank.step(99, counts=False)
            rank.step(number)
    assert_equal(joined(ranks), 3)
    # Arrays do not follow.
    assert {x[0] for tensor in joined(ranks).values() for x in tensor["arrays"].values()} == {1}


@pytest.mark.parametrize(("p", "q"), [(1, 3), (4, 1), (2, 3), (5, 2), (3, 3)])
def test_any_number_of_ranks_goes_on_from_what_others_have_saved(p, q):
    ranks, others = ([Optimizer(rank) for rank in range(size)] for size in (p, q))
    on_ranks(ranks, "rebuild", BACKWARD, 1 << 20)
    for number in range(2):
        for rank in ranks:
            rank.step(number)
    for other in others:
        other.states.load_state_dict(joined(ranks))
    on_ranks(others, "rebuild", TENSORS, 300)
    for other in others:
        other.step(2)
    assert_equal(joined(others), 3)
    assert joined(others)["none"]["pieces"] == []


def test_tensors_that_are_in_no_bucket_for_a_while_keep_their_momenta():
    ranks = [Optimizer(rank) for rank in range(2)]
    on_ranks(ranks, "rebuild", BACKWARD, 1 << 20)
    for rank in ranks:
        rank.step(0)
    on_ranks(ranks, "rebuild", TENSORS[:1], 1 << 20)
    saved = ranks[0].states.state_dict()["v"]
    assert saved["steps"] == 1 and saved["pieces"][0]["stop"] == 33
    for rank in ranks:
        rank.states.multiply(2)
    on_ranks(ranks, "rebuild", TENSORS, 100)
    for rank in ranks:
        rank.states.multiply(0.5)
    assert_equal(joined(ranks), 1)


def test_a_state_that_lacks_a_range_is_refused():
    ranks = [Optimizer(rank) for rank in range(2)]
    on_ranks(ranks, "rebuild", BACKWARD, 1 << 20)
    alone = Optimizer(0)
    alone.states.load_state_dict(ranks[0].states.state_dict())
    with pytest.raises(ConfigError, match="lacks some of the elements 0 to 62 of w; resume with"):
        on_ranks([alone], "rebuild", TENSORS, 1 << 20)
