"""Tests that collective calls on PyTorch's objects compare values: one odd rank fails on all."""

from functools import partial

import pytest
from differing import SKIPPED, Row, cases, check, in_turn, rows_of
from launching import needed

torch = needed("torch")
from mpiring.optim import SGD  # noqa: E402
from mpiring.reducers import PowerSGD  # noqa: E402
from mpiring.torch import (  # noqa: E402
    AsyncDataParallel, DataParallel, DiLoCo, DistributedSampler, LocalSGD, Sharded,
    broadcast_optimizer_state, broadcast_parameters,
)

pytestmark = pytest.mark.mpi


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def wrapped(comm, **options):
    return DataParallel(module(), comm, **options)


def on_module(kind, **more):
    """Return a function that makes an object of a class for a module on a communicator."""
    return lambda comm, **options: kind(module(), comm, **{**more, **options})


def sharded(comm, kind=torch.optim.SGD, **options):
    """Return a Sharded optimizer that has made a step, with gradients for the next one."""
    model = wrapped(comm)
    optimizer = Sharded(kind, model, **{"lr": 0.5, "momentum": 0.5, **options})
    for _ in range(2):
        if optimizer._has_new_gradients:
            optimizer.step()
        model(torch.ones(5, 3)).square().sum().backward()
    return optimizer


def groups(model, orders):
    """Return groups of a model's parameters: each a list of their numbers."""
    parameters = list(model.parameters())
    return [{"params": [parameters[i] for i in order], "lr": lr}
            for order, lr in zip(orders, (0.5, 0.25))]


def with_groups(model, params):
    return Sharded(torch.optim.SGD, model, groups(model, params), lr=0.1)


def stepping(optimizer, *, writes=0, **settings):
    """Take a step with settings of the last group, after this rank alone may have written."""
    optimizer.param_groups[-1].update(settings)
    with torch.no_grad():
        for p in list(optimizer._model.parameters())[:writes]:
            p.mul_(2)
    optimizer.step()


def sharded_in_groups(comm):
    model = wrapped(comm)
    optimizer = Sharded(torch.optim.AdamW, model, groups(model, [[0, 1], [2, 3]]))
    model(torch.ones(1, 3)).sum().backward()
    return optimizer


def grown(state):
    """Return a state in which the first tensor's first element is greater by 1."""
    number = min(state["state"])
    moved = {key: x + 1 if isinstance(x, torch.Tensor) and x.dim() else x
             for key, x in state["state"][number].items()}
    return {**state, "state": {**state["state"], number: moved}}


def other_rate(state):
    return {**state, "param_groups": [{**group, "lr": 0.125} for group in state["param_groups"]]}


def loading(name, make, grows=grown):
    """Return the row of a `load_state_dict`."""
    def make_both(comm):
        optimizer = make(comm)
        return optimizer, optimizer.state_dict()

    return Row(f"{name}.load_state_dict", lambda both, how: both[0].load_state_dict(how(both[1])),
               {"how": lambda state: state},
               {"value": ({"how": grows}, r"\[0(, 0)?\]="), "rate": ({"how": other_rate}, "lr"),
                "type": ({"how": lambda state: 3}, "int"),
                "missing": ({"how": lambda state: {}}, "lacks|param_groups")},
               make_both, "Sharded")


def training(comm, steps=0, **settings):
    """Return a model that has taken steps, and an optimizer of each of its layers."""
    model = wrapped(comm, **settings)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.module]
    for _ in range(steps):
        step(model, optimizers)
    return model, optimizers


def step(model, optimizers, backward=True):
    model.zero_grad()
    loss = model(torch.ones(2, 3)).sum()
    if backward:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def two_optimizers(comm, root=0):
    optimizer = torch.optim.SGD(module().parameters(), lr=0.5)
    broadcast_optimizer_state(optimizer, comm, root=root)


def passed(comm):
    """Return a model whose gradients are in flight."""
    model = DataParallel(torch.nn.Sequential(module(), torch.nn.BatchNorm1d(2)), comm,
                         defer_wait=True)
    model(torch.rand(5, 3)).sum().backward()
    return model


def both_losses(pair, order):
    sum(pair[i](torch.ones(2, 3)).sum() for i in order).backward()


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


