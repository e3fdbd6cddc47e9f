"""Tests PyTorch's optimizers on slices, on real MPI, against themselves on whole parameters."""

import contextlib
import copy
import itertools
import logging
import pickle

import pytest
from launching import needed
from mpi4py import MPI

import mpiring
import mpiring.numpy
import mpiring.optim
from mpiring.sharding.sliced import Sliced
from mpiring.reducers import Cast, ErrorFeedback, Int8

torch = needed("torch")
from odd_modules import Odd, equal_on_all, loss_of, train, wrapped  # noqa: E402
from mpiring.torch import DataParallel, Sharded, broadcast_parameters  # noqa: E402
from mpiring.torch.weights import WeightBuckets, flat, without_waiting  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi


def adamw(model, **settings):
    return Sharded(torch.optim.AdamW, model, **{"lr": 0.01, **settings})


def both(comm, make=torch.optim.AdamW, dtype=torch.float32, *, sharded={}, **settings):
    """Return a model with an optimizer of whole parameters, and one with the same in slices.

    Args:
        sharded: Settings of Sharded itself.
    """
    plain, model = wrapped(comm, dtype), wrapped(comm, dtype)
    return ((plain, make(plain.parameters(), **settings)),
            (model, Sharded(make, model, **sharded, **settings)))


