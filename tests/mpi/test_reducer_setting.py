"""Tests the setting `reducer`: which models use it, and that each has its own Reducer."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import reducers
from mpiring.numpy import DataParallel, DiLoCo, LocalSGD
from mpiring.reducers import Cast, ErrorFeedback, Int8, Mean, OneBit, PowerSGD, TopK

pytestmark = pytest.mark.mpi

MEANT = {"mean": Mean, "bf16": Cast, "float16": lambda: Cast("float16"),
         "int8": lambda: ErrorFeedback(Int8()), "onebit": OneBit, "powersgd": PowerSGD,
         "powersgd:4": lambda: PowerSGD(4), "topk": TopK, "topk:0.01": lambda: TopK(0.01)}


def params():
    return {"w": np.ones((40, 30), np.float32), "v": np.ones(9, np.float32), "b": np.ones(7)}


@pytest.fixture
def comm_with():
    """Return a function that opens a communicator of one rank per node with a Reducer's name."""
    opened = []

    def open_one(reducer):
        opened.append(mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(
            shared_memory=False, tuning=False, gpu_aware="no", reducer=reducer)))
        return opened[-1]

    yield open_one
    for comm in opened:
        comm.close()


def used_by(dp):
    return {repr(reducer) for reducer in dp.gradients._reducers.values()}


def trained(dp, steps=14):
    random = np.random.default_rng(dp.comm.rank)
    for _ in range(steps):
        for name in dp.params:
            dp.grads[name][...] = random.standard_normal(dp.grads[name].shape)
            dp.ready(name)
        dp.wait()
    return {name: gradient.copy() for name, gradient in dp.grads.items()}


@pytest.mark.parametrize("text", MEANT)
def test_is_the_same_as_in_the_program(comm_with, text):
    comm = comm_with(text)
    by_setting, by_program = DataParallel(params(), comm), DataParallel(
        params(), comm, reducer=MEANT[text]())
    assert used_by(by_setting) == {repr(MEANT[text]())}
    results = trained(by_setting), trained(by_program)
    for name in params():
        assert (results[0][name] == results[1][name]).all()
    assert by_setting.statistics.bytes_sent == by_program.statistics.bytes_sent


def test_the_program_wins_and_the_default_is_the_mean(comm_with):
    for text, given, used in (("", None, Mean()), ("bf16", Mean(), Mean()),
                              ("bf16", TopK(), TopK()), ("bf16", {"w": TopK()}, TopK())):
        dp = DataParallel(params(), comm_with(text), reducer=given)
        assert repr(used) in used_by(dp) and "Cast('bfloat16')" not in used_by(dp)


def test_each_model_has_its_own(comm_with):
    comm = comm_with("powersgd:2")
    models = [DataParallel(params(), comm) for _ in range(2)]
    for dp, steps in zip(models, (3, 2)):
        trained(dp, steps)
    assert [dp.gradients.compressors[0]._states.steps for dp in models] == [3, 2]


def test_the_reducer_stays_with_other_buckets(comm_with):
    dp = DataParallel(params(), comm_with("topk:0.5"), bucket_bytes=4)
    (before,), buckets = dp.gradients.compressors, len(dp.gradients.buckets)
    trained(dp, 2)
    dp.gradients._demand(bucket_bytes=1 << 20)
    trained(dp, 2)
    assert dp.gradients.compressors == [before] and before._states.steps == 4
    assert len(dp.gradients.buckets) < buckets


def test_statistics_have_the_reducers_in_force(comm_with):
    comm = comm_with("float16")
    by_setting, by_program = DataParallel(params(), comm), DataParallel(
        params(), comm, reducer={"w": OneBit(), "v": Cast()})
    apart, beside = comm.split(0), comm.split(0)
    outer = DiLoCo(params(), apart, every=2, fragments=2, reducer={"[wb]": Cast()})
    assert comm.statistics.reducers == by_setting.statistics.reducers == ()
    trained(by_setting, 1)
    assert comm.statistics.reducers == by_setting.statistics.reducers == ("Cast('float16')",)
    trained(by_program, 1)
    for _ in range(2):
        outer.step()
    assert by_program.statistics.reducers == ("Cast('bfloat16')", "Mean()", repr(OneBit()))
    assert comm.statistics.reducers == (
        by_setting.statistics + by_program.statistics).reducers == (
        "Cast('bfloat16')", "Cast('float16')", "Mean()", repr(OneBit()))
    assert apart.statistics.reducers == outer.statistics.reducers == ("Cast('bfloat16')", "Mean()")
    assert beside.statistics.reducers == ()
    assert f'reducer="{OneBit()!r}"' in comm.statistics.openmetrics()
    apart.close()
    beside.close()


def test_local_training(comm_with):
    for kind in (LocalSGD, DiLoCo):
        for given, used in ((None, "Cast('float16')"), (Mean(), "Mean()")):
            outer = kind(params(), comm_with("float16"), every=2, reducer=given)
            assert {repr(reducer) for fragment in outer._fragments
                    for reducer in fragment.gradients._reducers.values()} == {used}
            for _ in range(2):
                outer.step()


def test_models_of_pytorch(comm_with):
    torch = pytest.importorskip("torch")
    from mpiring.horovod.ops import Average, Max, Sum
    from mpiring.horovod.compression import Compression
    from mpiring.horovod.torch.gradients import Combination
    from mpiring.torch import DataParallel as TorchDataParallel, Sharded
    comm = comm_with("topk:0.5")
    model = TorchDataParallel(torch.nn.Linear(6, 3), comm)
    (compressor,) = model._averaging.gradients.compressors
    optimizer = Sharded(torch.optim.SGD, model, lr=0.1)
    for frozen in (False, True, False):
        # The buckets are other ones; the Reducer remains.
        model.module.bias.requires_grad_(not frozen)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    assert model._averaging.gradients.compressors == [compressor] and compressor._states.steps == 3
    assert model.statistics.reducers == comm.statistics.reducers == (repr(compressor),)
    for op, compression, used in (
            (Average, Compression.none, TopK(0.5)), (Sum, Compression.none, TopK(0.5)),
            (Max, Compression.none, None), (Average, Compression.fp16, Cast("float16")),
            (Average, Mean(), Mean())):
        combined = Combination(op, compression, 1.0, None, False, True)
        assert used is None or repr(combined.reducer(comm)) == repr(used)
        assert repr(combined.reducer()) == repr(combined.reducer(comm_with("")))


def test_every_name_is_a_reducer():
    names = {name.partition(":")[0] for name in MEANT}
    assert names == {*mpiring.names.REDUCERS} == {*reducers.named._MAKERS}
