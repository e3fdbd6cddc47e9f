"""Tests that every collective call compares its values: one odd rank is an error on all ranks."""

import shutil
import tempfile
from functools import partial

import numpy as np
import pytest
from differing import SKIPPED, Row, cases, check, in_turn, rows_of

from mpiring.asynchronous import PairAveraging, ParameterServer
from mpiring.data import TokenBatches
from mpiring.memory.pytrees import mapped
from mpiring.sharding.sliced import Sliced
from mpiring.numpy import Checkpoints, DataParallel, DiLoCo, LocalSGD, LossScaler, MasterWeights
from mpiring.optim import SGD
from mpiring.reducers import PowerSGD, TopK
from mpiring.resilience import Stopping

pytestmark = pytest.mark.mpi


def params():
    return {"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}


def dp_of(comm, **options):
    return DataParallel(params(), comm, **options)


def step(dp, factor=1.0):
    for name in dp.params:
        dp.grads[name][...] = factor
        dp.ready(name)
    dp.wait()


def stepped(comm, **options):
    """Return an optimizer with gradients for its next step."""
    dp = dp_of(comm)
    optimizer = SGD(dp, lr=0.1, **options)
    step(dp)
    return optimizer


def checkpoints(comm):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    return Checkpoints(folder, comm)


def saving(checkpoints, **arguments):
    try:
        checkpoints.save(**arguments)
        checkpoints.close()
    finally:
        shutil.rmtree(checkpoints._folder, ignore_errors=True)


def slices(n, dtype=np.float64):
    return {"m": Sliced((n,), {}, dtype), "v": 3}


def rescaled(dp, factor):
    dp.rescale(factor)
    step(dp)


def made(kind, **more):
    """Return a function that makes an object of a class on a communicator."""
    return lambda comm, **options: kind(params(), comm, **{**more, **options})


def trained(outer, steps=4):
    """Return local or asynchronous training after some steps, which may be due to meet."""
    for _ in range(steps):
        outer.step()
    return outer


def optimizer_after_a_step(comm, kind=SGD, **options):
    dp = dp_of(comm)
    optimizer = kind(dp, **{"lr": 0.5, "momentum": 0.5, **options})
    step(dp)
    optimizer.step()
    return optimizer


def with_scaler(comm):
    optimizer = optimizer_after_a_step(comm)
    return optimizer, LossScaler(optimizer._dp)


def scaled_step(made, updates, scales):
    """Take a step, and send the gradients of the next one, which tell of it."""
    optimizer, scaler = made
    step(optimizer._dp)
    if updates:
        optimizer.step(scaler if scales else None)
    step(optimizer._dp)


def scheduled(comm):
    """Return a sharded optimizer, and where it finds the rate of its next step."""
    rates = {"lr": 0.5}
    return optimizer_after_a_step(comm, sharded=True, lr=lambda step: rates["lr"]), rates


def grown(state):
    """Return a state in which the first element of each array is greater by 1."""
    def change(x):
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            x = x.copy()
            x.reshape(-1)[:1] += 1
        return x
    return mapped(state, change)


LOADS = {"value": ({"how": grown}, r"\[0(, 0)?\]="),
         "type": ({"how": lambda state: 3}, "is an? int"),
         "missing": ({"how": lambda state: {}}, "lacks")}


def loading(name, make, label):
    """Return the row of a `load_state_dict`."""
    def make_both(comm):
        subject = make(comm)
        return subject, subject.state_dict()

    return Row(f"{name}.load_state_dict", lambda both, how: both[0].load_state_dict(how(both[1])),
               {"how": lambda state: state}, LOADS, make_both, label)


ROWS = [
    in_turn("step", dp_of, step),
    in_turn("weigh", dp_of, lambda dp: (dp.weigh(3), step(dp)), told="weigh.*of model 2"),
    in_turn("compare_replicas", dp_of, lambda dp: dp.compare_replicas()),
    in_turn("grad_norm", stepped, lambda optimizer: optimizer.grad_norm()),
    in_turn("sharded", lambda comm: stepped(comm, sharded=True),
            lambda optimizer: optimizer.step()),
    *rows_of("DataParallel", dp_of, {
        "bucket_bytes": (1000, 2000, "a"), "deterministic": (True, False, "no"),
        "order": (["w", "b"], ["b", "w"], 3), "reducer": (TopK(), PowerSGD(), 3),
        "autotune": (False, True, "no")},
        label="the model"),
    Row("DataParallel(params=)", lambda comm, params: DataParallel(params, comm),
        {"params": params()},
        {"value": ({"params": {**params(), "b": np.ones(5, np.float32)}},
                   r"'b float32 \(5,\)', but on rank 0 it is 'b float32 \(4,\)'"),
         "type": ({"params": 3}, "params is 3"),
         "dtype": ({"params": {**params(), "b": np.ones(4)}}, "float64 .* float32")}),
    Row("DataParallel.weigh", lambda dp, tokens: (dp.weigh(tokens), step(dp)), {"tokens": 3},
        {"type": ({"tokens": "a"}, "tokens='a'|weigh")}, make=dp_of, label="weigh"),
    Row("DataParallel.rescale", rescaled, {"factor": 0.5},
        {"value": ({"factor": 0.25}, r"0\.25.*0\.5|0\.5.*0\.25"),
         "type": ({"factor": "a"}, "factor='a'|barrier")},
        make=lambda comm: dp_of(comm, reducer=PowerSGD(start_step=0))),
    Row("Checkpoints", lambda comm, **options: Checkpoints(None, comm, **options),
        {"keep": 2, "seed": 5},
        {"value": ({"keep": 3}, "keep=3, but on rank 0 it is 2"),
         "type": ({"seed": "a"}, "seed='a': expected a whole number"),
         "missing": ({"seed": SKIPPED}, "seed=None, but on rank 0 it is 5")}, label="Checkpoints"),
    Row("Checkpoints.save", saving, {"step": 3, "replicated": {"w": np.ones(3)}},
        {"value": ({"step": 4}, "saves step 4, but rank 0 saves step 3"),
         "type": ({"step": "a"}, "step='a': expected a whole number"),
         "sharded": ({"sharded": slices(3)}, "sharded"),
         "content": ({"replicated": {"w": object()}}, "object")},
        make=checkpoints, label="Checkpoints.save"),
    Row("TokenBatches", lambda comm, **options: TokenBatches(comm=comm, **options),
        {"lengths": [5, 6], "tokens": 300, "seed": 3},
        {"value": ({"lengths": [5, 7]}, r"lengths\[1\]=7, but on rank 0 it is 6"),
         "type": ({"tokens": "a"}, "tokens='a': expected a whole number"),
         "missing": ({"seed": SKIPPED}, "seed=0, but on rank 0 it is 3")}, label="TokenBatches"),
    Row("Communicator.prepare", lambda comm, **options: comm.prepare(**options),
        {"dtypes": ["float16"]},
        {"value": ({"dtypes": ["bfloat16"]}, "bfloat16.*float16"),
         "type": ({"dtypes": ["float33"]}, "float33"),
         "missing": ({"dtypes": SKIPPED}, "dtypes")}),
    Row("Communicator.tune", lambda comm, **options: comm.tune(**options), {"fresh": True},
        {"value": ({"fresh": False}, "fresh"), "missing": ({"fresh": SKIPPED}, "fresh")},
        label="tune"),
    Row("Communicator.broadcast", lambda comm, **options: comm.broadcast(np.ones(3), **options),
        {"root": 1}, {"value": ({"root": 0}, "root 0.*root 1|root 1.*root 0"),
                      "type": ({"root": "a"}, "root='a'|called barrier"),
                      "missing": ({"root": SKIPPED}, "root 0.*root 1|root 1.*root 0")},
        label="broadcast"),
    *[Row(f"Communicator.allreduce of {n}", lambda comm, x, op: comm.allreduce(x.copy(), op=op),
          {"x": np.ones(n, np.float32), "op": "sum"},
          {"shape": ({"x": np.ones(n - 1, np.float32)}, rf"\({n},\).*\({n - 1},\)|\({n - 1},\)"),
           "dtype": ({"x": np.ones(n, np.int32)}, "int32.*float32|float32.*int32"),
           "op": ({"op": "max"}, "max of float32.*sum of float32|sum of .*max of ")},
          label="allreduce") for n in (1000, 1_000_000)],
    Row("Communicator.allreduce of scalars",
        lambda comm, x: [comm.allreduce(x) for _ in range(3)], {"x": 3.5},
        {"int": ({"x": 3}, r"int64 \(\).*float64 \(\)|float64 \(\).*int64 \(\)"),
         "array": ({"x": np.ones(3)}, r"float64 \(3,\).*float64 \(\)|float64 \(\).*\(3,\)"),
         "narrow": ({"x": np.float32(3.5)}, "float32.*float64|float64.*float32")}),
    Row("Communicator.iallreduce of scalars",
        lambda comm, x: [comm.iallreduce(x).wait() for _ in range(3)], {"x": 3},
        {"float": ({"x": 3.5}, "float64.*int64|int64.*float64"),
         "array": ({"x": np.ones(1, int)}, r"\(1,\).*\(\)|\(\).*\(1,\)")}),
    Row("Communicator.broadcast of scalars", lambda comm, x: comm.broadcast(x), {"x": 3.5},
        {"int": ({"x": 3}, "int64.*float64|float64.*int64")}),
    Row("Communicator.broadcast and allreduce",
        lambda comm, names: [getattr(comm, name)(np.ones(1000)) for name in names],
        {"names": ["broadcast", "allreduce"]},
        {"order": ({"names": ["allreduce", "broadcast"]}, "broadcast.*allreduce|allreduce.*broa")}),
    Row("Communicator.persistent_allreduce",
        lambda comm, **options: comm.persistent_allreduce(np.ones(3), **options)(),
        {"op": "max"}, {"value": ({"op": "min"}, "min.*max|max.*min"),
                        "type": ({"op": 3}, "op=3|barrier"),
                        "missing": ({"op": SKIPPED}, "sum.*max|max.*sum")},
        label="allreduce"),
    Row("Stopping.now", lambda stopping: stopping.now(), {}, {}, make=Stopping, label="allreduce"),
    *rows_of("SGD", SGD, {
        "lr": (0.5, 0.25, "a"), "groups": ({"b": {"lr": 0.1}}, {"w": {"lr": 0.1}}, 3, "lr"),
        "max_norm": (1.0, 2.0, "a"), "sharded": (True, False, "no")}, make=dp_of, label="SGD"),
    Row("SGD.step", scaled_step, {"updates": True, "scales": True},
        {"without scaler": ({"scales": False}, "loss scale 65536 after step 1"),
         "without update": ({"updates": False}, "after update 1 with lr=0.5 mom")},
        make=with_scaler, label="reduce"),
    Row("SGD.grad_norm", lambda optimizer: (step(optimizer._dp), optimizer.grad_norm()), {}, {},
        make=optimizer_after_a_step, label="reduce"),
    # Else each slice would be updated at a rate of its own, and all replicas be equal.
    Row("SGD(sharded).step", lambda both, lr: (
            both[1].update(lr=lr), step(both[0]._dp), both[0].step()),
        {"lr": 0.5}, {"value": ({"lr": 0.25}, r"lr\W+0\.25.*lr\W+0\.5|lr\W+0\.5.*lr\W+0")},
        make=scheduled),
    loading("SGD", optimizer_after_a_step, "SGD"),
    loading("SGD(sharded)", lambda comm: optimizer_after_a_step(comm, sharded=True), "SGD"),
    *rows_of("LossScaler", LossScaler, {
        "initial_scale": (64.0, 32.0, "a", "scale"), "growth": (4.0, 8.0, "a")},
        make=dp_of, label="LossScaler"),
    Row("LossScaler.load_state_dict", lambda scaler: scaler.load_state_dict(scaler.state_dict()),
        {}, {}, make=lambda comm: LossScaler(dp_of(comm)), label="LossScaler"),
    Row("MasterWeights.load_state_dict",
        lambda masters: masters.load_state_dict(masters.state_dict()), {}, {},
        make=lambda comm: MasterWeights(dp_of(comm)), label="MasterWeights"),
    *rows_of("LocalSGD", made(LocalSGD), {
        "every": (4, 3, "a"), "start": (1, 2, "a"), "bucket_bytes": (1000, 2000, "a"),
        "sharded": (True, False, "no")}, label="the model|LocalSGD"),
    *rows_of("DiLoCo", made(DiLoCo), {
        "every": (4, 3, "a"), "lr": (0.5, 0.25, "a"), "fragments": (2, 1, "a"),
        "delay": (2, 1, "a"), "sharded": (True, False, "no")}, label="the model|DiLoCo"),
    Row("LocalSGD.step", lambda outer: outer.step(), {}, {}, label="reduce",
        make=lambda comm: trained(LocalSGD(params(), comm, every=4), 3)),
    loading("ParameterServer", made(ParameterServer, optimizer=SGD), None),
    loading("DiLoCo", lambda comm: trained(DiLoCo(params(), comm, every=4)), "DiLoCo"),
    *rows_of("PairAveraging", made(PairAveraging), {
        "seed": (4, 3, "a"), "delay": (3, 2, "a")}, label="PairAveraging|the model"),
    *rows_of("ParameterServer", made(ParameterServer, optimizer=SGD), {
        "staleness": (3, 2, "a"), "damped": (False, True, "no")},
        label="ParameterServer|the model"),
    Row("ParameterServer(optimizer=)", made(ParameterServer),
        {"optimizer": partial(SGD, lr=0.5)},
        {"value": ({"optimizer": partial(SGD, lr=0.25)}, "lr"),
         "type": ({"optimizer": 3}, "optimizer")}),
]
CASES = cases(ROWS)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_one_odd_rank_is_an_error_on_all(comm, case):
    check(comm, *CASES[case][1:])
