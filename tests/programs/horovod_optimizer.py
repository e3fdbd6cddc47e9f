"""Trains with Horovod's DistributedOptimizer, and compares with one process; run by mpirun."""

import functools
import gc
import warnings

import numpy as np
import torch
from torch import nn

from mpiring.errors import BufferMismatchError, GradientError
from mpiring.horovod.compression import Compression
from mpiring.horovod.ops import Adasum, Max, Min, Product, Sum
from mpiring.horovod.process_sets import ProcessSet
from mpiring.horovod.torch.optimizer import DistributedOptimizer
from mpiring.horovod.world import global_process_set, init, rank, shutdown, size
from mpiring.reducers import PowerSGD
from mpiring.torch import gradients

PAIR = ProcessSet([0, 2])
init(process_sets=[PAIR])
RANK, SIZE = rank(), size()
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(),
                         nn.Linear(20, 1))


def distributed(model, plain=SGD, **settings):
    return DistributedOptimizer(plain(model.parameters()), model.named_parameters(), **settings)


def loss_of(model, step, of_rank=RANK):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + of_rank))
    return (model(x) - x[:, :1] * x[:, 1:2]).square().mean()


def alone(ranks=range(SIZE), passes=1, factor=1.0, change=lambda parameters: None, steps=4):
    """Return what one process makes of the data of some ranks."""
    model = net()
    optimizer = SGD(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            losses = [loss_of(model, passes * step + i, each) for each in ranks]
            (factor * sum(losses) / len(losses)).backward()
        change(model.parameters())
        optimizer.step()
    return model


def together(model, optimizer, passes=1):
    for step in range(4):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, passes * step + i).backward()
        optimizer.step()
    return model


def same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text: f"{name}: {text}")


def refuses(kind, text, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


def settings_train_as_one_process():
    for settings in ({}, {"op": Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2},
                     {"compression": Compression.fp16, "op": Sum}, {"compression": PowerSGD(2)}):
        model = net()
        optimizer = distributed(model, **settings)
        assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
        same(together(model, optimizer), alone(factor=SIZE if "op" in settings else 1))
    model = net()
    optimizer = distributed(model, groups=[[model[0].weight, model[4].bias], [model[2].bias]],
                            compression=Compression.fp16, backward_passes_per_step=3)
    same(together(model, optimizer, 3), alone(passes=3))
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    together(model, optimizer)


def other_ops_combine_elements():
    for op, combine in ((Min, np.min), (Max, np.max), (Product, np.prod)):
        p = nn.Parameter(torch.zeros(3))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], 1.0), op=op)
        for _ in range(2):
            optimizer.zero_grad()
            (p * (RANK + 2)).sum().backward()
            optimizer.synchronize()
            assert p.grad.tolist() == 3 * [combine(np.arange(SIZE) + 2.0)]