def assert_same(first, second, dtype=torch.float32):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {
        "rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


ELEMENTWISE = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adam", {"amsgrad": True}),
    ("AdamW", {"lr": 0.01, "fused": True}), ("AdamW", {"lr": 0.01, "foreach": True}),
    ("NAdam", {}), ("RAdam", {}), ("Adagrad", {}), ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Adadelta", {}), ("Adamax", {}), ("Rprop", {}), ("ASGD", {})]


@pytest.mark.parametrize(("name", "settings", "dtype"), [
    *((name, settings, torch.float32) for name, settings in ELEMENTWISE),
    ("AdamW", {"lr": 0.01}, torch.bfloat16), ("SGD", {"lr": 0.1}, torch.bfloat16)])
def test_slices_are_updated_as_whole_parameters(comm, name, settings, dtype):
    """And the state is that of whole parameters."""
    (plain, right), (model, optimizer) = both(
        comm, getattr(torch.optim, name), dtype, **settings)
    train(plain, right, comm, range(6))
    train(model, optimizer, comm, range(6))
    assert_same(model.parameters(), plain.parameters(), dtype)
    assert equal_on_all(model.parameters(), comm)
    state, right_state = optimizer.state_dict(), right.state_dict()
    assert state["param_groups"] == right_state["param_groups"]
    assert state["state"].keys() == right_state["state"].keys()
    for number, its in right_state["state"].items():
        assert state["state"][number].keys() == its.keys()
        assert_same(state["state"][number].values(), its.values(), dtype)


class Late:
    """An exchange of slices that begins when somebody waits for it; until then others' are NaN."""

    def __init__(self, weights, index, begin):
        self.weights, self.index, self.begin = weights, index, begin
        bucket, rank = weights.buckets[index], weights.comm.rank
        start, stop = bucket.bounds(weights.comm.size)[rank:rank + 2]
        x = flat(bucket, slice(None))
        x[:start] = x[stop:] = torch.nan

    def wait(self):
        self.begin(self.weights, self.index)
        self.weights._handles[self.index].wait()


@pytest.fixture
def late(monkeypatch):
    """Let no slice of another rank arrive before somebody waits for it."""
    send = WeightBuckets.send
    monkeypatch.setattr(WeightBuckets, "send", lambda self, index: self._handles.update(
        {index: Late(self, index, send)}))


class Varied(nn.Module):
    """Modules that use parameters in other ways than in their own forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 8)
        # Uses the weight of its out_proj, which is a module.
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        # Keeps a list of its parameters.
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.more = nn.ParameterList([torch.ones(8), torch.zeros(8)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        x = x + self.attention(x, x, x)[0]
        x = self.lstm(x)[0] * self.scale
        return self.head(self.normed(x * self.more[0] + self.more[1]))


def varied_loss(model, comm, step):
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    x = torch.randint(7, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def trained_by(comm, steps=4, loss=varied_loss, bucket_bytes=300, **settings):
    model = DataParallel(Varied(), comm, bucket_bytes=bucket_bytes)
    optimizer = adamw(model, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, comm, step).backward()
        optimizer.step()
    return model, optimizer


def test_slices_return_behind_the_next_forward_pass(comm, late):
    """Everybody reads complete weights, however late they are."""
    right, _ = trained_by(comm)
    wanted = {name: p.detach().clone() for name, p in right.module.named_parameters()}
    for read in (lambda model, _: dict(zip(wanted, model.parameters())),
                 lambda model, _: dict(model.module.named_parameters()),
                 lambda model, _: model.state_dict(),
                 lambda model, _: dict(copy.deepcopy(model.module).named_parameters()),
                 lambda model, optimizer: optimizer.synchronize() or kept):
        model, optimizer = trained_by(comm, overlap=True)
        kept = {name: p for name, p in without_waiting(model.module)}
        assert comm.size == 1 or any(p.isnan().any() for p in kept.values())
        elements = read(model, optimizer)
        assert all(elements[name].equal(p) for name, p in wanted.items())
    model.compare_replicas()
    varied_loss(model, comm, 9).backward()
    assert isinstance(model.module.lstm._parameters, dict)
    optimizer.close()
    assert all(type(part._parameters) is dict for part in model.modules())


class Compiled(nn.Module):
    """Looks like what torch.compile returns: runs without the module's hooks and attributes."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module
        self.kept = [module.weight, module.bias]

    def forward(self, x):
        return nn.functional.linear(x, *self.kept)


def test_what_has_no_hooks_is_waited_for_in_step(comm, late):
    models = []
    for settings in {}, {"overlap": True}:
        torch.manual_seed(1)
        models.append(DataParallel(
            nn.Sequential(nn.Linear(6, 9), Compiled(nn.Linear(9, 3))), comm, bucket_bytes=100))
        train(models[-1], adamw(models[-1], **settings), comm, range(3))
    assert_same(*(model.parameters() for model in models))


def by_decay(model, named=False):
    """Return two groups of parameters, which take turns in the model."""
    groups = [{"params": [], "weight_decay": 0.3}, {"params": [], "lr": 0.003}]
    for name, p in model.module.named_parameters():
        groups[p.dim() < 2]["params"].append((name, p) if named else p)
    return groups


def test_groups_schedules_and_clipping(comm):
    """Groups of the same settings, that change; norms are those of whole gradients."""
    plain, model = wrapped(comm), wrapped(comm)
    right = torch.optim.AdamW(by_decay(plain, named=True), lr=0.01)
    optimizer = Sharded(torch.optim.AdamW, model, by_decay(model, named=True), lr=0.01)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(x, 0.1, total_steps=9)
                 for x in (right, optimizer)]
    for step, norm_type in zip(range(9), itertools.cycle([2, 1, 3.5, float("inf")])):
        loss_of(plain, comm, step).backward()
        loss_of(model, comm, step).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert optimizer.grad_norm(norm_type) == pytest.approx(float(wanted), rel=1e-5)
        norm = optimizer.clip_grad_norm_(0.1, norm_type)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-5)
        right.step()
        optimizer.step()
        right.zero_grad()
        for schedule in schedules:
            schedule.step()
        assert_same(model.parameters(), plain.parameters())
    assert optimizer.state_dict()["param_groups"] == right.state_dict()["param_groups"]
    assert "scale" in optimizer.param_groups[1]["param_names"]


def test_a_step_that_is_not_finite_leaves_no_trace(comm, caplog):
    model = wrapped(comm)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    train(model, optimizer, comm, range(2))
    for step, scaled in ((2, True), (3, False)):
        before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        loss = loss_of(model, comm, step) * (torch.inf if comm.rank == comm.size - 1 else 1)
        with caplog.at_level(logging.WARNING, "mpiring"):
            if scaled:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == 2.0
            else:
                loss.backward()
                with pytest.raises(mpiring.GradientError, match="norm of the gradients is nan"):
                    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
                optimizer.step()
                assert comm.rank or "NaN or Inf in gradients before" in caplog.text
        assert not model.finite and list(model.nonfinite) == [comm.size - 1]
        after = optimizer.state_dict(), model.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    train(model, optimizer, comm, range(4, 6))
    assert optimizer.state_dict()["state"][0]["step"] == 4
    assert equal_on_all(model.parameters(), comm)


