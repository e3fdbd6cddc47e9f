"""Tries what mpiring.torch can do, one ability after the other; prints the name of each.

On the CPU, or on a GPU; see whereabouts.
"""

import collections
import contextlib
import copy
import functools
import logging
import os
import pickle
import tracemalloc
import warnings
import weakref

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from whereabouts import CUDA, ON_GPU, WHERE

import mpiring
from mpiring.numpy import DiLoCo as LocalOfArrays
from mpiring.torch import (
    DataParallel, DiLoCo, DistributedSampler, Sharded, broadcast_optimizer_state,
    broadcast_parameters, share_cores)
from mpiring.torch.tensors import parts_of

if CUDA:
    torch.set_default_device(WHERE)
ABILITIES = []
comm = mpiring.init()
r, p = comm.rank, comm.size


def ability(function):
    ABILITIES.append(function)
    return function


def net():
    """Return the same network on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(rank, n=5):
    generator = torch.Generator("cpu").manual_seed(rank)
    x, y = (torch.randn(n, width, generator=generator, device="cpu") for width in (6, 3))
    return x.to(WHERE), y.to(WHERE)


def loss_of(model, rank, n=5):
    x, y = batch(rank, n)
    return ((model(x) - y) ** 2).mean()


def expected(model=None, of=lambda model, rank: loss_of(model, rank)):
    """Return the gradients of a bare copy: the means over what all ranks have."""
    bare = model or net()
    total = sum(of(bare, rank) for rank in range(p)) / p
    return torch.autograd.grad(total, [q for q in bare.parameters() if q.requires_grad])


def check(model, gradients):
    own = [q.grad for q in model.parameters() if q.requires_grad]
    for p, gradient in zip(own, gradients, strict=True):
        torch.testing.assert_close(p, gradient, rtol=1e-5, atol=1e-6)


def takes_steps(model, bare=None, of=lambda model, rank: loss_of(model, rank)):
    """Check the gradients of some steps."""
    for _ in range(2):
        model.zero_grad()
        of(model, r).backward()
        model.synchronize()
        check(model, expected(bare, of))


def fails(function, error, *words):
    try:
        function()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"expected {error.__name__}")


def addresses(model):
    return sorted(q.grad.data_ptr() for q in model.parameters())


@ability
def gradients_are_views_into_one_bucket():
    model = DataParallel(net(), comm)
    loss_of(model, r).backward()
    first = addresses(model)
    assert first[-1] - first[0] < 4 * (60 + 10 + 30 + 3 + 3 * 16), "not in one piece of memory"
    for to_none in (True, False, True):
        model.zero_grad(set_to_none=to_none)
        loss_of(model, r).backward()
        check(model, expected())
        assert addresses(model) == first
    # Whoever rebinds them is followed.
    for q in model.parameters():
        q.grad = q.grad.clone() * 2
    for times in (3, 4):
        loss_of(model, r).backward()
        check(model, [times * g for g in expected()])
        assert addresses(model) == first


@ability
def gradients_lie_in_memory_as_their_parameters():
    """Optimizers are slower where the two are strided in different ways."""
    model = DataParallel(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), comm)
    for _ in range(2):
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride() != (27, 9, 3, 1)


class Backwards(nn.Module):
    """Uses its layers from the last to the first: gradients arrive in another order than usual."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


@ability
def gradients_of_an_early_step_can_be_kept():
    bare = Backwards(net()[2], net()[0])
    model = DataParallel(copy.deepcopy(bare), comm, bucket_bytes=64)
    grads, addresses = [], []
    for q in model.parameters():
        q.register_post_accumulate_grad_hook(lambda q: grads.append(q.grad))
    for _ in range(3):
        model.zero_grad()
        loss_of(model, r).backward()
        check(model, expected(bare))
        addresses.append([q.grad.data_ptr() for q in model.parameters()])
    assert len(grads) == 12 and all(torch.isfinite(g).all() for g in grads)
    assert addresses[0] == addresses[1] == addresses[2], "gradients have moved"
    model.load_own_state_dict({"order": model.order[::-1], "reducers": []})
    model.zero_grad()
    loss_of(model, r).backward()
    check(model, expected(bare))
    assert all(torch.isfinite(g).all() for g in grads)


def _is_dead(reference):
    return reference() is None


@ability
def no_gradient_is_in_memory_twice():
    """Not even while other buckets are built: the old ones go first."""
    made, peak = [], 0

    def empty(n, dtype, device):
        nonlocal peak
        x = type(inline).empty(inline, n, dtype, device=device)
        if isinstance(x, torch.Tensor):
            gone = StorageWeakRef(x.untyped_storage()).expired
        else:
            memory = weakref.ref(x if x.base is None else x.base)
            gone = functools.partial(_is_dead, memory)
        made.append((gone, x.nbytes))
        peak = max(peak, sum(nbytes for gone, nbytes in made if not gone()))
        return x

    module = Backwards(*(nn.Linear(32, 32) for _ in range(40)))
    total = sum(q.nbytes for q in module.parameters())
    # A thread that is suspended when it has completed an operation still refers to its bucket.
    with mpiring.init(config=mpiring.Config(progress="inline")) as inline:
        inline.empty = empty
        model = DataParallel(module, inline, bucket_bytes=20_000)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 32)).sum().backward()
        count = len(made)
        model.zero_grad()
        model.load_own_state_dict({"order": model.order[::-1], "reducers": []})
    assert len(made) == 2 * count > 18, "other buckets were not built"
    assert total <= peak < 1.3 * total, (peak, total)


@ability
def no_sync_accumulates_on_this_rank():
    model = DataParallel(net(), comm)
    before = comm.statistics.operations
    with model.no_sync():
        loss_of(model, r).backward()
        loss_of(model, r + p).backward()
    assert comm.statistics.operations == before
    # Several forward passes for one backward, too.
    (loss_of(model, r + 2 * p) + loss_of(model, r + 3 * p)).backward()
    check(model, expected(of=lambda bare, rank: sum(
        loss_of(bare, rank + i * p) for i in range(4))))


def of_module(model, rank):
    return loss_of(model.module, rank)


def of_parameters(model, rank):
    return (1 + rank) * sum(q.square().sum() for q in model.parameters())


