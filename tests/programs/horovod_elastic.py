"""Trains by Horovod's elastic API, of whose ranks two may die, and compares with one process."""

import itertools
import os
import random
import signal
import sys
import threading
import time

import torch
from torch import nn

import mpiring.horovod.torch as hvd
from mpiring.horovod.torch.elastic import ElasticSampler, HostsUpdatedInterrupt, TorchState, run

EPOCHS, SAMPLES, BATCH = 3, 50, 2
# Of ranks, in epochs and batches.
DEATHS = {(3, 0, 3): "amid backward", (0, 1, 4): "before allgather"} if "die" in sys.argv else {}
DATA = torch.arange(SAMPLES * 5, dtype=torch.float64).reshape(SAMPLES, 5).sin()
LR = 0.02

hvd.init()
MINE = hvd.rank()
calls = []


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def build():
    torch.manual_seed(5 + MINE)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.5)


def loss_of(model, indices):
    batch = DATA[indices]
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def scale_rate():
    for group in state.optimizer.param_groups:
        group["lr"] = LR * hvd.size()


@run
def train(state, batch_size):
    calls.append(hvd.size())
    # Those of the last attempt have ended; one of all ranks is there.
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
    if state.start is None:
        state.start = {name: x.clone() for name, x in state.model.state_dict().items()}
        state.commit()
    while state.epoch < EPOCHS:
        # The batches of an attempt that came to nothing are drawn again.
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_size, sampler=state.sampler)
        for number, indices in enumerate(loader):
            fate = DEATHS.get((MINE, state.epoch, number))
            state.optimizer.zero_grad()
            if fate == "amid backward":
                state.model[0].bias.register_hook(die)
            loss_of(state.model, indices).backward()
            state.optimizer.step()
            if pair.included():
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [2, 2]
            if fate == "before allgather":
                die()
            drawn = hvd.allgather(indices.reshape(1, -1), name="drawn")
            state.drawn.append((state.epoch, state.optimizer.param_groups[0]["lr"], drawn.tolist()))
            state.sampler.record_batch(number, batch_size)
            if number % 2:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return "trained"


def reference(state):
    """Train in this process on what all ranks have drawn, batch by batch."""
    model, optimizer = build()
    model.load_state_dict(state.start)
    for _, rate, shares in state.drawn:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for share in shares:
            (loss_of(model, share) / len(shares)).backward()
        optimizer.step()
    return model


def samplers_share_what_is_left():
    for shuffle, samples in itertools.product((False, True), (1, 7, 30)):
        sampler = ElasticSampler(range(samples), shuffle, seed=3)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 0}
        sampler.set_epoch(2)
        order = list(range(samples))
        if shuffle:
            random.Random(3 + 2).shuffle(order)
        for _ in range(2):
            indices = torch.tensor(list(sampler))
            assert len(indices) == len(sampler) == -(-len(order) // hvd.size())
            shares = hvd.allgather(indices.reshape(-1, 1)).reshape(hvd.size(), -1).T.reshape(-1)
            assert shares.tolist() == [
                order[i % len(order)] for i in range(len(shares))], (shares, order)
            sampler.record_batch(0, 2)
            assert len(sampler) == len(indices), "until a reset"
            order = order[2 * hvd.size():]
            sampler.load_state_dict(sampler.state_dict())
            if not order:
                assert not [*sampler]
                break
        sampler.set_epoch(3)
        assert sampler.processed_num == 0 and len(sampler.remaining_indices) == samples


def states_return_to_what_was_saved():
    model, optimizer = build()
    sampler, log = ElasticSampler(range(12)), []
    state = TorchState(model, optimizer, sampler=sampler, log=log, rank=MINE)
    state.register_reset_callbacks([lambda: log.append("reset")])
    state.sync()
    assert state.rank == 0 and state.model is model
    weights = [p.tolist() for p in model.parameters()]
    assert all(each == weights for each in hvd.allgather_object(weights))
    loss_of(model, [MINE]).backward()
    optimizer.step()
    sampler.record_batch(0, 1)
    state.log.append("not saved")
    state.restore()
    assert [p.tolist() for p in model.parameters()] == weights and not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert state.log == [] and sampler.processed_num == 0 and len(sampler.remaining_indices) == 12
    state.log.append("saved")
    sampler.record_batch(0, 1)
    state.commit()
    state.log.append("not saved")
    state.restore()
    assert state.log == ["saved"] and sampler.processed_num == hvd.size()
    state.model = nn.Linear(2, 2)
    state.restore()
    assert isinstance(state.model, nn.Linear)
    state.on_reset()
    assert log[-1] == "reset"


def functions_are_called_as_often_as_needed():
    calls = []

    @run
    def interrupted(state, *, times):
        """Interrupt."""
        calls.append(state.x)
        state.x = 10 + hvd.rank()
        if len(calls) < times:
            raise HostsUpdatedInterrupt(skip_sync=len(calls) == 2)
        raise hvd.HorovodInternalError("not a death")

    assert interrupted.__doc__ == "Interrupt."
    try:
        interrupted(TorchState(x=MINE), times=3)
    except hvd.HorovodInternalError as error:
        assert str(error) == "not a death"
    else:
        raise AssertionError("an error that is not due to a death is raised")
    assert calls == [0, 10, 10 + MINE], calls


samplers_share_what_is_left()
states_return_to_what_was_saved()
functions_are_called_as_often_as_needed()
model, optimizer = build()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = TorchState(model, optimizer, sampler=ElasticSampler(DATA, seed=1), epoch=0, drawn=[],
                   start=None)
state.register_reset_callbacks([scale_rate])
assert train(state, batch_size=BATCH) == "trained"
for epoch in range(EPOCHS):
    seen = [i for each, _, shares in state.drawn for share in shares for i in share
            if each == epoch]
    assert set(seen) == set(range(SAMPLES)) and len(seen) <= SAMPLES + 2 * 3 * BATCH, seen
for p, right in zip(model.parameters(), reference(state).parameters(), strict=True):
    torch.testing.assert_close(p.detach(), right.detach(), rtol=1e-9, atol=1e-12)
weights = [p.tolist() for p in model.parameters()]
assert all(each == weights for each in hvd.allgather_object(weights))
assert optimizer.param_groups[0]["lr"] == LR * hvd.size()
# Those of communicators that have died end; else this would wait for ever.
while len([thread for thread in threading.enumerate() if thread.name == "mpiring horovod"]) > 2:
    time.sleep(0.01)
print(f"right {MINE}: {calls[0]} ranks at first, {hvd.size()} at last", flush=True)
if "die" not in sys.argv:
    hvd.shutdown()