def test_closures_hooks_and_accumulation(comm):
    (plain, right), (model, optimizer) = both(comm, lr=0.01)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    for step in range(0, 9, 3):
        def closure():
            optimizer.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else contextlib.nullcontext():
                    loss = loss_of(model, comm, step + part)
                    loss.backward()
            return loss
        assert optimizer.step(closure).requires_grad
        right.zero_grad()
        for part in range(3):
            with plain.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(plain, comm, step + part).backward()
        right.step()
    assert called == ["before", "after"] * 3 and optimizer.state_dict()["more"] == 1
    assert_same(model.parameters(), plain.parameters())


def merged(states):
    """Return the nest in which each `Sliced` has the pieces of all ranks."""
    first, *others = states
    if isinstance(first, Sliced):
        return first.merged(others)
    if isinstance(first, dict):
        assert all(first.keys() == other.keys() for other in others)
        return {key: merged([state[key] for state in states]) for key in first}
    return first


def assert_bits(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["whole", "sliced"])
def test_training_goes_on_anywhere(comm, how):
    """Saved here, loaded by the optimizer itself, on one rank, and here again, before a step."""
    model = wrapped(comm)
    optimizer = adamw(model)
    train(model, optimizer, comm, range(3))
    weights = copy.deepcopy(model.state_dict())
    full = optimizer.state_dict()
    saved = full if how == "whole" else merged(
        comm.allgather_object(optimizer.sharded_state_dict()))
    bare = torch.optim.AdamW(Odd().parameters(), lr=0.5)
    bare.load_state_dict(copy.deepcopy(full))
    assert_bits(bare.state_dict(), full)
    alone = comm.split(comm.rank)
    for ranks in (comm, alone):
        other = wrapped(ranks)
        other.load_state_dict(weights)
        again = adamw(other, lr=0.5)
        again.load_state_dict(copy.deepcopy(saved))
        assert_bits(again.state_dict(), full)
        if ranks is comm:
            train(other, again, comm, range(3, 5))
            train(model, optimizer, comm, range(3, 5))
            assert_same(other.parameters(), model.parameters())
            again.load_state_dict(bare.state_dict())
            assert_bits(again.state_dict(), full)
    alone.close()
    root = optimizer.state_dict(root=comm.size - 1)
    assert (root is None) == (comm.rank < comm.size - 1)


def test_parameters_are_frozen_thawed_replaced_and_written(comm):
    """State follows; and is loaded by PyTorch's own."""
    (plain, right), (model, optimizer) = both(comm, lr=0.01)
    for step in range(9):
        for net in plain, model:
            net.module.first.requires_grad_(step not in (2, 3))
            net.module.filter.weight.requires_grad_(step != 3)
            if step == 5:
                with torch.no_grad():
                    net.module.last.weight.mul_(0.5)
                    net.module.first.bias.data = net.module.first.bias.data + 1
        train(plain, right, comm, [step])
        train(model, optimizer, comm, [step])
        assert_same(model.parameters(), plain.parameters())
        assert_bits(model.module.state_dict(), dict(model.module.named_parameters()))
        if step in (2, 3, 8):
            state, right_state = optimizer.state_dict(), right.state_dict()
            torch.testing.assert_close(state, right_state)
            again = merged(comm.allgather_object(optimizer.sharded_state_dict()))
            optimizer.load_state_dict(again)
            assert_bits(optimizer.state_dict(), state)
    model.module.last = nn.Linear(18, 3, bias=False)
    train(model, optimizer, comm, range(2))
    assert equal_on_all(model.parameters(), comm)
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.module.named_parameters()]
    assert state[names.index("scale")]["step"] == 11


def malformed(state):
    """Yield states that are none."""
    yield {**state, "param_groups": 3}
    yield {**state, "param_groups": [3]}
    yield {**state, "param_groups": [{}]}
    yield {**state, "param_groups": [{**state["param_groups"][0], "params": None}]}
    yield {**state, "param_groups": [{**state["param_groups"][0], "params": [[]] * 5}]}
    yield {**state, "state": 3}
    for key, x in ("exp_avg", torch.ones(2)), ("exp_avg", "x"), ("step", "x"), ("step", {}):
        yield {**state, "state": {**state["state"], 1: {**state["state"][1], key: x}}}
    yield {**state, "state": {**state["state"], 1: 3}}