@ability
def passes_average_as_the_forward_passes_that_they_reach():
    """Those that reach none average outside of no_sync()."""
    for last in (loss_of, of_module, of_parameters):
        model = DataParallel(net(), comm)
        with model.no_sync():
            loss_of(model, r).backward()
            last(model, r + p).backward()
        last(model, r + 2 * p).backward()
        plain = loss_of if last is of_module else last
        check(model, expected(of=lambda bare, rank: loss_of(bare, rank) + plain(
            bare, rank + p) + plain(bare, rank + 2 * p)))
    for number, inside in enumerate(((0, 1), (1, 0), (0, 0), (1, 1)) * 2):
        # Two graphs at a time, of which some are from no_sync(); then passes in both orders.
        model = DataParallel(net(), comm)
        losses = []
        for i, local in enumerate(inside):
            with model.no_sync() if local else contextlib.nullcontext():
                losses.append(loss_of(model, r + i * p))
        order = (0, 1) if number < 4 else (1, 0)
        parts = [torch.zeros_like(q) for q in model.parameters()]
        for i in order:
            # Where the pass runs does not matter.
            with model.no_sync() if number % 2 else contextlib.nullcontext():
                losses[i].backward()
            bare = net()
            own = torch.autograd.grad(loss_of(bare, r + i * p), list(bare.parameters()))
            parts = [a + b for a, b in zip(parts, own)]
            if not inside[i]:
                parts = [comm.allreduce(x.clone(), op="mean") for x in parts]
            check(model, parts)
    for inside in ((0, 1), (1, 0)):
        model, losses = DataParallel(net(), comm), []
        for i, local in enumerate(inside):
            with model.no_sync() if local else contextlib.nullcontext():
                losses.append(loss_of(model, r + i * p))
        sum(losses).backward()
        check(model, expected(of=lambda bare, rank: loss_of(bare, rank) + loss_of(
            bare, rank + p)))


def bug(gradient):
    raise ValueError("a bug in backward")


@ability
def a_backward_that_raises_is_no_obstacle_to_the_next():
    model = DataParallel(net(), comm)
    loss = loss_of(model, r)
    loss.register_hook(bug)
    fails(loss.backward, ValueError, "a bug in backward")
    takes_steps(model)
    # Nor to one that begins at no output of the model, nor inside of no_sync().
    for fails_in in (contextlib.nullcontext, model.no_sync):
        with fails_in():
            loss = loss_of(model, r)
        loss.register_hook(bug)
        fails(loss.backward, ValueError, "a bug in backward")
        takes_steps(model, of=lambda module, rank: loss_of(getattr(module, "module", module), rank))


@ability
def updates_during_backward_are_refused():
    """Of optimizers in hooks, and by hand: gradients are of this rank alone then."""
    def step(optimizer, q):
        optimizer.step()
        optimizer.zero_grad()

    def descend(rate, q):
        with torch.no_grad():
            q.sub_(rate * q.grad)

    def descend_unseen(rate, q):
        """Update a parameter as LOMO does, so that no version counter shows it."""
        q.data.sub_(rate * q.grad)
        q.grad = None

    for words, hook_of in ((("SGD takes a step during the backward pass", "not in a hook"),
                            lambda q: functools.partial(step, torch.optim.SGD([q], lr=0.1))),
                           (("changed during the backward pass", "not in a hook"),
                            lambda q: functools.partial(descend, 0.1))):
        for local in (False, True):
            model = DataParallel(net(), comm)
            q = model.module[2].bias
            q.register_post_accumulate_grad_hook(hook_of(q))
            with model.no_sync() if local else contextlib.nullcontext():
                fails(lambda model=model: loss_of(model, r).backward(), mpiring.GradientError,
                      f"rank {r}", *words)
    for early in (False, True):
        bare = net()
        model = bare if early else DataParallel(bare, comm)
        bare[2].bias.register_post_accumulate_grad_hook(functools.partial(descend_unseen, 0.1))
        model = DataParallel(bare, comm) if early else model
        fails(lambda model=model: loss_of(model, r).backward(), mpiring.GradientError, f"rank {r}",
              "the gradients of 2.bias were dropped or replaced during the backward pass")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = net(), net(), net()

    def forward(self, x, both):
        return self.used(x) + (self.sometimes(x) if both else 0)


@ability
def unused_parameters_are_handled():
    model = DataParallel(Branches(), comm, find_unused_parameters=True, bucket_bytes=300)
    for _ in range(3):
        model.zero_grad()
        model(batch(r)[0], r == 0).sum().backward()
        assert all(q.grad is None for q in model.module.never.parameters())
        bare = Branches()
        total = sum(bare(batch(rank)[0], rank == 0).sum() for rank in range(p)) / p
        total.backward()
        for part, bare_part in ((model.used, bare.used), (model.sometimes, bare.sometimes)):
            check(part, [q.grad for q in bare_part.parameters()])
    model = DataParallel(Branches(), comm)
    fails(lambda: model(batch(r)[0], True).sum().backward(), mpiring.GradientError,
          "did not reach 4 of 12 parameters", "never.0.weight", "find_unused_parameters=True")


@ability
def parameters_can_be_frozen_and_thawed():
    model = DataParallel(net(), comm)
    for frozen in (True, False, True):
        bare = net()
        for layers in bare, model.module:
            layers[0].requires_grad_(not frozen)
        takes_steps(model, bare)
    model.requires_grad_(False)
    assert not model(batch(r)[0]).requires_grad


@ability
def double_backward_is_refused():
    warnings.filterwarnings("ignore", "Using backward.. with create_graph")
    model = DataParallel(net(), comm)
    fails(lambda: loss_of(model, r).backward(create_graph=True), mpiring.GradientError,
          "create_graph=True", f"rank {r}")


def take_other_derivatives(model):
    """Do what must not be a step of all ranks."""
    x, _ = batch(r)
    x.requires_grad_()
    out = model(x)
    for of in (x, out, model.module[0].weight, list(model.parameters())):
        torch.autograd.grad(out.sum(), of, retain_graph=True)
    out.sum().backward(inputs=[x], retain_graph=True)
    fails(lambda: torch.autograd.grad(out.sum(), torch.ones(1, requires_grad=True)),
          RuntimeError, "not have been used")
    with model.no_sync():
        torch.autograd.grad(model(x).sum(), x)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    model.train()


@ability
def other_derivatives_are_no_steps():
    """One rank may take them alone, at any time; they do not even wait for gradients."""
    for settings in ({}, {"find_unused_parameters": True},
                     {"find_unused_parameters": True, "defer_wait": True}):
        model = DataParallel(net(), comm, **settings)
        for number in range(3):
            before = comm.statistics.operations
            if r == 0:
                take_other_derivatives(model)
            assert comm.statistics.operations == before
            model.zero_grad()
            loss_of(model, r).backward()
            if r == 0:
                take_other_derivatives(model)
            comm.barrier()
            model.synchronize()
            check(model, expected())


