"""Holds local training to plain texts of its papers, on threads as ranks.

Each rank takes steps of plain SGD of its own; sharded or not, on 1 to 4 ranks, in float32, float64
and bfloat16, with tensors of one element, without dimensions or elements, and of prime sizes.
"""

import copy
import functools
import operator

import ml_dtypes
import numpy as np
import pytest
from threads import TrainingComm, on_ranks

import mpiring
from mpiring.buckets.bucket import TensorSpec
from mpiring.memory.pytrees import leaves, mapped
from mpiring.numpy import DiLoCo, LocalSGD
from mpiring.optim.fragments import cut
from mpiring.reducers import Int8
from mpiring.sharding.sliced import Sliced

SHAPES = {"w1": (7, 11), "b1": (1,), "scale": (), "w2": (101,), "w3": (13, 3), "none": (0, 3),
          "b3": (97,)}
INNER_LR = 0.125
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}


def model(dtype=np.float32):
    random = np.random.default_rng(7)
    return {name: np.asarray(random.standard_normal(shape), dtype)
            for name, shape in SHAPES.items()}


def gradient(w, name, step, rank):
    """Return the gradient of a rank's loss, |w - target|² / 2."""
    random = np.random.default_rng([step, rank, *name.encode()])
    return w - np.asarray(random.integers(-8, 9, w.shape) / 8, w.dtype)


def take_step(params, step, rank):
    for name, w in params.items():
        w -= w.dtype.type(INNER_LR) * gradient(w, name, step, rank)


# Papers: the weights of all ranks after so many steps, the global ones, and those after a last
# synchronization; in float64.

def local_sgd(size, steps, *, every, start=0):
    """Stich 2019, algorithm 1; post-local: Lin et al. 2020, equation 3."""
    workers = [{name: x.astype("f8") for name, x in model("f8").items()} for _ in range(size)]
    for t in range(1, steps + 1):
        for k, x in enumerate(workers):
            take_step(x, t, k)
        if t <= start or t % every == 0:
            mean = {name: np.mean([x[name] for x in workers], axis=0) for name in SHAPES}
            workers = [{name: np.array(x) for name, x in mean.items()} for _ in range(size)]
    return workers, None, {name: np.mean([x[name] for x in workers], axis=0) for name in SHAPES}


def streaming_diloco(size, steps, *, every, lr, momentum, fragments=1, delay=0, alpha=0.0):
    """Douillard et al. 2025, algorithm 2; with one fragment and no delay DiLoCo's, 2023."""
    specs = [TensorSpec(name, shape, np.dtype("f4")) for name, shape in SHAPES.items()]
    parts = [[tensor.name for tensor in part] for part in cut(specs, fragments)]
    workers = [{name: x.copy() for name, x in model("f8").items()} for _ in range(size)]
    theta = {name: x.copy() for name, x in model("f8").items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    sent, since = {}, {}

    def send(t, names):
        for name in names:
            sent[name] = np.mean([theta[name] - x[name] for x in workers], axis=0)
            since[name] = t

    def arrive(names, alpha):
        for name in names:
            delta = sent.pop(name)
            v[name] = momentum * v[name] + delta
            theta[name] = theta[name] - lr * (delta + momentum * v[name])
            for x in workers:
                x[name] = np.array(alpha * x[name] + (1 - alpha) * theta[name])

    for t in range(1, steps + 1):
        for m, x in enumerate(workers):
            take_step(x, t, m)
        for p, names in enumerate(parts):
            t_p = (p + 1) * every // fragments
            if (t - t_p) % every == 0:
                send(t, names)
            if t >= t_p + delay and (t - t_p - delay) % every == 0:
                arrive(names, alpha)
    at_last = copy.deepcopy((workers, theta))
    # Not in the paper: what is under way arrives; then all that has changed, at once, unmixed.
    arrive(list(sent), alpha)
    changed = [name for name in theta if since.get(name) != steps]
    send(steps, changed)
    arrive(changed, 0.0)
    return *at_last, theta


METHODS = {
    "local sgd": (LocalSGD, local_sgd, {"every": 4}),
    "post-local sgd": (LocalSGD, local_sgd, {"every": 4, "start": 5}),
    "diloco": (DiLoCo, streaming_diloco, {"every": 4, "lr": 0.7, "momentum": 0.9}),
    "every step": (DiLoCo, streaming_diloco, {"every": 1, "lr": 1.0, "momentum": 0.0}),
    "fragments": (DiLoCo, streaming_diloco, {
        "every": 5, "lr": 0.7, "momentum": 0.9, "fragments": 3}),
    "streaming": (DiLoCo, streaming_diloco, {
        "every": 5, "lr": 0.4, "momentum": 0.8, "fragments": 4, "delay": 3, "alpha": 0.25}),
    "overwritten": (DiLoCo, streaming_diloco, {
        "every": 3, "lr": 0.4, "momentum": 0.9, "fragments": 3, "delay": 1, "alpha": 0.0}),
}


def train(outer, params, steps, rank):
    for step in steps:
        take_step(params, step, rank)
        outer.step()


def close(first, second, dtype):
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2}[dtype]
    for name, x in second.items():
        np.testing.assert_allclose(first[name].astype("f8"), x, tolerance, tolerance)