@pytest.mark.parametrize("settings", [{}, {"overlap": True, "weights": "node"}])
def test_a_state_that_is_refused_leaves_no_trace(comm, settings):
    """Also where a rank alone has a slice that it does not fit, and gradients are there."""
    (plain, right), (model, optimizer) = both(comm, lr=0.01, sharded=settings)
    for pair in (plain, right), (model, optimizer):
        train(*pair, comm, range(2))
        pair[1].zero_grad()
    loss_of(plain, comm, 2).backward()
    loss_of(model, comm, 2).backward()
    before = copy.deepcopy(optimizer.state_dict())
    for bad in malformed(before):
        with pytest.raises(mpiring.ConfigError):
            optimizer.load_state_dict(bad)
    if comm.size > 1:
        # What one rank has saved is not all.
        with pytest.raises(mpiring.ConfigError, match="these pieces are not of all ranks; use"):
            optimizer.load_state_dict(comm.broadcast_object(
                optimizer.sharded_state_dict(), root=0))
        # Nor is what fits on this rank, but not on another.
        with pytest.raises(mpiring.ConfigError, match="lacks param_groups"):
            optimizer.load_state_dict(before if comm.rank else {})
    assert_bits(optimizer.state_dict(), before)
    right.step()
    optimizer.step()
    right.zero_grad()
    for pair in (plain, right), (model, optimizer):
        train(*pair, comm, range(3, 5))
    assert_same(model.parameters(), plain.parameters())


def test_what_is_saved_is_a_copy(comm):
    model = wrapped(comm)
    optimizer = adamw(model)
    train(model, optimizer, comm, [0])
    model.module.first.requires_grad_(False)
    train(model, optimizer, comm, [1])
    saved = optimizer.sharded_state_dict()
    for state in saved["state"].values():
        for x in state["exp_avg"].pieces.values():
            x[:] = 9
    after = optimizer.state_dict()
    assert not any((x == 9).any() for its in after["state"].values() for x in its.values())


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_that_is_raised_later(comm, momentum):
    """As by schedules; then parameters are frozen and thawed, and the state is loaded."""
    (plain, right), (model, optimizer) = both(comm, torch.optim.SGD, lr=0.1)
    for step in range(8):
        for opt in right, optimizer:
            for group in opt.param_groups:
                group["momentum"] = 0.9 if step else 0
        for net in plain, model:
            net.module.first.requires_grad_(step not in (2, 3))
        if step == 6:
            for opt in right, optimizer:
                state = copy.deepcopy(opt.state_dict())
                state["param_groups"][0]["momentum"] = momentum
                opt.load_state_dict(state)
        train(plain, right, comm, [step])
        train(model, optimizer, comm, [step])
        assert_same(model.parameters(), plain.parameters())
    state = optimizer.state_dict()
    optimizer.close()
    state["param_groups"][0]["momentum"] = 0.8
    again = Sharded(torch.optim.SGD, model, lr=0.1)
    again.load_state_dict(state)
    assert_bits(again.state_dict()["state"], state["state"])


@pytest.mark.parametrize(("dtype", "norm_dtype"), [
    (torch.float64, torch.float64), (torch.complex64, torch.float32),
    (torch.bfloat16, torch.float32)])
def test_norms_by_dtype(comm, dtype, norm_dtype):
    plain, model = (DataParallel(nn.Linear(5, 7, dtype=dtype), comm) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer = Sharded(torch.optim.SGD, model, lr=0.1)
    for norm_type in 2.0, 1.0, float("inf"):
        for net in plain, model:
            net.zero_grad()
            (net(torch.ones(3, 5, dtype=dtype)).abs().square().sum() * 3).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        norm = optimizer.clip_grad_norm_(0.5, norm_type)
        assert norm.dtype == norm_dtype
        torch.testing.assert_close(norm, wanted.to(norm_dtype), rtol=1e-2, atol=0)


def test_a_module_is_copied_without_hooks(comm):
    """A copy belongs to one rank: it waits for nobody, and may be used by itself."""
    model = wrapped(comm)
    train(model, adamw(model, overlap=True, weights="node"), comm, range(2))
    wanted = copy.deepcopy(model.state_dict())
    for again in copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module)):
        if comm.rank == 0:
            state = {name: x.clone() for name, x in again.state_dict().items()}
            assert_bits(state, wanted)
            again.load_state_dict({name: x + 1 for name, x in state.items()})
            again(torch.zeros(1, 6))
            pickle.loads(pickle.dumps(copy.deepcopy(again)))
        comm.barrier()
    assert_bits(model.state_dict(), wanted)


