"""Compares Muon, whose matrices have one owner each, with torch.optim.Muon in one process."""

import copy

import pytest
from launching import needed

import mpiring
from mpiring.reducers import Mean, PowerSGD
from mpiring.sharding.sliced import Sliced

torch = needed("torch")
from odd_modules import equal_on_all  # noqa: E402
from mpiring.torch import DataParallel, Sharded  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi


class Matrices(nn.Module):
    """Matrices of several shapes and memory orders among other parameters, and tied weights.

    The loss is linear. Gradients are small integers, so that their means are exact.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        # Longer than a bucket.
        self.long = nn.Linear(70, 40)
        self.square, self.wide, self.row = nn.Linear(6, 6), nn.Linear(33, 6), nn.Linear(5, 1)
        self.filter, self.scale = nn.Conv2d(2, 3, 3), nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(8, 5).T)
        self.to(dtype)

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters()
                   if p.requires_grad)


def gradients_of(module, rank, size, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: (size * torch.randint(-4, 5, p.shape, generator=generator)).to(p.dtype)
            for name, p in module.named_parameters()}


def is_muons(name, p):
    return p.dim() == 2 and "embedding" not in name


def grouped(module, **of_others):
    """Return groups of matrices, without those of the embedding, and of other parameters."""
    named = list(module.named_parameters())
    return [{"params": [p for name, p in named if is_muons(name, p)]},
            {"params": [p for name, p in named if not is_muons(name, p)], **of_others}]


class OneProcess:
    """The optimizers that a program in one process uses, with the means of all ranks' gradients."""

    def __init__(self, module, muon, adamw, muon_class=torch.optim.Muon):
        self.module = module
        matrices, others = grouped(module)
        self.optimizers = [muon_class(matrices["params"], **muon),
                           torch.optim.AdamW(others["params"], **adamw)]

    def step(self, size, step, passes=1):
        all_gradients = [gradients_of(self.module, rank, size, step + k)
                         for rank in range(size) for k in range(passes)]
        for name, p in self.module.named_parameters():
            p.grad = sum(gradients[name] for gradients in all_gradients) / size
        if not self.module.long.weight.requires_grad:
            self.module.long.weight.grad = None
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self):
        """Return the state by number, as if the optimizers were one."""
        states = [state for optimizer in self.optimizers
                  for state in optimizer.state_dict()["state"].values()]
        return dict(enumerate(states))


def train(model, optimizer, comm, steps, passes=1, outer=None):
    for step in steps:
        for k in range(passes):
            gradients = gradients_of(model.module, comm.rank, comm.size, step + k)
            if k < passes - 1:
                with model.no_sync():
                    model(gradients).backward()
            else:
                model(gradients).backward()
        optimizer.step()
        if outer is not None:
            outer.step()