def penalized(model, rank):
    """Return a loss that has the norm of its own derivative in it, as WGAN-GP's."""
    x, y = batch(rank)
    x.requires_grad_()
    out = model(x)
    slopes, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return ((out - y) ** 2).mean() + ((slopes.norm(dim=1) - 1) ** 2).mean()


@ability
def a_gradient_can_be_penalized():
    for settings in ({}, {"find_unused_parameters": True}, {"defer_wait": True}):
        takes_steps(DataParallel(net(), comm, bucket_bytes=64, **settings), of=penalized)
    model = DataParallel(net(), comm)
    with model.join():
        for _ in range(1 + r):
            model.zero_grad()
            penalized(model, r).backward()
    if r == p - 1:
        # The others have nothing in the last step.
        check(model, expected(of=lambda bare, rank: (rank == p - 1) * p * penalized(bare, rank)))


class Detour(nn.Module):
    """Leaves out all parameters if told so."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, around=False):
        return 3 * x[:, :3] if around else self.net(x)


@ability
def a_pass_may_reach_no_parameter_on_some_ranks():
    for defer_wait in (False, True):
        model = DataParallel(
            Detour(), comm, find_unused_parameters=True, defer_wait=defer_wait)
        for _ in range(3):
            model.zero_grad()
            x, _ = batch(r)
            x.requires_grad_()
            out = model(x, around=r == 0)
            # Neither of these is the pass that ranks take together.
            torch.autograd.grad(out.sum(), x, retain_graph=True)
            out.sum().backward()
            model.synchronize()
            if p == 1:
                assert all(q.grad is None for q in model.parameters())
            else:
                check(model, expected(of=lambda bare, rank: (rank > 0) * bare(
                    batch(rank)[0]).sum()))
    model = DataParallel(Detour(), comm)
    fails(lambda: model(x, around=True).sum().backward(), mpiring.GradientError,
          f"rank {r}: backward did not reach 4 of 4 parameters", "net.2.bias")


@ability
def backward_can_be_told_which_parameters():
    model = DataParallel(net(), comm, find_unused_parameters=True)
    for layer in (0, 2, 0):
        model.zero_grad()
        loss_of(model, r).backward(inputs=list(model.module[layer].parameters()))
        gradients = expected()
        check(model.module[layer], gradients[layer:layer + 2])
        assert all(q.grad is None for q in model.module[2 - layer].parameters())
    model = DataParallel(net(), comm)
    loss_of(model, r).backward(inputs=list(model.parameters()))
    check(model, expected())
    model = DataParallel(net(), comm)
    fails(lambda: loss_of(model, r).backward(inputs=[model.module[0].weight]),
          mpiring.GradientError, "did not reach 3 of 4 parameters", "0.bias", "2.weight", "2.bias",
          "backward(inputs=[...])")


def normed():
    """Return a network in which BatchNorm's statistics will differ between ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def equal_on_all(*tensors):
    for x in tensors:
        assert len(set(comm.allgather_object(x.detach().cpu().numpy().tobytes()))) == 1


@ability
def buffers_are_those_of_the_first_rank_after_each_step():
    for defer_wait in (False, True):
        model, bare = DataParallel(normed(), comm, defer_wait=defer_wait), normed()
        for step in range(3):
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                # Two forward passes for one backward.
                (loss_of(model, r) + loss_of(model, r + p)).backward()
            model.synchronize()
            loss_of(bare, 0), loss_of(bare, p)
            if step != 1:
                equal_on_all(*model.state_dict().values())
                torch.testing.assert_close(model.module[1].running_var, bare[1].running_var)
        # A graph that is kept does not mind.
        loss = loss_of(model, r)
        loss.backward(retain_graph=True)
        model.synchronize()
        loss.backward()
        model.synchronize()
    model = DataParallel(normed(), comm, broadcast_buffers=False)
    loss_of(model, r).backward()
    assert len(set(comm.allgather_object(model.module[1].running_mean.sum().item()))) == p
    model = DataParallel(normed(), comm)
    model.module[1] = nn.BatchNorm1d(4)
    model.module[1].running_mean += r
    model.eval()(batch(r)[0])
    equal_on_all(*model.buffers())
    model = DataParallel(normed(), comm)
    with model.join():
        for _ in range(1 + r):
            loss_of(model, r).backward()
            # They are of a rank that took part in this step.
            assert model.module[1].num_batches_tracked > 0
    equal_on_all(*model.buffers())
    assert model.module[1].num_batches_tracked == p


@ability
def a_rank_can_evaluate_alone():
    """As often as it likes, with and without graphs; the others would have got the same."""
    model = DataParallel(normed(), comm)
    for _ in range(3):
        model.zero_grad()
        loss_of(model.train(), r).backward()
        before = comm.statistics.operations
        model.eval()
        for _ in range(r):
            model(batch(r)[0])
            with torch.no_grad():
                model(batch(r)[0])
        assert comm.statistics.operations == before
        with torch.no_grad():
            equal_on_all(model(batch(0)[0]), *model.state_dict().values())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.narrow = nn.Linear(6, 6).to(torch.float16)
        self.brain = nn.Linear(6, 6).to(torch.bfloat16)
        self.full = nn.Linear(6, 3)

    def forward(self, x):
        x = self.narrow(x.to(torch.float16)).to(torch.bfloat16)
        return self.full(self.brain(x).float())


