"""Trains as Horovod's users do elastically; a rank dies, and the others cover its epoch."""

import os
import signal
import sys

import torch
from torch import nn

import mpiring.horovod.torch as hvd

EPOCHS, SAMPLES, BATCH = 2, 48, 2
hvd.init()
FIRST_RANK = hvd.rank()
DIES = "die" in sys.argv and FIRST_RANK == 1
x = torch.arange(SAMPLES * 3.0).reshape(SAMPLES, 3).sin()

torch.manual_seed(FIRST_RANK)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()),
                                     named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(x)


def on_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * hvd.size()


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        loader = torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)
        for index, chosen in enumerate(loader):
            state.optimizer.zero_grad()
            loss = (state.model(x[chosen]) - x[chosen].sum(1, keepdim=True)).square().mean()
            if DIES and (state.epoch, index) == (1, 3):
                # Amid backward, with gradients under way.
                model[0].bias.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            state.optimizer.step()
            state.seen = [*state.seen, (state.epoch, hvd.allgather_object(chosen.tolist()))]
            state.sampler.record_batch(index, BATCH)
            if index % 2:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return "trained"


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[])
state.register_reset_callbacks([on_reset])
assert train(state) == "trained"
ranks = hvd.allgather_object((FIRST_RANK, [p.tolist() for p in model.parameters()]))
assert all(parameters == ranks[0][1] for _, parameters in ranks)
assert optimizer.param_groups[0]["lr"] == 0.1 * hvd.size()
for epoch in range(EPOCHS):
    drawn = [i for number, shares in state.seen for share in shares for i in share
             if number == epoch]
    # Where ranks do not divide what is left, the first ones come again.
    assert set(drawn) == set(range(SAMPLES)) and len(drawn) < SAMPLES + 2 * hvd.size(), drawn
assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
print(f"right {FIRST_RANK}: {len(state.seen[0][1])} ranks at first, {hvd.size()} at last",
      flush=True)
if "die" not in sys.argv:
    hvd.shutdown()