def test_a_graph_that_is_kept_does_not_survive_a_step(comm):
    model = wrapped(comm)
    optimizer = adamw(model)
    loss = loss_of(model, comm, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("make", [lambda: ErrorFeedback(Cast("bfloat16")), Int8])
def test_slices_are_exchanged_by_reducers(make):
    config = mpiring.Config(shared_memory=False, tuning=False, digest_steps=1)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as apart:
        plain, model = (wrapped(apart, reducer=make()) for _ in range(2))
        right, optimizer = torch.optim.SGD(plain.parameters(), lr=0.1), Sharded(
            torch.optim.SGD, model, lr=0.1)
        train(plain, right, apart, range(6))
        train(model, optimizer, apart, range(6))
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
        assert equal_on_all(model.parameters(), apart)


def test_ranks_without_a_slice_and_parameters_without_a_gradient(comm):
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(n)) for n in ((), 2))

        def forward(self, which):
            return self.a * 2 if which else self.b.sum()

    model = DataParallel(Choice(), comm, find_unused_parameters=True)
    optimizer, scaler = adamw(model, weight_decay=0.0), torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad in (True, False):
        loss = model(True) * (torch.nan if bad and comm.rank == 0 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(10.0)
        assert torch.isnan(norm) if bad else float(norm) == 2
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 1.0
        assert (model.module.a.item() == 1) == bad and model.module.b.tolist() == [1, 1]
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert sum(bool(group["params"]) for group in optimizer.param_groups) == 1


def test_weights_are_written_between_steps(comm):
    """On all ranks, or on one of them where what follows makes them equal."""
    model = wrapped(comm)
    optimizer = adamw(model)
    for step in range(3):
        with torch.no_grad():
            if step == 1:
                model.module.scale.mul_(2)
                model.module.last.weight.data = torch.ones(3, 18)
            if step == 2 and comm.rank == 0:
                model.module.filter.weight.zero_()
        broadcast_parameters(model.module.filter.parameters(), comm)
        train(model, optimizer, comm, [step])
    assert equal_on_all(model.parameters(), comm)


def test_digests_compare_weights(comm):
    config = mpiring.Config(digest_steps=1, tuning=False)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as checked:
        model = wrapped(checked)
        optimizer = adamw(model)
        train(model, optimizer, checked, range(3))
        if checked.size > 1:
            with torch.no_grad():
                model.module.scale += checked.rank == 0
            loss_of(model, checked, 3).backward()
            with pytest.raises(mpiring.ReplicaError, match="scale"):
                optimizer.step()


class Norms(torch.optim.Optimizer):
    """Scales each update by the norm of the whole gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


class Signs(Norms):
    """Treats each element for itself, and remembers a number."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", 0) + p.grad
                    p -= group["lr"] / state["count"] * state["sum"].sign()