@ability
def an_overflow_on_one_rank_skips_the_step_on_all():
    model = DataParallel(net(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(WHERE.type, init_scale=4.0)
    for overflow in (True, False):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        x, y = batch(r)
        with torch.autocast(WHERE.type, dtype=torch.bfloat16):
            loss = ((model(x).float() - y) ** 2).mean()
        scaler.scale(loss * (float("inf") if overflow and r == p - 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        same = all((model.state_dict()[key] == before[key]).all() for key in before)
        assert same == overflow


@ability
def optimizers_and_clipping_work():
    """Or they wait for the gradients, which then cannot be clipped."""
    for make, defers in (
            (lambda q: torch.optim.AdamW(q, lr=0.01, foreach=True), False),
            (lambda q: torch.optim.AdamW(q, lr=0.01, fused=True), False),
            (lambda q: torch.optim.SGD(q, lr=0.01, momentum=0.9, foreach=True), False),
            (lambda q: torch.optim.SGD(q, lr=0.1), True)):
        model, bare = DataParallel(net(), comm, defer_wait=defers), net()
        optimizer, bare_optimizer = make(model.parameters()), make(bare.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, r).backward()
            for q, g in zip(bare.parameters(), expected(bare)):
                q.grad = g
            if not defers:
                torch.testing.assert_close(*(
                    nn.utils.clip_grad_norm_(its.parameters(), 0.5) for its in (model, bare)))
            optimizer.step()
            bare_optimizer.step()
        for p, q in zip(model.parameters(), bare.parameters()):
            torch.testing.assert_close(p, q)


@ability
def optimizers_can_work_in_slices():
    for overlap in (False, True):
        plain, model = (DataParallel(net(), comm, bucket_bytes=64) for _ in range(2))
        right = torch.optim.AdamW(plain.parameters(), lr=0.01)
        optimizer = Sharded(torch.optim.AdamW, model, lr=0.01, overlap=overlap)
        for step in range(4):
            right.zero_grad()
            loss_of(plain, step * p + r).backward()
            loss_of(model, step * p + r).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), norm)
            right.step()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
        torch.testing.assert_close(optimizer.state_dict(), right.state_dict())
        equal_on_all(*model.parameters())


@ability
def a_compiled_module_can_be_wrapped():
    """By the last rank, as compiling takes seconds; others' has the same names."""
    takes_steps(DataParallel(
        nn.Sequential(collections.OrderedDict(_orig_mod=net())) if r < p - 1
        else torch.compile(net(), backend="aot_eager"), comm))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        x.requires_grad_()
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@ability
def activations_can_be_checkpointed():
    for reentrant in (True, False):
        module = Checkpointed(*net())
        module.reentrant = reentrant
        takes_steps(DataParallel(module, comm, bucket_bytes=64))


@ability
def inputs_can_be_uneven():
    model = DataParallel(net(), comm, bucket_bytes=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + r):
            bare = copy.deepcopy(model.module)
            optimizer.zero_grad()
            loss_of(model, 10 * step + r, n=3 + r + step).backward()
            x, y = (torch.cat(parts) for parts in zip(*(
                batch(10 * step + rank, 3 + rank + step) for rank in range(p) if step < 2 + rank)))
            check(model, torch.autograd.grad(((bare(x) - y) ** 2).mean(), list(bare.parameters())))
            optimizer.step()
    equal_on_all(*model.parameters())


def tokens_of(rank, number):
    """Return how many samples a rank has in a step; some rank has none."""
    return 4 if p == 1 else (3 * rank + 2 * number) % (p + 2)


def weighed_loss(model, rank, number):
    """Return the mean over a rank's own samples: NaN where there are none."""
    x, y = batch(100 * number + rank, 11)
    n = tokens_of(rank, number)
    return ((model(x[:n]) - y[:n]) ** 2).sum(1).mean()


def of_all(bare, number):
    """Return the gradients of one rank that has the samples of all."""
    n = sum(tokens_of(rank, number) for rank in range(p))
    total = sum(weighed_loss(bare, rank, number) * tokens_of(rank, number) / n
                for rank in range(p) if tokens_of(rank, number))
    return torch.autograd.grad(total, list(bare.parameters()))


@ability
def ranks_can_weigh_as_much_as_they_have():
    assert p == 1 or {tokens_of(rank, number) for rank in range(p) for number in range(4)} >= {0, 3}
    for settings in ({}, {"defer_wait": True}, {"find_unused_parameters": True}):
        model = DataParallel(net(), comm, bucket_bytes=64, **settings)
        for number in range(4):
            model.zero_grad(set_to_none=number % 2 == 0)
            n = tokens_of(r, number)
            model.weigh(torch.tensor(n) if number == 1 else n)
            loss = weighed_loss(model, r, number)
            assert loss.isnan() == (n == 0)
            loss.backward()
            model.synchronize()
            check(model, of_all(net(), number))
            # Accumulated ones are each of all the step's samples, of which it has some.
            model.zero_grad()
            model.weigh(n)
            x, y = batch(100 * number + r, 11)
            with model.no_sync():
                ((model(x[:1]) - y[:1]) ** 2 * (n > 0)).sum().div(n or torch.nan).backward()
            ((model(x[1:n]) - y[1:n]) ** 2).sum().div(n).backward()
            model.synchronize()
            check(model, of_all(net(), number))
        # That was for one step.
        takes_steps(model)
        # If nobody has anything, the mean is nothing.
        model.weigh(0)
        (loss_of(model, r) * torch.inf).backward()
        model.synchronize()
        assert model.finite and not any(q.grad.any() for q in model.parameters())


@ability
def gradients_of_any_dtype_are_averaged_and_weighed():
    torch.manual_seed(2)
    for bare, tolerance, input_of in (
            (Mixed(), 3e-2, lambda rank: batch(rank)[0]),
            (nn.Linear(6, 2, dtype=torch.complex64), 1e-5, lambda rank: batch(rank)[0] + 0j),
            (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)), 1e-5,
             lambda rank: torch.arange(3) + rank)):
        model = DataParallel(copy.deepcopy(bare), comm)
        for number in range(4):
            model.zero_grad()
            n = [tokens_of(rank, number) if number else 1 for rank in range(p)]
            if number:
                model.weigh(n[r])
            (model(input_of(r)).abs().sum() * (1 if n[r] else torch.nan)).backward()
            assert model.finite and model.nonfinite == {}
            total = sum(bare(input_of(rank)).abs().sum() * n[rank] / sum(n) for rank in range(p))
            gradients = torch.autograd.grad(total, list(bare.parameters()))
            for q, g in zip(model.parameters(), gradients, strict=True):
                assert q.grad.dtype == q.dtype
                torch.testing.assert_close(
                    q.grad.to_dense(), g.to_dense(), rtol=tolerance, atol=tolerance)


@ability
def uneven_inputs_can_be_weighed():
    """By tokens instead of samples, with as many messages."""
    model, operations = DataParallel(net(), comm, bucket_bytes=64), []
    # Buckets are built anew after the first step.
    loss_of(model, r).backward()
    for weighs in (True, False):
        before = comm.statistics.operations
        with model.join():
            for number in range(2 + r):
                model.zero_grad()
                if weighs:
                    model.weigh(tokens_of(r, number))
                    weighed_loss(model, r, number).backward()
                else:
                    loss_of(model, r).backward()
                if weighs and number < 2:
                    check(model, of_all(net(), number))
        operations.append(comm.statistics.operations - before)
    assert operations[0] == operations[1]
    with model.join():
        x, _ = batch(r)
        model.weigh(3)
        out = model(x)
        fails(lambda: model.weigh(3), mpiring.GradientError, "weigh(3) after weigh(3) in one step")
        out.sum().backward()
        # They are counted when the first gradient is ready.
        model.zero_grad()
        out = model(x)
        model.weigh(1 + r)
        out.sum().backward()
    check(model, expected(of=lambda bare, rank: 2 * (1 + rank) / (1 + p) * bare(
        batch(rank)[0]).sum()))