def frozen(model):
    model.module[0].requires_grad_(False)
    model(torch.ones(1, 3))


ROWS = [
    Row("two models, one loss", both_losses, {"order": (0, 1)},
        {"order": ({"order": (1, 0)}, r"step 0 of model 2 bucket 0.*step 0 bucket 0|"
                                      r"step 0 bucket 0.*step 0 of model 2 bucket 0")},
        lambda comm: [wrapped(comm), wrapped(comm)]),
    in_turn("backward", wrapped, backward),
    in_turn("compressed", lambda comm: wrapped(comm, reducer=PowerSGD(1)), backward),
    in_turn("sparse", lambda comm: DataParallel(torch.nn.Embedding(5, 2, sparse=True), comm),
            lambda model: model(torch.arange(2)).sum().backward()),
    in_turn("weigh", wrapped, lambda model: (model.weigh(3), backward(model)),
            told="weigh.*of model 2"),
    in_turn("buffers", passed, lambda model: model.synchronize()),
    in_turn("freezing", wrapped, frozen, told="model='of model 2'"),
    in_turn("compare_replicas", wrapped, lambda model: model.compare_replicas()),
    in_turn("Sharded.step", sharded, lambda optimizer: optimizer.step()),
    in_turn("Sharded.grad_norm", sharded, lambda optimizer: optimizer.grad_norm()),
    *rows_of("DataParallel", wrapped, {
        "bucket_bytes": (1000, 2000, "a"), "reducer": ({}, None, 3),
        "find_unused_parameters": (True, False, "no"), "broadcast_buffers": (False, True, "no"),
        "deterministic": (True, False, "no"), "defer_wait": (True, False, "no"),
        "order": ([], None, 3), "autotune": (False, True, "no")}, label="DataParallel"),
    Row("DataParallel(module)", lambda comm, width: DataParallel(torch.nn.Linear(width, 3), comm),
        {"width": 4}, {"value": ({"width": 5}, r"DataParallel has tensors\[0\]='weight "
                                 r"torch.float32 \(3, [45]\)', but on rank 0 it is 'weight")}),
    *[Row(f"step {steps} with {settings}",
          lambda run, backward: (step(*run, backward=backward), step(*run)), {"backward": True},
          {"skipped": ({"backward": False}, rf"in step {steps} \({2 + 2 * (steps > 0)} optimizer "
                       r"steps since its last averaged backward pass\) bucket 0")},
          make=partial(training, steps=steps, **settings))
      for steps in (0, 3) for settings in ({}, {"defer_wait": True})],
    *rows_of("Sharded", partial(Sharded, torch.optim.AdamW), {
        "lr": (0.5, 0.25, "a"), "weight_decay": (0.5, 0.25, "a"),
        "overlap": (True, False, "no"), "weights": ("node", "rank", 3)},
        make=wrapped, label="Sharded"),
    Row("Sharded(optimizer_class)", lambda model, kind: Sharded(kind, model, lr=0.5),
        {"kind": torch.optim.AdamW},
        {"value": ({"kind": torch.optim.Adam}, "Adam"), "type": ({"kind": 3}, "3|int")},
        make=wrapped),
    Row("Sharded(params)", with_groups, {"params": [[0, 1], [2, 3]]},
        {"members": ({"params": [[0, 2], [1, 3]]}, "0.bias|0.weight|1.weight"),
         "order": ({"params": [[1, 0], [2, 3]]}, "0.bias|0.weight"),
         "groups": ({"params": [[2, 3], [0, 1]]}, "0.bias|0.weight|1.weight"),
         "missing": ({"params": [[0, 1]]}, "1.weight")}, make=wrapped),
    *[row for kind, name in ((torch.optim.SGD, "Sharded"), (SGD, "Sharded(mpiring.optim)"))
      for row in (
        Row(f"{name}.step", stepping, {"lr": 0.5},
            {"value": ({"lr": 0.25}, r"lr=0\.25.*lr=0\.5|lr=0\.5.*lr=0\.25")},
            make=partial(sharded, kind=kind), label="weights|updated|step"),
        Row(f"{name}.clip_grad_norm_",
            lambda optimizer, **options: optimizer.clip_grad_norm_(**options),
            {"max_norm": 8.0, "norm_type": 3.0, "error_if_nonfinite": False},
            {"value": ({"max_norm": 0.8}, "max_norm=8.*max_norm=0.8|max_norm=0.8.*max_norm=8"),
             "type": ({"max_norm": "a"}, "max_norm"),
             "norm type": ({"norm_type": 1.0}, "norm_type=3.*norm_type=1|norm_type=1.*norm_type=3"),
             "whether it raises": ({"error_if_nonfinite": True}, "error_if_nonfinite"),
             "missing": ({"norm_type": SKIPPED}, "norm_type")},
            make=partial(sharded, kind=kind), label="allreduce"))],
    # The text of AdamW's settings is longer than what is compared: rates come first.
    Row("Sharded(groups).step", stepping, {"lr": 0.1, "weight_decay": 0.5, "writes": 0},
        {"rate": ({"lr": 0.2}, r"lr=\[0.5, 0.[12]\].* rank . .*; give param_groups the same"),
         "decay": ({"weight_decay": 0.25}, r"weight_decay=\[0.01, 0.(5|25)\].* rank . .*decay"),
         "write": ({"writes": 1}, r"after writes outside of writing_weights\(\) to 0.weight;")},
        make=sharded_in_groups),
    Row("Sharded.state_dict", lambda optimizer, root: optimizer.state_dict(root=root), {"root": 1},
        {"value": ({"root": 0}, "root=0, but on rank 0 it is 1")}, make=sharded),
    loading("Sharded", sharded),
    loading("Sharded(node)", partial(sharded, weights="node")),
    *rows_of("broadcast_parameters",
             lambda comm, **options: broadcast_parameters(module().parameters(), comm, **options),
             {"root": (1, 0, "a")}, label="broadcast_parameters"),
    Row("broadcast_parameters(tensors)",
        lambda comm, tensors: broadcast_parameters(tensors, comm),
        {"tensors": [torch.zeros(2, 3)]},
        {"shape": ({"tensors": [torch.zeros(3, 2)]}, r"\(3, 2\).*\(2, 3\)"),
         "dtype": ({"tensors": [torch.zeros(2, 3, dtype=torch.int32)]}, "int32.*float32"),
         "type": ({"tensors": [3]}, "got a int")}),
    *rows_of("broadcast_optimizer_state", two_optimizers, {"root": (1, 0, "a")},
             label="broadcast_optimizer_state"),
    *rows_of("DistributedSampler", lambda comm, dataset=range(8), **options: DistributedSampler(
        dataset, comm, **options), {
            "seed": (4, 3, "a"), "shuffle": (False, True, "no"), "drop_last": (True, False, "no"),
            "pad": (False, True, "no")}, label="DistributedSampler"),
    Row("DistributedSampler(dataset)", lambda comm, dataset: DistributedSampler(dataset, comm),
        {"dataset": range(8)},
        {"value": ({"dataset": range(9)}, "length=9, but on rank 0 it is 8"),
         "type": ({"dataset": 3}, "dataset is a int")}),
    *rows_of("LocalSGD", on_module(LocalSGD), {"every": (4, 3, "a"), "start": (1, 2, "a")},
             label="LocalSGD|the model"),
    *rows_of("DiLoCo", on_module(DiLoCo, every=4), {
        "lr": (0.5, 0.25, "a"), "momentum": (0.5, 0.25, "a"), "delay": (2, 1, "a")},
        label="DiLoCo|the model"),
    *rows_of("AsyncDataParallel", on_module(AsyncDataParallel, optimizer=SGD), {
        "staleness": (3, 2, "a"), "damped": (False, True, "no")},
        label="cores|the model"),
]
CASES = cases(ROWS)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_one_odd_rank_is_an_error_on_all(comm, case):
    check(comm, *CASES[case][1:])


def test_ranks_may_take_steps_without_the_others_where_nothing_is_averaged(comm):
    model, optimizers = training(comm, 2)
    with model.no_sync():
        for _ in range(comm.rank):
            step(model, optimizers)
    step(model, optimizers)
    with model.no_sync():
        for _ in range(comm.rank):
            model(torch.ones(2, 3)).sum().backward()
    for _ in range(comm.rank):
        optimizers[0].step()
    with model.join():
        for _ in range(1 + comm.rank):
            step(model, optimizers)
    step(model, optimizers)