class Begun(Signs):
    """Makes its state when it is constructed, as Adagrad does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(count=0, sum=torch.full_like(p, 0.01))

    def step(self, closure=None):
        assert all(self.state[p] for group in self.param_groups for p in group["params"])
        super().step(closure)


class Counts(Signs):
    """Counts its steps in an attribute, by which its rate falls; and, as asked, in another way."""

    def __init__(self, params, lr=0.1, how=0):
        super().__init__(params, lr)
        self.steps, self.other, self.kept = [0], how, [p for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        self.steps[0] += 1
        self.other = self.other + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] / self.steps[0] * p.grad


@pytest.mark.parametrize("make", [Signs, Begun, Counts])
def test_a_class_of_the_users_own(comm, make):
    (plain, right), (model, optimizer) = both(comm, make, lr=0.01)
    for step in range(6):
        for net in plain, model:
            net.module.first.requires_grad_(step not in (2, 3))
        for pair in (plain, right), (model, optimizer):
            train(*pair, comm, [step])
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        assert_same(model.parameters(), plain.parameters())
    assert optimizer.state_dict()["state"] == {} or (
        optimizer.state_dict()["state"][0]["count"] == 6)


def test_mistakes_are_explained(comm):
    model = wrapped(comm)
    parameters = list(model.parameters())
    for mistake, told in (
            (lambda: Sharded(torch.optim.LBFGS, model), "LBFGS cannot be sharded: it takes the gr"),
            (lambda: Sharded(torch.optim.Adafactor, model), "sums over rows and columns"),
            (lambda: Sharded(torch.optim.SparseAdam, model), "sparse gradients"),
            (lambda: Sharded(Counts, model, how=torch.zeros(2)),
             r"change its attribute other=\[tensor\(.*; keep numbers there, and tensors in"),
            (lambda: adamw(model, weights="both"), "weights='both': expected 'rank'"),
            (lambda: Sharded(Norms, model), "Norms cannot be sharded: a tensor became another"),
            (lambda: Sharded(torch.optim.SGD([torch.ones(1)]), model), "pass a class and its set"),
            (lambda: Sharded("adamw", model), "optimizer_class is 'adamw'; pass a class"),
            (lambda: adamw(model.module), "model is a Odd; pass the mpiring.torch.DataParallel"),
            (lambda: adamw(model.parameters()), "a generator; pass .* itself, as in Sharded"),
            (lambda: adamw(model, params=parameters[:-1]), "filter.weight: trained, but in no "),
            (lambda: adamw(model, params=[*parameters, parameters[0]]), "scale is twice in the gr"),
            (lambda: adamw(model, params=[*parameters, torch.ones(3)]), "shape .3,. in a group of"),
            (lambda: adamw(model, params=[{"lr": 1}]), "a group of parameters is a dict; expected"),
            (lambda: adamw(model, params=parameters[0]), "params is a Parameter; pass a list"),
            (lambda: adamw(DataParallel(Odd(), comm, defer_wait=True)), "leave out defer_wait"),
            (lambda: adamw(DataParallel(nn.Embedding(9, 3, sparse=True), comm)),
             "gradients of weight are sparse, and cannot be cut into slices"),
            (lambda: adamw(DataParallel(Odd().requires_grad_(False), comm)), "no parameter of the"),
    ):
        with pytest.raises(mpiring.ConfigError, match=told):
            mistake()
    optimizer = adamw(model)
    train(model, optimizer, comm, [0])
    saved = optimizer.sharded_state_dict()
    plain, with_momentum = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
                            for net in (model, Odd()))
    for p in with_momentum.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with_momentum.step()
    of_sgd = with_momentum.state_dict()
    loss_of(model, comm, 0).backward()
    for mistake, error, told in (
            (lambda: adamw(model), mpiring.ConfigError, "has a Sharded optimizer already"),
            (plain.step, mpiring.ConfigError, " SGD is to update parameters of a model that has"),
            (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), mpiring.GradientError,
             "in slices, one per rank .Sharded.: clip with optimizer.clip_grad_norm_"),
            (lambda: nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 1.0),
             mpiring.GradientError, "norm of a gradient that is in slices"),
            (lambda: model.module.scale.grad.mul_(2), mpiring.GradientError, "mul_ of a gradient"),
            (lambda: loss_of(model, comm, 0).backward(), mpiring.GradientError,
             r"a second backward pass, without step\(\) or zero_grad\(\).*no_sync"),
            (lambda: optimizer.add_param_group({"params": [torch.ones(3)]}), mpiring.ConfigError,
             "add_param_group on a Sharded"),
            (lambda: copy.deepcopy(optimizer), mpiring.ConfigError, "cannot be pickled or copied"),
            (lambda: optimizer.clip_grad_norm_(-1), mpiring.ConfigError, "max_norm=-1: expected"),
            (lambda: optimizer.grad_norm(0), mpiring.ConfigError, "norm_type=0: expected a number"),
            (lambda: model.join().__enter__(), mpiring.ConfigError, "join.. with a Sharded opt"),
            (lambda: optimizer.load_state_dict(torch.optim.SGD([torch.ones(1)]).state_dict()),
             mpiring.ConfigError, r"with \[1\] parameters, but this optimizer's have \[5\]"),
            (lambda: optimizer.load_state_dict(of_sgd), mpiring.ConfigError,
             "the state of scale has 'momentum_buffer', which AdamW|first.weight has 'momentum_"),
            (lambda: torch.optim.AdamW(model.parameters()).load_state_dict(saved),
             mpiring.ConfigError, r"a sliced tensor .* instead of .*mpiring.torch.whole"),
    ):
        with pytest.raises(error, match=told):
            mistake()
    optimizer.step()
    for mistake in (optimizer.step, optimizer.grad_norm, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(mpiring.GradientError, match="without new gradients: each step takes"):
            mistake()
    loss_of(model, comm, 0).backward()
    model.module.scale.grad = None
    with pytest.raises(mpiring.GradientError, match="after the gradients of scale were dropped or"):
        optimizer.step()
    model.zero_grad()
    loss_of(model, comm, 0).backward()
    optimizer.zero_grad()
    model.module.scale.data = torch.ones(3)
    with pytest.raises((mpiring.ConfigError, RuntimeError)):
        loss_of(model, comm, 0).backward()
        optimizer.step()


def test_another_optimizer_after_it(comm):
    plain, model = wrapped(comm), wrapped(comm)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), comm, range(2))
    optimizer = adamw(model)
    train(model, optimizer, comm, range(2))
    optimizer.close()
    for net in plain, model:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), comm, range(2))
    assert_same(model.parameters(), plain.parameters())
    # No forward pass has seen it.
    model.module.first.requires_grad_(False)
    last = adamw(model, params=[p for p in model.parameters() if p.requires_grad])
    train(model, last, comm, range(2))
    model.module.first.requires_grad_(True)
    with pytest.raises(mpiring.ConfigError, match="first.bias, first.weight: trained, but in no"):
        loss_of(model, comm, 0).backward()
    last.close()
    train(model, adamw(model), comm, range(2))
    assert equal_on_all(model.parameters(), comm)
    with pytest.raises(mpiring.GradientError, match="without new gradients"):
        optimizer.step()


def test_an_optimizer_is_closed_while_all_parameters_are_frozen(comm):
    model = wrapped(comm)
    optimizer = adamw(model)
    train(model, optimizer, comm, range(1))
    model.requires_grad_(False)
    loss_of(model, comm, 0)
    optimizer.close()
    model.requires_grad_(True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, range(1))
    assert equal_on_all(model.parameters(), comm)


@pytest.mark.parametrize("settings", [{}, {"overlap": True}])
def test_optimizers_of_mpiring(comm, settings):
    """Those that look at norms of whole tensors, too; as they update a NumPy model."""
    def net():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))

    plain, model = (DataParallel(net(), comm, bucket_bytes=300) for _ in range(2))
    groups = [{"params": [*model.module[2].parameters()], "lr": 0.02},
              {"params": [*model.module[0].parameters()]}]
    given = {"lr": 0.01, "no_decay": ("*bias",), "weight_decay": 0.1}
    optimizer = Sharded(mpiring.optim.LAMB, model, groups, **given, **settings)
    alone = comm.split(comm.rank)
    weights = {name: p.detach().numpy() for name, p in plain.module.named_parameters()}
    dp = mpiring.numpy.DataParallel(weights, alone)
    right = mpiring.optim.LAMB(dp, **given, groups={"2.*": {"lr": 0.02}})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        for wrapped_net in plain, model:
            wrapped_net.zero_grad()
            loss_of(wrapped_net, comm, step).backward()
        optimizer.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if step == 2:
            saved = merged(comm.allgather_object(optimizer.sharded_state_dict()))
            again = optimizer.state_dict()
            optimizer.load_state_dict(again)
            optimizer.load_state_dict(saved)
        optimizer.step()
        schedule.step()
        for name, p in plain.module.named_parameters():
            dp.grads[name][...] = p.grad
            dp.ready(name)
        for name, its in right.settings.items():
            its["lr"] = (0.02 if name[0] == "2" else 0.01) / (1 + step)
        right.step()
        assert_same(model.parameters(), plain.parameters())
    assert equal_on_all(model.parameters(), comm)
    assert optimizer.state_dict()["steps"] == 4
    alone.close()
    model.module[0].requires_grad_(False)
    with pytest.raises(mpiring.ConfigError, match="frozen, thawed or replaced, which LAMB cannot"):
        loss_of(model, comm, 0).backward()
    with pytest.raises(mpiring.ConfigError, match="LAMB in a Sharded optimizer updates parameters"):
        Sharded(mpiring.optim.LAMB, wrapped(comm))