def equal(first, second):
    return first.keys() == second.keys() and all(
        x.tobytes() == second[name].tobytes() for name, x in first.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_as_the_paper_has_it(name, dtype):
    make, paper, settings = METHODS[name]
    for size in (1, 2, 4) if dtype == "float32" else [3]:
        early, *_ = paper(size, 5, **settings)
        workers, theta, end = paper(size, 17, **settings)
        for sharded in (False, True):
            def program(comm):
                params = model(DTYPES[dtype]) if comm.rank == 0 else {
                    name: np.zeros(shape, DTYPES[dtype]) for name, shape in SHAPES.items()}
                outer = make(params, comm, **settings, sharded=sharded, bucket_bytes=500)
                train(outer, params, range(1, 6), comm.rank)
                close(params, early[comm.rank], dtype)
                train(outer, params, range(6, 18), comm.rank)
                local = {name: x.copy() for name, x in params.items()}
                with outer.global_parameters():
                    shown = {name: x.copy() for name, x in params.items()}
                assert all((x == local[name]).all() for name, x in params.items())
                outer.synchronize()
                close(params, end, dtype)
                return local, shown

            results = on_ranks(size, program, TrainingComm)
            assert all(equal(shown, results[0][1]) for _, shown in results)
            for worker, (local, shown) in zip(workers, results):
                close(local, worker, dtype)
                # What is under way at the end is in the global parameters already.
                if theta is not None and not settings.get("delay"):
                    close(shown, theta, dtype)


def test_fragments_are_balanced():
    def tensors(*sizes):
        return [TensorSpec(str(i), (16 * size,), np.dtype("f4")) for i, size in enumerate(sizes)]

    def sizes(*given, count):
        return [[tensor.size // 16 for tensor in part] for part in cut(tensors(*given), count)]

    assert sizes(1, 1, 1, 1, count=2) == [[1, 1], [1, 1]]
    assert sizes(9, 1, 1, 1, count=3) == [[9], [1, 1], [1]]
    assert sizes(1, 1, 1, 9, count=3) == [[1, 1], [1], [9]]
    assert sizes(0, 0, 0, count=3) == [[0], [0], [0]]
    assert sizes(5, 3, 2, 7, 1, count=1) == [[5, 3, 2, 7, 1]]
    with pytest.raises(mpiring.ConfigError, match="fragments=3, but the model has 2 tensors"):
        cut(tensors(1, 1), 3)
    for count in range(1, 8):
        parts = sizes(4, 4, 3, 5, 4, 4, 4, count=count)
        assert len(parts) == count and all(parts)
        assert [x for part in parts for x in part] == [4, 4, 3, 5, 4, 4, 4]
        assert max(map(sum, parts)) <= 28 / count + 4


STREAMING = {"every": 5, "lr": 0.4, "momentum": 0.8, "fragments": 4, "delay": 3}


def merged(states):
    """Return the state of all ranks' ranges, as a checkpoint has it."""
    rows = zip(*([leaf for _, leaf in leaves(state)] for state in states))

    def joined(leaf):
        others = next(rows)[1:]
        return leaf.merged(others) if isinstance(leaf, Sliced) else leaf

    return mapped(states[0], joined)


@pytest.mark.parametrize(("dtype", "sharded"), [
    ("float32", False), ("float32", True), ("bfloat16", True)])
def test_goes_on_bit_by_bit_from_any_step(dtype, sharded):
    """At each phase of a delay; and at other numbers of ranks from the global parameters."""
    def program(comm, steps, saved=None, own=None):
        params = model(DTYPES[dtype])
        outer = DiLoCo(params, comm, **STREAMING, sharded=sharded, bucket_bytes=500)
        if saved is not None:
            outer.load_state_dict(saved)
            for name, x in (own[comm.rank] if own else {}).items():
                params[name][...] = x
        train(outer, params, steps, comm.rank)
        before = {name: x.copy() for name, x in params.items()}
        after = outer.sharded_state_dict(), outer.state_dict()
        assert equal(params, before)
        return before, *after

    def on(size, *arguments):
        return on_ranks(size, lambda comm: program(comm, *arguments), TrainingComm)

    right = on(3, range(1, 18))
    for stop in (9, 11, 13):
        results = on(3, range(1, stop))
        own, wholes = [x for x, _, _ in results], [x for _, _, x in results]
        saved = merged([x for _, x, _ in results])
        assert saved["steps"] == stop - 1
        for state in (saved, wholes[0]):
            for (x, _, its), (y, _, wanted) in zip(on(3, range(stop, 18), state, own), right):
                assert equal(x, y) and equal(its["parameters"], wanted["parameters"])
        for size in (1, 2, 4):
            for x, _, its in on(size, range(0), saved):
                assert equal(x, wholes[0]["parameters"])
                assert equal(its["parameters"], wholes[0]["parameters"])
            assert all(np.isfinite(x.astype("f4")).all()
                       for x in on(size, range(stop, 18), saved)[0][0].values())


def test_arrays_may_be_replaced_by_their_like():
    def program(comm):
        params, other = model(), model()
        outer, right = (LocalSGD(its, comm, every=3) for its in (params, other))
        for step in range(6):
            take_step(other, step, comm.rank)
            right.step()
            for name, w in params.items():
                params[name] = np.asarray(
                    w - np.float32(INNER_LR) * gradient(w, name, step, comm.rank))
            outer.step()
        assert equal(params, other)
        params["w1"] = params["w1"].astype("f8")
        with pytest.raises(mpiring.ConfigError, match="w1 float64 .* in the place of w1 float3"):
            outer.synchronize()

    on_ranks(2, program, TrainingComm)


def test_settings_that_cannot_work_are_refused_on_all_ranks():
    def program(comm):
        for wrong, text in (
                ({"every": 0}, "every=0: expected a whole number of at least 1"),
                ({"every": 2, "fragments": 3}, "fragments=3: expected a whole number from 1 to 2"),
                ({"every": 2, "delay": 2}, "delay=2: expected a whole number from 0 to 1"),
                ({"alpha": 1.0}, "alpha=1.0: expected a number of at least 0, below"),
                ({"lr": -1}, "lr=-1: expected a finite number of at least 0"),
                ({"sharded": "no"}, "sharded='no': expected True or False"),
                ({"reducer": 3}, "reducer=3: expected a Reducer"),
                ({"reducer": {"x*": Int8()}}, "'x.'.: no parameter has such a name")):
            for rank in range(2):
                settings = {"every": 20} | (wrong if comm.rank == rank else {})
                with pytest.raises(mpiring.ConfigError, match=text):
                    DiLoCo(model(), comm, **settings)
        for other, text in (
                ({"every": 3}, "every=3"), ({"lr": 0.5}, "lr=0.5, but on rank 0 it is 0.7"),
                ({"reducer": Int8()}, "reducer.'w1'.=.Int8.*on rank 0 it is 'Mean..'")):
            with pytest.raises(mpiring.ConfigError, match=f"rank 1: DiLoCo has {text}"):
                DiLoCo(model(), comm, **{"every": 20, **(other if comm.rank else {})})
        assert DiLoCo(model(), comm, every=2).alpha == 0
        assert DiLoCo(model(), comm, every=2, delay=1).alpha == 0.5
        with pytest.raises(mpiring.ConfigError, match="rank 1: DiLoCo has lr=0.7, but on"):
            (DiLoCo if comm.rank else LocalSGD)(model(), comm, every=2)
        with pytest.raises(mpiring.ConfigError, match="params is 3; pass a dict of the model's a"):
            DiLoCo(3, comm, every=2)
        with pytest.raises(mpiring.ConfigError, match="fragments=9, but the model has 7 tensors"):
            DiLoCo(model(), comm, every=20, fragments=9)
        with pytest.raises(mpiring.BufferMismatchError, match="rank 1: .*=.w1 float64"):
            DiLoCo(model("f8" if comm.rank else "f4"), comm, every=2)

    on_ranks(2, program, TrainingComm)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_has_diverged_is_named_on_all_ranks(delay, sharded):
    def program(comm):
        params = model()
        outer = DiLoCo(params, comm, every=4, fragments=2, delay=delay, sharded=sharded)
        train(outer, params, range(1, 7), comm.rank)
        before = outer.state_dict()["parameters"]
        if comm.rank == 1:
            params["w3"][2, 1] = np.nan
            params["b3"][0] = np.inf
        with pytest.raises(mpiring.GradientError, match=(
                rf"rank {comm.rank}: the model has diverged: what was sent at inner step 8 holds "
                r"NaN or Inf, of the weights of rank 1 in w3, b3; the global parameters stay")):
            for _ in range(4):
                outer.step()
        after = outer.state_dict()["parameters"]
        assert all(equal({name: after[name]}, {name: before[name]}) for name in ("w3", "b3"))

    on_ranks(2, program, TrainingComm)


@pytest.mark.parametrize("settings", [
    {"every": 3}, {"every": 4, "fragments": 3, "delay": 2}, {"every": 100}])
def test_loops_of_different_lengths(settings):
    """The mean is over the ranks that have taken steps; in the end all have the same model."""
    lengths = [7, 0, 12]

    def program(comm):
        params = model()
        outer = DiLoCo(params, comm, **settings, lr=1.0, momentum=0.0)
        with outer.join():
            train(outer, params, range(1, lengths[comm.rank] + 1), comm.rank)
        assert outer.steps == 12
        return params

    results = on_ranks(3, program, TrainingComm)
    assert all(equal(params, results[0]) for params in results)
    if "fragments" not in settings:
        workers, theta, taken = [model("f8") for _ in lengths], model("f8"), set()
        for t in range(1, 13):
            for k, x in enumerate(workers):
                if t <= lengths[k]:
                    take_step(x, t, k)
                    taken.add(k)
            if t % settings["every"] == 0 or t == 12:
                for name in SHAPES:
                    theta[name] = np.mean([workers[k][name] for k in taken], axis=0)
                workers = [{name: np.array(x) for name, x in theta.items()} for _ in lengths]
                taken = set()
        close(results[0], theta, "float32")


def test_synchronize_takes_one_outer_step_for_what_has_changed():
    def program(comm):
        params = model()
        outer = DiLoCo(params, comm, **STREAMING)
        train(outer, params, range(1, 9), comm.rank)
        outer.synchronize()
        first = {name: x.copy() for name, x in params.items()}
        outer.synchronize()
        assert equal(first, params) and outer.steps == 8
        again = model()
        resumed = DiLoCo(again, comm, **STREAMING)
        resumed.load_state_dict(outer.state_dict())
        resumed.synchronize()
        assert equal(first, again)
        with outer.global_parameters():
            assert equal(first, params)
            with pytest.raises(mpiring.GradientError, match="within global_parameters.., which w"):
                outer.step()
        with outer.join(), pytest.raises(mpiring.ConfigError, match="synchronize.. within join"):
            outer.synchronize()
        return params

    results = on_ranks(3, program, TrainingComm)
    assert all(equal(params, results[0]) for params in results)


def test_ranks_that_are_out_of_step_do_not_meet():
    def program(comm):
        params = model()
        outer = DiLoCo(params, comm, every=4, fragments=2, delay=1)
        with pytest.raises(mpiring.BufferMismatchError, match=(
                r"rank 1 called .* in inner step 1 \(every=4, fragment 0, [^)]*\) bucket .*, but "
                r"rank 0 called .* in inner step 2 \(every=4, fragment 0, [^)]*\) bucket")):
            if comm.rank:
                outer.steps += 1
                outer.synchronize()
            else:
                train(outer, params, range(4), comm.rank)

    on_ranks(2, program, TrainingComm)


@pytest.mark.parametrize("sharded", [False, True])
def test_rates_that_differ_in_a_later_step_are_refused(sharded):
    """They are part of what is sent then, as `lr` and `momentum` may be functions."""
    def program(comm):
        outer = DiLoCo(model(), comm, every=2, sharded=sharded, momentum=0.5,
                       lr=lambda updates: 0.5 + 0.25 * comm.rank * (updates > 0))
        for _ in range(3):
            outer.step()
        with pytest.raises(mpiring.BufferMismatchError, match=(
                r"lr=0.75, .*inner step 4 \(every=2, fragment 0, lr=0.5, momentum=0.5\)")):
            outer.step()

    on_ranks(2, program, TrainingComm)


W2 = np.ones(101, "f4")
# What the state of rank 1 has instead, or lacks.
CHANGES = [
    (("parameters", "w2"), W2, r"rank 1: .* of DiLoCo has parameters\['w2'\]\[0\]=1.0, but on"),
    (("fragments", 1, "optimizer", "tensors", "w2", "b"), W2,
     r"rank 1: .*\['tensors'\]\['w2'\]\['b'\]\[0\]=1.0, but on rank 0"),
    (("steps",), 8, "rank 1: the state of DiLoCo has steps=8, but on rank 0 it is 7; load"),
    (("steps",), -1, "steps=-1: expected"),
    (("outer",), "LocalSGD", "of LocalSGD with 4 fragments, not of DiLoCo wit"),
    (("fragments",), [], "with 0 fragments, not of DiLoCo"),
    (("fragments", 1, "due"), None, "the state of DiLoCo, in fragment 1, lacks due"),
    (("fragments", 1, "optimizer", "tensors", "w2"), None, "the state of SGD lacks w2"),
    (("parameters",), {}, "the state of DiLoCo lacks w1, b1"),
    (("parameters", "b1"), np.zeros(3), "'b1' is float64 .3,. in the state, but float32 .1,. here"),
]


def changed(state, path, value):
    state = copy.deepcopy(state)
    inner = functools.reduce(operator.getitem, path[:-1], state)
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def test_states_that_differ_are_refused_and_change_nothing():
    def program(comm):
        params = model()
        outer = DiLoCo(params, comm, **STREAMING)
        train(outer, params, range(1, 8), comm.rank)
        saved = outer.state_dict()
        train(outer, params, range(8, 10), comm.rank)
        before, weights = outer.state_dict(), copy.deepcopy(params)
        others = [(changed(saved, path, value), text) for path, value, text in CHANGES]
        for other, text in (*others, (1, "the state of DiLoCo is a int: pass what state_dict")):
            with pytest.raises(mpiring.ConfigError, match=text):
                outer.load_state_dict(other if comm.rank else saved)
            now = outer.state_dict()
            assert equal(params, weights) and equal(now["parameters"], before["parameters"])
            assert now["steps"] == 9 and repr(now["fragments"]) == repr(before["fragments"])
        for own, text in (({}, "this rank of a DiLoCo lacks reducers"),
                          ({"reducers": []}, "of other fragments or reducers")):
            with pytest.raises(mpiring.ConfigError, match=text):
                outer.load_own_state_dict(own)
        outer.load_state_dict(saved)
        assert outer.steps == 7 and equal(params, saved["parameters"])

    on_ranks(2, program, TrainingComm)