def assert_trained(module, right):
    """Muon's results have the same bits; AdamW's may depend on where a slice begins."""
    for (name, p), q in zip(module.named_parameters(), right.parameters(), strict=True):
        if is_muons(name, p):
            assert torch.equal(p, q), name
        else:
            tolerance = 2e-2 if p.dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def assert_states(state, right_state):
    assert state.keys() == right_state.keys()
    for number, right in right_state.items():
        torch.testing.assert_close(dict(state[number]), dict(right), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(("muon", "adamw", "options"), [
    ({"lr": 0.02}, {"lr": 0.02}, {}),
    ({"lr": 0.02}, {"lr": 0.02}, {"overlap": True}),
    ({"lr": 0.02}, {"lr": 0.02}, {"overlap": True, "weights": "node"}),
    ({"lr": 0.02, "nesterov": False, "momentum": 0.8}, {"lr": 3e-4, "betas": (0.9, 0.95)}, {}),
    ({"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1},
     {"lr": 1e-3, "weight_decay": 0.0, "fused": True}, {"passes": 3}),
    ({"ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-6}, {"amsgrad": True}, {}),
    ({"lr": 0.02}, {"lr": 0.01, "foreach": True}, {"dtype": torch.bfloat16}),
    ({"lr": 0.02}, {}, {"dtype": torch.float64}),
])
def test_training_is_that_of_one_process(comm, muon, adamw, options):
    options = dict(options)
    dtype, passes = options.pop("dtype", torch.float32), options.pop("passes", 1)
    right = OneProcess(Matrices(dtype), muon, adamw)
    model = DataParallel(Matrices(dtype), comm, bucket_bytes=600)
    first, second = grouped(model.module, **{"use_muon": False, "lr": 1e-3, **adamw})
    optimizer = Sharded(torch.optim.Muon, model, [{**first, **muon}, second], **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(its, lambda step: 1 / (1 + step))
                 for its in (optimizer, *right.optimizers)]
    for step in range(5):
        train(model, optimizer, comm, [step], passes, outer=schedules[0])
        right.step(comm.size, step, passes)
        for schedule in schedules[1:]:
            schedule.step()
        assert_trained(model.module, right.module)
    assert equal_on_all(model.parameters(), comm)
    state = optimizer.state_dict()
    assert_states(state["state"], right.state())
    for group, plain in zip(state["param_groups"], right.optimizers):
        its = plain.state_dict()["param_groups"][0]
        assert {key: group[key] for key in its if key != "params"} == {
            key: x for key, x in its.items() if key != "params"}


def test_training_is_that_of_one_process_without_groups(comm):
    """Settings of both classes apply to all parameters, others to those of their class."""
    right = OneProcess(Matrices(), {"lr": 0.01, "momentum": 0.9}, {"lr": 0.01, "betas": (0.8, 0.9)})
    model = DataParallel(Matrices(), comm)
    optimizer = Sharded(torch.optim.Muon, model, lr=0.01, momentum=0.9, betas=(0.8, 0.9))
    train(model, optimizer, comm, range(3))
    for step in range(3):
        right.step(comm.size, step)
    assert_trained(model.module, right.module)
    assert ["momentum" in group for group in optimizer.param_groups] == [True, False]
    assert ["betas" in group for group in optimizer.param_groups] == [False, True]


def merged(states):
    """Return the nest in which each `Sliced` has the pieces of all ranks."""
    first, *others = states
    if isinstance(first, Sliced):
        return first.merged(others)
    if isinstance(first, dict):
        return {key: merged([state[key] for state in states]) for key in first}
    return first


@pytest.mark.parametrize("how", ["whole", "sliced"])
def test_training_goes_on_anywhere(comm, how):
    """Saved here, loaded by fewer ranks, by one, and by PyTorch's own classes."""
    right = OneProcess(Matrices(), {"lr": 0.02}, {"lr": 0.01})
    model = DataParallel(Matrices(), comm, bucket_bytes=600)

    def sharded(its, **settings):
        return Sharded(torch.optim.Muon, its, grouped(its.module, lr=0.01), lr=0.02, **settings)

    optimizer = sharded(model)
    train(model, optimizer, comm, range(3))
    for step in range(3):
        right.step(comm.size, step)
    weights, full = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    saved = full if how == "whole" else merged(
        comm.allgather_object(optimizer.sharded_state_dict()))
    for ranks in (comm, comm.split(comm.rank // 2), comm.split(comm.rank)):
        other = DataParallel(Matrices(), ranks, bucket_bytes=600)
        other.load_state_dict(weights)
        again = sharded(other, overlap=True)
        again.load_state_dict(copy.deepcopy(saved))
        torch.testing.assert_close(again.state_dict(), full, rtol=0, atol=0)
        one = OneProcess(copy.deepcopy(other.module), {"lr": 0.02}, {"lr": 0.01})
        for plain, group, first in zip(one.optimizers, full["param_groups"], (0, 5)):
            numbers = range(len(group["params"]))
            plain.load_state_dict({"param_groups": [{**group, "params": [*numbers]}], "state": {
                number: copy.deepcopy(full["state"][first + number]) for number in numbers}})
        # The state of two optimizers, whose groups do not name their class.
        again.load_state_dict({"state": one.state(), "param_groups": [
            {key: x for key, x in group.items() if key != "use_muon"}
            for group in full["param_groups"]]})
        train(other, again, ranks, range(3, 5))
        for step in range(3, 5):
            one.step(ranks.size, step)
        assert_trained(other.module, one.module)
        if ranks is not comm:
            ranks.close()


def test_work_is_balanced_whatever_the_bytes(comm):
    """Narrow matrices are as long as square ones, but cost little; some ranks may have none."""
    torch.manual_seed(1)
    shapes = [(64, 64)] * 6 + [(4, 1024)] * 6
    net = nn.ParameterDict({f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)})
    model = DataParallel(net, comm)
    optimizer = Sharded(torch.optim.Muon, model, lr=0.1)
    own = [tuple(p.shape) for p in optimizer.param_groups[0]["params"]]
    by_rank = comm.allgather_object(own)
    assert sorted(shape for its in by_rank for shape in its if shape != (1, 1)) == sorted(shapes)
    squares = [its.count((64, 64)) for its in by_rank]
    assert max(squares) - min(squares) <= 1
    few = DataParallel(nn.Linear(3, 2), comm)
    optimizer = Sharded(torch.optim.Muon, few, lr=0.1, overlap=True)
    for _ in range(2):
        few(torch.ones(4, 3)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert equal_on_all(few.parameters(), comm)


def test_matrices_are_frozen_thawed_and_replaced(comm):
    right = OneProcess(Matrices(), {"lr": 0.02}, {"lr": 0.02})
    model = DataParallel(Matrices(), comm, bucket_bytes=600)
    optimizer = Sharded(torch.optim.Muon, model, lr=0.02)
    for step in range(6):
        for net in right.module, model.module:
            net.long.weight.requires_grad_(step not in (2, 3))
        train(model, optimizer, comm, [step])
        right.step(comm.size, step)
        assert_trained(model.module, right.module)
        if step in (2, 5):
            optimizer.load_state_dict(merged(
                comm.allgather_object(optimizer.sharded_state_dict())))
            assert_states(optimizer.state_dict()["state"], right.state())
    optimizer.close()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, [6])
    optimizer = Sharded(torch.optim.Muon, model, lr=0.02)
    train(model, optimizer, comm, [7])
    assert equal_on_all(model.parameters(), comm)
    model.module.long.weight = nn.Parameter(torch.ones(5))
    with pytest.raises(mpiring.ConfigError, match="long.weight: Muon updates real matrices only"):
        train(model, optimizer, comm, [8])


def test_norms_and_steps_that_are_not_finite(comm):
    plain, model = (DataParallel(Matrices(), comm) for _ in range(2))
    optimizer = Sharded(torch.optim.Muon, model, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    for step in range(3):
        gradients = gradients_of(model.module, comm.rank, comm.size, step)
        if step == 1 and comm.rank == 0:
            gradients["square.weight"][0, 0] = torch.inf
        scaler.scale(model(gradients)).backward()
        plain.zero_grad()
        plain(gradients).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1e9)
        if step != 1:
            right = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            torch.testing.assert_close(norm, right)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        before = copy.deepcopy(model.state_dict())
    assert scaler.get_scale() == 2.0 and equal_on_all(model.parameters(), comm)
    assert optimizer.state_dict()["state"][5]["step"] == 2


def test_matrices_are_reduced_by_reducers(apart):
    """Those of Muon, and others, by different Reducers; a compressed mean is finite and equal."""
    model = DataParallel(Matrices(), apart, bucket_bytes=600,
                         reducer={"*.weight": PowerSGD(rank=1), "*": Mean()})
    optimizer = Sharded(torch.optim.Muon, model, lr=0.02)
    train(model, optimizer, apart, range(3))
    assert equal_on_all(model.parameters(), apart)
    assert all(p.isfinite().all() for p in model.parameters())


class Doubled(torch.optim.Muon):
    """A class of the user's that works on complete matrices."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(2)
        return super().step(closure)


class RowSums(torch.optim.Muon):
    """A class of the user's whose state is no matrix of the parameter's shape."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.grad.sum(1)


def test_a_class_of_the_users_own(comm):
    right = OneProcess(Matrices(), {"lr": 0.02}, {"lr": 0.02}, Doubled)
    model = DataParallel(Matrices(), comm, bucket_bytes=600)
    with pytest.raises(mpiring.ConfigError, match="its state .*'rows'. has neither"):
        Sharded(RowSums, model, lr=0.02)
    optimizer = Sharded(Doubled, model, lr=0.02)
    train(model, optimizer, comm, range(2))
    for step in range(2):
        right.step(comm.size, step)
    assert_trained(model.module, right.module)


def test_mistakes_are_explained(comm):
    model = DataParallel(Matrices(), comm)
    every = list(model.module.parameters())
    other_muon = type("Muon", (torch.optim.SGD,), {})
    for mistake, told in (
            (lambda: Sharded(other_muon, model, lr=0.1), "and is not torch.optim.Muon"),
            (lambda: Sharded(torch.optim.Muon, model, [{"params": every, "use_muon": True}]),
             "scale, .*: Muon updates real matrices only, of 2 dimensions; .* use_muon=False"),
            (lambda: Sharded(torch.optim.Muon, model, [{"params": every, "use_muon": "no"}]),
             "use_muon='no'"),
            (lambda: Sharded(torch.optim.Muon, model, every[1:]), "trained, but in no group")):
        with pytest.raises(mpiring.ConfigError, match=told):
            mistake()
    with pytest.raises(TypeError, match="lrs"):
        Sharded(torch.optim.Muon, model, lrs=0.1)
    matrices, others = grouped(model.module, use_muon=False)
    saved = []
    for use_muon in True, False:
        optimizer = Sharded(torch.optim.Muon, model, [
            {"params": matrices["params"][:1], "use_muon": use_muon},
            {"params": matrices["params"][1:]}, others])
        train(model, optimizer, comm, [0])
        for state in saved:
            with pytest.raises(mpiring.ConfigError, match="transposed is of Muon, but AdamW"):
                optimizer.load_state_dict(state)
        saved.append(optimizer.state_dict())
        more = {**saved[-1], "param_groups": saved[-1]["param_groups"] * 2}
        with pytest.raises(mpiring.ConfigError, match="make the same groups"):
            optimizer.load_state_dict(more)
        optimizer.close()
    optimizer = Sharded(torch.optim.Muon, model, [
        {"params": matrices["params"][:1]}, {"params": matrices["params"][1:]}, others])
    with pytest.raises(mpiring.ConfigError, match="is of AdamW, but Muon updates it here; set"):
        optimizer.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    train(model, optimizer, comm, [2])
    assert equal_on_all(model.parameters(), comm)