@ability
def only_backward_passes_count_in_join():
    """Not forward passes: to look at outputs, or several for one loss."""
    model = DataParallel(net(), comm)
    with model.join():
        for step in range(2 + r):
            model.zero_grad()
            for _ in range(r):
                model(batch(r, 2)[0])
            n = 2 + r
            with model.no_sync():
                (n * loss_of(model, r, n)).backward()
            ((1 + r) * loss_of(model, r + p, 1 + r)).backward()
            if step < 2:
                total = sum(n + 1 + rank for rank, n in enumerate(range(2, 2 + p)))
                check(model, expected(of=lambda bare, rank: p * (3 + 2 * rank) / total * (
                    (2 + rank) * loss_of(bare, rank, 2 + rank)
                    + (1 + rank) * loss_of(bare, rank + p, 1 + rank))))
    model = DataParallel(net(), comm)
    with model.join():
        fails(lambda: loss_of(model.module, r).backward(), mpiring.GradientError,
              f"rank {r}: in join(), a backward pass has reached no output", "model.weigh(samples)")
        model.zero_grad()
        model.weigh(5)
        loss_of(model.module, r).backward()
        check(model, expected())


@ability
def wrong_weights_are_refused():
    model = DataParallel(net(), comm)
    for wrong in (-1, torch.nan, torch.inf, "5", None, True, torch.ones(2), torch.tensor(True)):
        fails(lambda wrong=wrong: model.weigh(wrong), mpiring.ConfigError,
              f"rank {r}: weigh(tokens): tokens=", "a number from 0 to 2**53")
    texts = []

    def late(q):
        fails(lambda: model.weigh(3), mpiring.GradientError, "comes too late", "before backward()")
        texts.append(q.shape)

    hook = model.module[0].weight.register_post_accumulate_grad_hook(late)
    loss_of(model, r).backward()
    hook.remove()
    assert len(texts) == 1
    # After backward it is for the next step.
    model.weigh(3)
    fails(lambda: model.weigh(2.5), mpiring.GradientError, "weigh(2.5) after weigh(3) in one step")
    loss_of(model, r).backward()
    if p == 1:
        return
    fails(lambda: train_unlike(model), mpiring.GradientError, "in join()",
          f"rank 0 called weigh(tokens) for this step, but rank{'s 1-2' if p == 3 else ' 1'} did")


def train_unlike(model):
    with model.join():
        if r == 0:
            model.weigh(1)
        loss_of(model, r).backward()


@ability
def a_model_looks_like_its_module():
    torch.manual_seed(r)
    module = nn.BatchNorm1d(6).to(torch.bfloat16)
    module.weight.data += r
    module.running_mean += r
    model = DataParallel(module, comm)
    # The first rank decides at the start.
    assert (module.weight == 1).all() and not module.running_mean.any()
    assert model.num_features == 6 and model.running_mean is module.running_mean
    fails(lambda: model.color, AttributeError, "color")
    state = {name: x + 1 for name, x in module.state_dict().items()}
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert (module.weight == 2).all()
    for copying in (pickle.dumps, copy.deepcopy):
        fails(lambda copying=copying: copying(model), mpiring.ConfigError, "cannot be pickled")


Moments = collections.namedtuple("Moments", "first second")


@ability
def optimizers_can_be_copied():
    model = DataParallel(net(), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (r + 1))
    optimizer.param_groups[0]["moments"] = Moments(torch.full((3,), 1.0 + r), (r, [r]))
    if r == 0:
        for q in model.parameters():
            q.grad = torch.full_like(q, 2.0)
        optimizer.step()
    broadcast_optimizer_state(optimizer, comm)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    assert [float(its["step"]) for its in state["state"].values()] == [1] * 4
    assert torch.equal(state["state"][0]["exp_avg"], torch.full((10, 6), 0.2))
    moments = optimizer.param_groups[0]["moments"]
    assert isinstance(moments, Moments) and (moments.first == 1).all()
    assert moments.second == (0, [0])


