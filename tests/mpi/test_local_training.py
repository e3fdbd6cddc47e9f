"""Tests local training on real MPI: between nodes with all Reducers, resumed, and in groups.

tests/optim holds it to the papers.
"""

import tempfile

import numpy as np
import pytest
from models import SHAPES, bits, close, model, same_on_all_ranks

from mpiring.numpy import Checkpoints, DataParallel, DiLoCo, LocalSGD
from mpiring.optim import SGD
from mpiring.reducers import Cast, ErrorFeedback, PowerSGD

pytestmark = pytest.mark.mpi

STREAMING = {"every": 4, "fragments": 3, "delay": 2}


def gradient(w, name, step, rank):
    random = np.random.default_rng([step, rank, *name.encode()])
    return w - random.integers(-8, 9, w.shape).astype("f4") / 8


def take_steps(outer, params, steps, rank):
    for step in steps:
        for name, w in params.items():
            w -= 0.1 * gradient(w, name, step, rank)
        outer.step()


REDUCERS = {"mean": lambda: None, "feedback": lambda: ErrorFeedback(Cast("bfloat16")),
            "powersgd": lambda: PowerSGD(rank=2)}


@pytest.mark.parametrize("name", REDUCERS)
def test_any_reducer_and_bit_by_bit_from_a_checkpoint(apart, name):
    """Sharded or not the results are close; all ranks agree; residuals are saved with the rest."""
    results = []
    for sharded in (False, True):
        def start():
            params = model()
            return params, DiLoCo(params, apart, **STREAMING, reducer=REDUCERS[name](),
                                  sharded=sharded, bucket_bytes=3000)

        with tempfile.TemporaryDirectory() as folder:
            folder = apart.broadcast_object(folder, root=0)
            params, outer = start()
            take_steps(outer, params, range(1, 8), apart.rank)
            with Checkpoints(folder, apart) as checkpoints:
                checkpoints.save(7, sharded=outer.sharded_state_dict(),
                                 own={"params": params, "outer": outer.own_state_dict()})
                saved = checkpoints.load()
            again, resumed = start()
            resumed.load_state_dict(saved.sharded)
            resumed.load_own_state_dict(saved.own["outer"])
            for x, before in zip(again.values(), saved.own["params"].values()):
                x[...] = before
            apart.barrier()
        for its, local in ((params, outer), (again, resumed)):
            take_steps(local, its, range(8, 14), apart.rank)
            local.synchronize()
            assert same_on_all_ranks(apart, its) and local.steps == 13
        assert bits(params) == bits(again)
        results.append(params)
    close(*results, 1e-3)


def test_statistics_are_those_of_the_synchronizations(apart):
    for sharded in (False, True):
        params = model()
        outer = LocalSGD(params, apart, every=4, sharded=sharded)
        take_steps(outer, params, range(1, 4), apart.rank)
        assert outer.statistics.operations == outer.statistics.bytes_sent == 0
        take_steps(outer, params, range(4, 12), apart.rank)
        statistics, size = outer.statistics, apart.size
        assert statistics.dense_bytes == pytest.approx(
            2 * 2 * (size - 1) / size * sum(x.nbytes for x in params.values()), rel=0.05)
        if size > 1:
            assert statistics.bytes_sent == pytest.approx(statistics.dense_bytes, rel=0.1)
            assert 0 < statistics.exposed_s < 60


def test_synchronous_in_groups_and_rarely_between(comm):
    """The mean over all ranks is that over groups, weighted by their ranks."""
    with comm.split(comm.rank % 2) as group:
        params, right = model(), [model(), model()]
        dp = DataParallel(params, group)
        optimizer = SGD(dp, lr=0.1, momentum=0.9, sharded=True)
        outer = DiLoCo(dp, comm, every=3, lr=1.0, momentum=0.0)
        velocity = [{name: 0 * x for name, x in model().items()} for _ in right]
        members = [range(kind, comm.size, 2) for kind in range(2)]
        for step in range(1, 8):
            for name, w in params.items():
                dp.grads[name][...] = gradient(w, name, step, comm.rank)
                dp.ready(name)
            assert optimizer.step()
            outer.step()
            for ranks, its, v in zip(members, right, velocity):
                for name, w in its.items() if len(ranks) else ():
                    mean = np.mean([gradient(w, name, step, rank) for rank in ranks], axis=0)
                    v[name] = 0.9 * v[name] + mean
                    w -= 0.1 * v[name]
            if step % 3 == 0:
                for name in SHAPES:
                    mean = sum(len(ranks) * its[name] for ranks, its in zip(members, right))
                    right = [{**its, name: np.array(mean / comm.size, "f4")} for its in right]
            close(params, right[comm.rank % 2], 1e-4)
            assert same_on_all_ranks(group, params)