def gradients_are_clipped_between():
    model = net()
    optimizer = distributed(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        clip(model.parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
    same(model, alone(change=clip))


def scaled_step(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def step_without_synchronize(optimizer):
    with optimizer.skip_synchronize():
        optimizer.step()


# Changes of a gradient between backward and step. An optimizer has averaged the view before.
CHANGES = {
    "multiplied": lambda p, optimizer, view: p.grad.mul_(0.5),
    "data": lambda p, optimizer, view: p.grad.data.mul_(0.5),
    "numpy": lambda p, optimizer, view: np.multiply(p.grad.numpy(), 0.5, out=p.grad.numpy()),
    "foreach": lambda p, optimizer, view: torch._foreach_mul_([p.grad], 0.5),
    "clipped": lambda p, optimizer, view: clip([p]),
    "clipped by value": lambda p, optimizer, view: nn.utils.clip_grad_value_([p], 0.1),
    "GradScaler": lambda p, optimizer, view: scaled_step(optimizer),
    "halved": lambda p, optimizer, view: setattr(p, "grad", p.grad * 0.5),
    "replaced": lambda p, optimizer, view: setattr(p, "grad", torch.ones_like(p)),
    "data replaced": lambda p, optimizer, view: setattr(p.grad, "data", torch.ones_like(p)),
    "dropped": lambda p, optimizer, view: setattr(p, "grad", None),
    "zeroed": lambda p, optimizer, view: nn.ParameterList([p]).zero_grad(set_to_none=False),
    "former view": lambda p, optimizer, view: view.mul_(0.5),
    "used": lambda p, optimizer, view: step_without_synchronize(optimizer)}


def gradients_are_withheld_until_they_are_averaged():
    """In each step, on one node and on several, where gradients are in flight."""
    fills_node = gradients.fill_only_node
    for sends_early in (False, True):
        gradients.fill_only_node = lambda comm: fills_node(comm) and not sends_early
        for name, change in CHANGES.items():
            model = net()
            optimizer = distributed(model)
            for step in range(3):
                view = model[4].bias.grad
                optimizer.zero_grad()
                loss_of(model, step).backward()

                own = model[4].bias.grad
                if sends_early and step:
                    refuses(GradientError, "sum of the gradient of 4.bias", own.sum)
                else:
                    torch.testing.assert_close(own + 0, *torch.autograd.grad(
                        loss_of(model, step), [model[4].bias]))

                def change_and_step():
                    change(model[4].bias, optimizer, view)
                    optimizer.step()

                if view is not None or name != "former view":
                    refuses(GradientError, "call optimizer.synchronize() before", change_and_step)
                optimizer.step()
            if name in ("halved", "replaced", "dropped"):
                weights = [p.tolist() for p in model.parameters()]
                assert global_process_set.comm.allgather_object(weights) == SIZE * [weights]
            elif name != "former view":
                same(model, alone(steps=3))
    gradients.fill_only_node = fills_node


def gradients_return_without_the_optimizer():
    model = net()
    optimizer = distributed(model)
    loss_of(model, 0).backward()
    refuses(GradientError, "clamp_ of the gradient of 0.bias", model[0].bias.grad.clamp_, 0)
    del optimizer
    gc.collect()
    torch.testing.assert_close(
        model[0].bias.grad, *torch.autograd.grad(loss_of(model, 0), [model[0].bias]))


def ranks_reach_different_parameters():
    """As in a model with branches; the losses of a step come in several passes."""
    model, other = ([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)] for _ in range(2))
    for layer, layer_alone in zip(model, other):
        layer.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
        layer_alone.load_state_dict(layer.state_dict())
    parameters = nn.ModuleList(model).parameters
    optimizer = DistributedOptimizer(SGD(parameters()))
    plain = SGD(nn.ModuleList(other).parameters())
    x = torch.ones(1, 2)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad(set_to_none=False)
        for layer in [model[0], model[1 + RANK % 2]][::(-1) ** RANK]:
            layer(x).square().sum().backward()
        for each in range(SIZE):
            (sum(other[i](x).square().sum() for i in (0, 1 + each % 2)) / SIZE).backward()
        optimizer.step()
        plain.step()
    same(nn.ModuleList(model), nn.ModuleList(other))


def sparse_gradients_stay_sparse():
    for settings in {}, {"sparse_as_dense": True}, {"op": Sum}, {"op": Max}:
        sparse, dense = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)
        dense.load_state_dict(sparse.state_dict())
        for model in sparse, dense:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **settings)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.tensor([RANK, RANK, 5])).square().sum().backward()
                optimizer.step()
            assert model.weight.grad.is_sparse == (model is sparse)
        same(sparse, dense)


def a_process_set_trains_alone():
    model = net()
    optimizer = distributed(model, process_set=PAIR)
    same(together(model, optimizer), alone([0, 2] if RANK != 1 else [1]))
    assert optimizer.process_set is PAIR


def two_optimizers_train_in_turn():
    """As those of a generator and a discriminator, whose parameters are frozen in turn."""
    models = [nn.Linear(3, 3), nn.Linear(3, 1)]
    for model in models:
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
    optimizers = [distributed(model) for model in models]
    for step in range(6):
        for i, model in enumerate(models):
            model.requires_grad_(step % 2 == i)
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](models[0](torch.full((1, 3), RANK + 1.0))).sum().backward()
        for i, model in enumerate(models):
            for p in model.parameters():
                assert (p.grad is not None and bool(p.grad.max() != 0)) == (step % 2 == i)
        optimizers[step % 2].step()
    weights = [p.tolist() for model in models for p in model.parameters()]
    assert global_process_set.comm.allgather_object(weights) == SIZE * [weights]


def optimizers_use_communicators_again():
    def trained():
        model = net()
        optimizer = distributed(model)
        same(together(model, optimizer), alone())
        return model, optimizer

    # One rank keeps an optimizer, so that the others must not use its communicator.
    kept = trained()
    if RANK:
        del kept
    trained()
    lender = global_process_set.lender
    number = len(lender)
    for _ in range(3):
        trained()
    assert len(lender) == number
    # One is dropped with operations in flight, and its communicator remains unused.
    kept = trained()
    loss_of(kept[0], 0).backward()
    del kept
    trained()
    trained()
    assert len(lender) <= number + 1