class Allocations(TorchDispatchMode):
    """Notes how long the longest tensor is that PyTorch makes meanwhile."""

    longest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        own = {x.untyped_storage().data_ptr() for x in (*args, *(
            args[0] if args and isinstance(args[0], list) else ())) if isinstance(x, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in own:
            self.longest = max(self.longest, made.untyped_storage().nbytes())
        return made


@ability
def what_is_large_is_broadcast_from_where_it_lies():
    large = torch.full((3 << 20,), r + 1.0)
    strided = torch.full((3000, 200), r + 1.0).t()
    small = [torch.full((5,), r + 1, dtype=dtype) for dtype in (torch.int8, torch.bfloat16)]
    tracemalloc.start()
    with Allocations() as made:
        broadcast_parameters([small[0], large, small[1]], comm, root=p - 1)
        assert made.longest < 1 << 20, made.longest
        broadcast_parameters([strided], comm, root=p - 1)
        assert made.longest <= strided.nbytes
    # Of NumPy's own memory, too.
    assert ON_GPU or tracemalloc.get_traced_memory()[1] < large.nbytes / 2
    tracemalloc.stop()
    assert all((x == p).all() for x in (large, strided, *small))


@ability
def data_is_shared_out():
    for n in (1, 10, 17):
        data = range(n)
        exact = comm.allgather_object(list(DistributedSampler(data, comm, pad=False)))
        assert sorted(sum(exact, [])) == list(data)
        padded = comm.allgather_object(list(DistributedSampler(data, comm)))
        assert {len(part) for part in padded} == {-(-n // p)} and set(sum(padded, [])) == set(data)
        short = comm.allgather_object(list(DistributedSampler(data, comm, drop_last=True)))
        assert {len(part) for part in short} == {n // p}
        assert len(set(sum(short, []))) == n // p * p
    sampler = DistributedSampler(range(40), comm, pad=False)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] != epochs[1]
    sampler.set_epoch(0)
    drawn = iter(sampler)
    first = [next(drawn) for _ in range(4)]
    state = sampler.state_dict()
    again = DistributedSampler(range(40), comm, pad=False)
    again.load_state_dict(state)
    assert len(again) == len(epochs[0]) - 4
    assert first + list(again) == epochs[0]
    # A DataLoader has drawn all of them, but its last batches are yet to be trained on.
    assert again.state_dict(seen=2)["position"] == 6 * p
    assert again.state_dict()["position"] == 40
    assert len(again) == len(epochs[0]) and list(again) == epochs[0]
    assert sampler.state_dict(seen=2)["position"] == 2 * p
    if p > 1:
        fails(lambda: DistributedSampler(range(40 + r), comm), mpiring.ConfigError,
              "rank 1: DistributedSampler has length=41, but on rank 0 it is 40")


@ability
def cores_are_shared_out():
    before = torch.get_num_threads()
    saved = {name: os.environ.pop(name, None) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)    # as it is by default
    for _ in range(2):
        DataParallel(net(), comm)
        assert share_cores(comm) == torch.get_num_threads() == max(1, cores // p)
    # What the user has said holds.
    torch.set_num_threads(os.cpu_count() + 1)
    DataParallel(net(), comm)
    assert share_cores(comm) == torch.get_num_threads() == os.cpu_count() + 1
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(before)
    assert share_cores(comm) == before
    os.environ.update({name: value for name, value in saved.items() if value})


@ability
def what_cannot_be_wrapped_is_refused():
    for module, words in (
            (np.ones(3), "pass a torch.nn.Module"), (DataParallel(net(), comm), "wrapped already"),
            (nn.LazyLinear(3), "has no shape yet"), (net().to("meta"), "is on meta"),
            (nn.Sequential(net()[0], net()[2].to("meta")),
             f"parameter 1.weight is on meta, but 0.weight on {WHERE}")):
        fails(lambda module=module: DataParallel(module, comm), mpiring.ConfigError, words)
    fails(lambda: DataParallel(net(), MPI.COMM_WORLD), mpiring.ConfigError, "pass mpiring.init()")


@contextlib.contextmanager
def warnings_of_mpiring():
    """Yield the list of what is logged meanwhile."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    log = logging.getLogger("mpiring")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def comparing(action):
    """Yield a communicator whose models are compared after every second step."""
    config = mpiring.Config(digest_steps=2, digest_action=action, tuning=False)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as own:
        yield own


def flip(tensor):
    """Flip a bit of the first number, in whatever order it lies, as failing memory does."""
    first = tensor.data[(0,) * tensor.dim()]
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    first.copy_((first.view(width) ^ 4).view(tensor.dtype))


class Compared:
    """A model of several dtypes and layouts in training; the first layer is frozen."""

    def __init__(self, own):
        torch.manual_seed(r)
        bare = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 10, 1),
                             nn.Flatten(), nn.BatchNorm1d(10), nn.Linear(10, 3).bfloat16())
        bare[2].to(memory_format=torch.channels_last)
        bare[0].requires_grad_(False)
        bare[4].register_forward_hook(lambda *three: three[2].bfloat16())
        self.model = DataParallel(bare, own)
        self.optimizer = torch.optim.AdamW(
            [{"params": bare[2].parameters()}, {"params": bare[4:].parameters(), "lr": 0.01}], 0.1)
        self.average = {"weights": [q.detach().clone() for q in bare.parameters()]}
        self.model.watch(average=self.average)

    def step(self, number, in_forward=lambda: None):
        self.optimizer.zero_grad()
        x, y = batch(10 * number + r)
        loss = ((self.model(x).float() - y) ** 2).mean()
        in_forward()
        loss.backward()
        self.optimizer.step()

    def bits(self):
        state = self.optimizer.state_dict()
        tensors = [*self.model.parameters(), *self.average["weights"], *(
            x for its in state["state"].values() for x in its.values())]
        return pickle.dumps([x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
                             for x in tensors]), str(state["param_groups"])


SPOTS = {
    "0.weight": lambda run: run.model.module[0].weight,
    "2.weight": lambda run: run.model.module[2].weight,
    "average['weights'][2]": lambda run: run.average["weights"][2],
    "AdamW['2.weight']['exp_avg']": lambda run: run.optimizer.state[
        run.model.module[2].weight]["exp_avg"],
    "AdamW['5.bias']['exp_avg_sq']": lambda run: run.optimizer.state[
        run.model.module[5].bias]["exp_avg_sq"],
    "AdamW['2.bias']['step']": lambda run: run.optimizer.state[run.model.module[2].bias]["step"],
}


@ability
def replicas_are_compared_and_restored():
    if p == 2:
        return
    with comparing("restore") as own:
        run, undisturbed = Compared(own), Compared(own)
        for number in range(2 * len(SPOTS) + 2):
            # In the step of a check, when forward has read the parameters already.
            name = ([*SPOTS, ""] * 2)[number // 2 + 1] if number % 2 else ""
            spoil = (lambda: flip(SPOTS[name](run))) if name and r == p - 1 > 0 else lambda: None
            with warnings_of_mpiring() as texts:
                run.step(number, spoil)
                undisturbed.step(number)
            assert len(texts) == (r == 0 and p > 1 and name != ""), texts
            assert not texts or f"rank {p - 1} on " in texts[0] and f"in {name}; " in texts[0]
            assert run.bits() == undisturbed.bits(), name
        run.optimizer.param_groups[1]["lr"] *= 1 + (r == 0)
        with warnings_of_mpiring() as texts:
            run.model.compare_replicas()
        assert p == 1 or run.optimizer.param_groups[1]["lr"] == 0.01
        assert len(texts) == (r == 0 and p > 1)
        assert not texts or "in AdamW['4.weight', ...]['lr']; restored" in texts[0]


@ability
def replicas_that_differ_stop_the_job():
    """They do not differ after uneven inputs."""
    with comparing("stop") as own:
        run = Compared(own)
        for epoch in range(2):
            with run.model.join():
                for number in range(2 + r):
                    run.step(number)
            run.model.compare_replicas()
            run.step(9)
        if r == 0:
            # An optimizer that has not been anywhere else, as ZeRO's parts are.
            torch.optim.SGD([run.model.module[5].bias], 0.0, momentum=0.9).step()
        run.model.compare_replicas()
        fails(lambda: run.model.watch(x=3), mpiring.ConfigError, "pass a tensor")
        name = "AdamW['2.weight']['exp_avg']"
        if p > 1:
            if r == 1:
                flip(SPOTS[name](run))
            fails(run.model.compare_replicas, mpiring.ReplicaError, f"rank {r}: after ", "1 on",
                  name)


@ability
def weights_may_differ_between_the_steps_of_optimizers():
    """As those of SAM do, in which each rank moves by its own gradients, and back."""
    with comparing("stop") as own:
        for exact, hidden in ((True, False), (False, False), (False, True)):
            model = DataParallel(net(), own)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
            # PyTorch counts no writes to `data`.
            weights = [q.data if hidden else q for q in model.parameters()]
            with warnings_of_mpiring() as texts:
                for number in range(8):
                    with model.no_sync():
                        loss_of(model, 8 * number + r).backward()
                    with torch.no_grad():
                        starts = [q.clone() for q in weights]
                        moves = [q.grad.sign() / 7 for q in model.parameters()]
                        torch._foreach_add_(weights, moves)
                    optimizer.zero_grad()
                    loss_of(model, 8 * number + r).backward()
                    with torch.no_grad():
                        torch._foreach_sub_(weights, moves)
                        if exact:
                            torch._foreach_copy_(weights, starts)
                    optimizer.step()
                    optimizer.zero_grad()
            # a + b - b is not a: differences by rounding are removed.
            assert bool(texts) == (r == 0 and p > 1 and not exact), texts
            assert all("by rounding, as a + b - b" in text for text in texts)
            # Other differences are not.
            with torch.no_grad():
                model.module[0].weight[0, 0] += 0.001 * (r == 0)
            if p > 1:
                fails(lambda model=model, optimizer=optimizer: [
                    (loss_of(model, r).backward(), optimizer.step()) for _ in range(2)],
                    mpiring.ReplicaError, "in 0.weight")


@ability
def weights_are_compared_without_an_optimizer():
    with comparing("stop") as own:
        model = DataParallel(net(), own)
        loss_of(model, r).backward()
        if r == 0:
            flip(model.module[0].weight)
        loss_of(model, r).backward()
        if p > 1:
            fails(loss_of(model, r).backward, mpiring.ReplicaError, f"rank {r}: after 3 steps, ",
                  "in 0.weight")


@ability
def ranks_whose_gradients_are_not_finite_are_named():
    model = DataParallel(net(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spoiled(tell, step):
        with warnings_of_mpiring() as texts:
            # On a GPU nobody looks until there is a reason: backward would have to wait for it.
            for _ in range(1 + ON_GPU):
                loss = loss_of(model, r) * (torch.nan if r == p - 1 else 1)
                optimizer.zero_grad()
                loss.backward()
            assert list(model.nonfinite) == [p - 1]
            assert {"0.weight", "0.bias"} <= set(model.nonfinite[p - 1])
            if tell:
                optimizer.step()
        assert len(texts) == (r == 0 and tell), texts
        assert not texts or f"rank {p - 1} in " in texts[0]
        assert not texts or f"step {step * (1 + ON_GPU)}: " in texts[0]

    loss_of(model, r).backward()
    assert model.nonfinite == {}
    # Whoever takes no step, as GradScaler, knows already.
    spoiled(tell=False, step=1)
    model.module[2].requires_grad_(False)    # other buckets, but the same count of steps
    spoiled(tell=True, step=2)


@ability
def a_stream_of_its_own_can_be_used():
    """Where there is one."""
    model, own = DataParallel(net(), comm), contextlib.nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if CUDA:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        own = torch.cuda.stream(stream)
    with own:
        for step in range(6):
            before = copy.deepcopy(model.module)
            loss_of(model, r).backward()
            check(model, expected(before))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    if CUDA:
        torch.cuda.current_stream().wait_stream(stream)


@ability
def models_meet_rarely_as_those_of_arrays_do():
    """With a frozen parameter, a number, and one that is not in C order; each rank has its end."""
    for dtype, settings in (("float32", {"every": 3, "alpha": 0.25}), ("bfloat16", {
            "every": 4, "fragments": 2, "delay": 2, "sharded": True})):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 5)).to(
            getattr(torch, dtype), memory_format=torch.channels_last)
        model[1].scale = nn.Parameter(torch.tensor(1.5, dtype=model[0].weight.dtype))
        model[2].requires_grad_(False)
        trained = {name: q for name, q in model.named_parameters() if q.requires_grad}
        arrays = {name: q.detach().float().cpu().numpy().astype(dtype, "C")
                  for name, q in trained.items()}
        outer, right = DiLoCo(model, comm, **settings), LocalOfArrays(arrays, comm, **settings)

        def change(local, number):
            for i, (name, q) in enumerate(trained.items()):
                if local is outer:
                    q.data -= (r + i + number) % 5 / 8
                else:
                    arrays[name] -= np.asarray((r + i + number) % 5 / 8, dtype)
            local.step()

        for local in (outer, right):
            for number in range(11):
                change(local, number)
                if number == 6:
                    local.load_state_dict(local.state_dict())
            with local.join():
                for number in range(2 + 3 * r):
                    change(local, number)
        tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
        for name, q in trained.items():
            np.testing.assert_allclose(
                q.detach().float().cpu().numpy(), arrays[name].astype("f4"), tolerance, tolerance)


@ability
def the_face_takes_tensors():
    total = p * (p + 1) / 2
    for x in (torch.full((5, 3), r + 1.0, device=WHERE), torch.full(
            (5, 3), r + 1.0, device=WHERE, requires_grad=True).clone()):
        assert comm.allreduce(x) is x and (x == total).all()
    x = torch.full((5, 3), r + 1, dtype=torch.bfloat16, device=WHERE)
    assert comm.iallreduce(x).wait() is x and (x == total).all()
    chunk = comm.reduce_scatter(x)
    start, stop = 15 * r // p, 15 * (r + 1) // p
    assert isinstance(chunk, torch.Tensor) and chunk.dtype == x.dtype and chunk.device == x.device
    assert chunk.shape == (stop - start,) and (chunk == total * p).all()
    chunk += r
    assert (x.flatten()[start:stop] == total * p + r).all(), "it is a view"
    assert comm.allgather(x) is x and (x.flatten()[:15 // p] == total * p).all()
    assert comm.broadcast(x, root=p - 1) is x and x[-1, -1] == total * p + p - 1
    for wrong, words in ((torch.ones(4, 4, device=WHERE)[:, 1], "pass y = x.contiguous()"),
                         (torch.ones(3, device=WHERE).to_sparse(), "expected a dense one")):
        if wrong.layout is torch.strided or not ON_GPU:
            fails(lambda wrong=wrong: comm.allreduce(wrong), mpiring.ConfigError, words)


class WithBuffers(nn.Module):
    """A module with tensors as buffers; each rank begins with other elements."""

    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for name, x in buffers.items():
            self.register_buffer(name, x)

    def forward(self, x):
        return self.layer(x)


def odd_tensors():
    """Return tensors of all layouts, with this rank's number in them."""
    full = torch.full((4, 4), r + 1.0, device=WHERE)
    wide, base = torch.full((4, 6), r + 1.0, device=WHERE), torch.full((5,), r + 1.0, device=WHERE)
    odd = {"expanded": wide[:, :1].expand(4, 3), "number": base[0].expand(2, 2),
           "transposed": wide.T, "strided": wide[:, ::2], "single": base[::5], "alias": base[1:],
           "empty": wide[:0], "none": wide[:, :0], "truth": base > 1, "bits": base.bfloat16(),
           "conjugate": (base + 1j).conj(), "permuted": wide.reshape(2, 4, 3).permute(2, 0, 1)}
    if not ON_GPU:
        odd |= {"coo": full.to_sparse(), "sums": torch.sparse_coo_tensor(
            torch.zeros((1, 2), dtype=torch.int64), base[:2], (3,), check_invariants=False),
            "csr": full.to_sparse_csr(), "csc": full.to_sparse_csc(),
            "bsr": full.to_sparse_bsr((2, 2)), "bsc": full.to_sparse_bsc((2, 2))}
    return odd


def dense(x):
    return x if x.layout is torch.strided else x.to_dense()


@ability
def odd_buffers_are_copied():
    warnings.filterwarnings("ignore", "(?s).*Sparse")
    model = DataParallel(WithBuffers(**odd_tensors()), comm)
    right = comm.broadcast_object({name: dense(x).cpu() for name, x in odd_tensors().items()})
    for spoil in (False, True):
        if spoil:
            for x in model.buffers():
                for part in parts_of(x):
                    if part.is_floating_point():
                        part.add_(r)
            model(torch.ones(3, 2, device=WHERE)).sum().backward()
        for name, x in model.named_buffers():
            torch.testing.assert_close(dense(x).cpu(), right[name], rtol=0, atol=0)
    tensors = odd_tensors()
    broadcast_parameters(tensors.values(), comm)
    for name, x in tensors.items():
        torch.testing.assert_close(dense(x).cpu(), right[name], rtol=0, atol=0)


@ability
def buffers_that_cannot_be_copied_are_named():
    if ON_GPU:
        return
    warnings.filterwarnings("ignore", "(?s).*(nested|quantize)")
    for x, words in (
            (torch.empty(3, device="meta"), "is on meta"),
            (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor"),
            (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
            (torch.ones(3).to_mkldnn(), "torch._mkldnn"),
            (nn.UninitializedBuffer(), "no shape yet")):
        for make in (DataParallel, lambda module, comm: DiLoCo(module, comm, every=2)):
            fails(lambda x=x, make=make: make(WithBuffers(odd=x), comm), mpiring.ConfigError,
                  f"rank {r}: buffer odd ", words)
        # Only one rank has it, but all raise.
        fails(lambda x=x: broadcast_parameters([torch.ones(3), x if r == p - 1 else torch.ones(3)],
                                               comm), mpiring.ConfigError,
              f"rank {p - 1}: tensor 1 ", words)
    module = WithBuffers()
    module.sparse = nn.Parameter(torch.eye(3).to_sparse())
    fails(lambda: DataParallel(module, comm), mpiring.ConfigError, "parameter sparse", "dense")
    module.sparse.requires_grad_(False)
    DataParallel(module, comm)
    if p > 1:
        nonzero = torch.diag(torch.arange(3.0) > r % 2).float().to_sparse()
        fails(lambda: DataParallel(WithBuffers(odd=nonzero), comm), mpiring.BufferMismatchError,
              "odd torch.float32 (3, 3) in memory as torch.sparse_coo [(2, ")


@ability
def a_sparse_state_is_copied_and_compared():
    if ON_GPU:
        return
    with comparing("stop") as own:
        model = DataParallel(nn.Embedding(5, 2, sparse=True), own)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([r, 2])).sum().backward()
            optimizer.step()
        momentum = optimizer.state[model.module.weight]["momentum_buffer"]
        assert momentum.layout is torch.sparse_coo
        model.compare_replicas()
        right = momentum.to_dense()
        if r == p - 1 > 0:
            momentum._values().add_(1)
        if p > 1:
            fails(model.compare_replicas, mpiring.ReplicaError,
                  "SGD['weight']['momentum_buffer']")
        other = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for each in (optimizer, optimizer if r == 0 else other):
            broadcast_optimizer_state(each, own)
            copied = each.state[model.module.weight]["momentum_buffer"]
            assert copied.layout is torch.sparse_coo and torch.equal(copied.to_dense(), right)
    if p > 2:
        with comparing("restore") as own:
            model, x = DataParallel(net(), own), torch.full((4, 1), 1 + (r == 1)).expand(4, 3)
            model.watch(x=x)
            with warnings_of_mpiring() as texts:
                model.compare_replicas()
            assert len(texts) == (r == 0) and (x == 1).all()


def writing(x):
    """Return all calls of a communicator that write to a tensor."""
    started = comm.persistent_allreduce(x)

    def start():
        started.start()
        return started.wait()

    return (comm.allreduce, lambda x: comm.iallreduce(x).wait(), comm.reduce_scatter,
            comm.allgather, comm.broadcast, lambda _: start(),
            *(lambda _, call=make(x): call() for make in (
                comm.persistent_allreduce, comm.persistent_reduce_scatter,
                comm.persistent_allgather, comm.persistent_broadcast)))


@ability
def what_autograd_needs_is_not_changed_in_place():
    """As by PyTorch's own operations."""
    leaf = torch.ones(4, device=WHERE, requires_grad=True)
    for x in (leaf, leaf.view(2, 2)):
        for call in writing(x):
            fails(lambda call=call, x=x: call(x), mpiring.ConfigError, "leaf", "torch.no_grad()")
    assert (leaf == 1).all()
    with torch.no_grad():
        for call in writing(leaf):
            call(leaf)
    weight = torch.ones(4, device=WHERE, requires_grad=True)
    x = torch.ones(4, device=WHERE)
    for call in writing(x):
        product = (weight * x).sum()
        call(x)
        fails(product.backward, RuntimeError, "modified by an inplace operation")
    with torch.inference_mode():
        comm.allreduce(torch.ones(4, device=WHERE))


for function in ABILITIES:
    if p < 3 and function is a_compiled_module_can_be_wrapped:
        # It takes some seconds.
        continue
    function()
    comm.barrier()
    if r == 0:
        print(f"can: {function.__name__}", flush=True)
comm.close()
print("all is well", flush=True)
