"""Tests PyTorch's optimizers on slices, on real MPI, against themselves on whole parameters."""

import pytest
from launching import needed

torch = needed("torch")
from mpiring.torch import DataParallel, Sharded  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi


class Odd(nn.Module):
    """Tensors of odd sizes, a number among them, and one that is not in C order."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 33), nn.Linear(18, 3, bias=False)
        self.filter = nn.Conv2d(3, 2, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype, memory_format=torch.channels_last)

    def forward(self, x):
        images = self.first(x)[:, :27].tanh().reshape(-1, 3, 3, 3)
        x = self.filter(nn.functional.pad(images, (1, 1, 1, 1))).flatten(1)
        return self.last(x) * self.scale


def batch(comm, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    return (torch.randn(8, n, generator=generator).to(dtype) for n in (6, 3))


def loss_of(model, comm, step):
    x, y = batch(comm, step, next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def wrapped(comm, dtype=torch.float32, **settings):
    return DataParallel(Odd(dtype), comm, **{"bucket_bytes": 700, **settings})


def train(model, optimizer, comm, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()


def assert_same(one, other, dtype=torch.float32):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {
        "rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def assert_equal_on_all(model, comm):
    # Each bfloat16 is a float32 of its own.
    mine = [p.detach().float().numpy().tobytes() for p in model.parameters()]
    assert all(theirs == mine for theirs in comm.allgather_object(mine))


ELEMENTWISE = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adam", {"amsgrad": True}),
    ("AdamW", {"lr": 0.01, "fused": True}), ("AdamW", {"lr": 0.01, "foreach": True}),
    ("NAdam", {}), ("RAdam", {}), ("Adagrad", {}), ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Adadelta", {}), ("Adamax", {}), ("Rprop", {}), ("ASGD", {})]


@pytest.mark.parametrize(("name", "settings", "dtype"), [
    *((name, settings, torch.float32) for name, settings in ELEMENTWISE),
    ("AdamW", {"lr": 0.01}, torch.bfloat16), ("SGD", {"lr": 0.1}, torch.bfloat16)])
def test_slices_are_updated_as_whole_parameters(comm, name, settings, dtype):
    """For 20 steps; and the state is that of whole parameters."""
    make = getattr(torch.optim, name)
    plain, model = wrapped(comm, dtype), wrapped(comm, dtype)
    right = make(plain.parameters(), **settings)
    optimizer = Sharded(make, model, **settings)
    train(plain, right, comm, range(20))
    train(model, optimizer, comm, range(20))
    assert_same(model.parameters(), plain.parameters(), dtype)
    assert_equal_on_all(model, comm)
    mine, wanted = optimizer.state_dict(), right.state_dict()
    assert mine["param_groups"] == wanted["param_groups"]
    assert mine["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert mine["state"][number].keys() == state.keys()
        assert_same(mine["state"][number].values(), state.values(), dtype)