def parameters_come_later():
    model, plain = net(), net()
    for each in model, plain:
        each[0].requires_grad_(False)
    optimizer = distributed(model)
    optimizer_alone = SGD(plain.parameters())
    for step in range(6):
        if step == 2:
            for each in model, plain:
                each[0].requires_grad_(True)
        if step == 4:
            for each, its in (model, optimizer), (plain, optimizer_alone):
                each.append(nn.Linear(1, 1))
                nn.init.constant_(each[-1].weight, 1.0)
                nn.init.constant_(each[-1].bias, 0.0)
                its.add_param_group({"params": each[-1].parameters()})
        optimizer.zero_grad()
        optimizer_alone.zero_grad()
        loss_of(model, step).backward()
        (sum(loss_of(plain, step, each) for each in range(SIZE)) / SIZE).backward()
        optimizer.step()
        optimizer_alone.step()
    same(model, plain)


def what_users_wrap_around_works():
    """Schedulers, GradScaler, closures, hooks of optimizers, states."""
    model = net()
    calls = []
    plain = SGD(model.parameters())
    plain.register_step_pre_hook(lambda *_: calls.append("before"))
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025 and len(calls) == 4
    other = net()
    again = distributed(other)
    if RANK == 0:
        # Not collective.
        again.load_state_dict(optimizer.state_dict())
        assert len(again.state) == 6

    def closure():
        again.zero_grad()
        loss = loss_of(other, 7)
        loss.backward()
        return loss

    assert again.step(closure) == loss_of(net(), 7)
    super(type(again), again).step()
    weights = other[0].weight.grad.tolist()
    assert global_process_set.comm.allgather_object(weights) == SIZE * [weights]


def wrong_use_is_refused():
    model = net()
    named = list(model.named_parameters())
    plain = SGD(model.parameters())
    for text, settings in {
            "sequence of tuples": {"named_parameters": model.parameters()},
            "Found duplicates: 0.weight": {"named_parameters": [*named, named[0]]},
            "were not named": {"named_parameters": named[1:]},
            "not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": Sum},
            "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
            "groups should be": {"groups": 0}, "must consist of torch.Tensor": {"groups": [[1]]},
            "only appear once": {"groups": 2 * [[model[0].weight]]},
            "pass Compression.none": {"compression": Compression}, "op=7": {"op": 7}}.items():
        refuses(ValueError, text, DistributedOptimizer, plain, **settings)
    optimizer = distributed(model)
    loss_of(model, 0).backward()
    refuses(AssertionError, "zero_grad() was called", optimizer.zero_grad)
    refuses(AssertionError, "Increase backward_passes_per_step", loss_of(model, 0).backward)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(each.message)[:23] for each in caught] == ["optimizer.step() called"]
    model[0].requires_grad_(RANK != 1)
    refuses(BufferMismatchError, "freeze the same parameters", distributed(model).synchronize)


def adasum_combines_steps():
    """Equal changes count once, and orthogonal ones add up."""
    for passes in 1, 2:
        p = nn.Parameter(torch.ones(4))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], 0.5), [("p", p)], op=Adasum,
                                         process_set=PAIR, backward_passes_per_step=passes)
        for step in range(2):
            for _ in range(passes):
                (p[RANK] if step else p[3]).backward()
            if RANK != 1:
                refuses(AssertionError, "zero_grad() was called", optimizer.zero_grad)
            refuses(AssertionError, "Skipping synchronization", optimizer.skip_synchronize)
            optimizer.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        changes = [0.0, 1, 0, 1] if RANK == 1 else [1.0, 0, 1, 1]
        torch.testing.assert_close(p.detach(), 1 - 0.5 * passes * torch.tensor(changes))


for case in (settings_train_as_one_process, other_ops_combine_elements,
             gradients_are_clipped_between, gradients_are_withheld_until_they_are_averaged,
             gradients_return_without_the_optimizer, ranks_reach_different_parameters,
             sparse_gradients_stay_sparse, a_process_set_trains_alone,
             two_optimizers_train_in_turn, optimizers_use_communicators_again,
             parameters_come_later, what_users_wrap_around_works, wrong_use_is_refused,
             adasum_combines_steps):
    case()
    if RANK == 0:
        print(f"holds: {case.__name__}", flush=True)
shutdown()
print("all is well", flush=True)
