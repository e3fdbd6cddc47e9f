"""Tests what NumPy's side does for PyTorch's tensors, on real MPI; the others need no PyTorch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from launching import needed

from mpiring import ConfigError
from mpiring.asynchronous import PairAveraging
from mpiring.engine.prepared import Prepared
from mpiring.numpy import DataParallel
from mpiring.optim import AdamW

torch = needed("torch")
import mpiring.torch  # noqa: E402

pytestmark = pytest.mark.mpi

# Written by version 0.1: two ranks, a model of two linear layers, three steps of AdamW.
OLD = Path(__file__).parent.parent / "sharding" / "saved"


def test_what_older_versions_have_saved_is_loaded(comm, tmp_path):
    folder = comm.broadcast_object(tmp_path / "run", root=0)
    if comm.rank == 0:
        shutil.copytree(OLD, folder)
    comm.barrier()
    with mpiring.torch.Checkpoints(folder, comm) as checkpoints:
        saved = checkpoints.load()
        model = mpiring.torch.DataParallel(torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)), comm)
        model.load_state_dict(saved.replicated["weights"])
        optimizer = mpiring.torch.Sharded(torch.optim.AdamW, model, lr=0.1)
        optimizer.load_state_dict(saved.sharded["torch"])
        dp = DataParallel({name: x.numpy() for name, x in saved.replicated["weights"].items()},
                          comm)
        adam = AdamW(dp, lr=0.1, sharded=True)
        adam.load_state_dict(saved.sharded["numpy"])
    state = optimizer.state_dict()["state"]
    for number, vectors in saved.replicated["torch"]["state"].items():
        assert all(torch.equal(state[number][name], x) for name, x in vectors.items())
    state = adam.state_dict()["tensors"]
    for name, vectors in saved.replicated["numpy"]["tensors"].items():
        assert all(np.array_equal(state[name][vector], x) for vector, x in vectors.items())


def test_parameters_of_a_module_may_be_replaced(comm):
    module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    with PairAveraging(module, comm, delay=0) as pairs:
        module.load_state_dict({name: torch.full_like(x, comm.rank) for name, x in
                                module.state_dict().items()}, assign=True)
        module[0].bias.data = torch.full((1,), 2. * comm.rank)
        pairs.agree()
        mean = (comm.size - 1) / 2
        assert module[0].weight[0, 1] == module[1].running_var[0] == mean
        assert module[0].bias[0] == 2 * mean
        module.double()
        with pytest.raises(ConfigError, match="0.weight float64 .* in the place of 0.weight floa"):
            pairs.agree()
        module.float()


@pytest.mark.parametrize("sharded", [False, True])
def test_the_step_in_which_a_tower_was_not_finite_is_named(comm, caplog, sharded):
    """The gradients of a linear tower do not depend on its weights: one step only is bad."""
    model = mpiring.torch.DataParallel(torch.nn.ModuleDict({
        name: torch.nn.Linear(600, 600, bias=False) for name in ("front", "back")}), comm)
    model.module.forward = lambda x: [tower(x).mean() for tower in model.module.values()]
    optimizer = (mpiring.torch.Sharded(torch.optim.SGD, model, lr=0.1) if sharded
                 else torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        with model.no_sync():
            sum(model(torch.ones(1, 600))).backward()
        front, back = model(torch.ones(1, 600))
        if number == 2 and comm.rank == comm.size - 1:
            back = back * torch.nan
        (front + back).backward()
        assert model.finite == (number != 2) and model.nonfinite == {}
        optimizer.step()
        optimizer.zero_grad()
    texts = [record.getMessage() for record in caplog.records if record.name == "mpiring"]
    assert len(texts) == (comm.rank == 0)
    assert not texts or texts[0].startswith("step 2: NaN or Inf in gradients before they were")
    assert not texts or "of back.weight (of an unknown rank" in texts[0]


def test_short_calls_on_tensors_are_fast_and_match_those_on_arrays(comm, monkeypatch):
    """Some ranks pass arrays and others tensors, in turn, also as parts of longer ones."""
    def made(step):
        x = np.zeros((5, 40), np.float32)[1:4]
        return torch.from_numpy(x) if (step + comm.rank) % 2 else x

    def run(*call, original=Prepared._run_ordinarily):
        slow.append(call)
        return original(*call)

    slow, operations = [], comm.statistics.operations
    monkeypatch.setattr(Prepared, "_run_ordinarily", run)
    for step in range(8):
        x = made(step)
        x[...] = comm.rank + step
        assert comm.allreduce(x, op="max") is x
        assert (np.asarray(x) == comm.size - 1 + step).all()
        x[...] = comm.rank + step
        assert comm.broadcast(x, root=comm.size - 1) is x
        assert (np.asarray(x) == comm.size - 1 + step).all()
        x[...] = comm.rank
        part = comm.reduce_scatter(x)
        assert (np.asarray(part) == comm.size * (comm.size - 1) / 2).all()
        assert type(part) is type(x)
    is_fast = comm.size > 1 and len(comm.memory_groups) == 1 and comm.config.rounds != "off"
    # The first call of a kind is not.
    assert len(slow) <= 3 or not is_fast
    assert comm.statistics.operations - operations == 24 * (comm.size > 1)
