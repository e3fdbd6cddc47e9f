"""Calls Horovod's operations on tensors that are taken for such on a GPU; see whereabouts."""

import torch
from torch import nn
from whereabouts import ON_GPU

import mpiring.horovod.torch as hvd

assert ON_GPU
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SUM = sum(range(1, SIZE + 1))
x = torch.full((5, 3), RANK + 1.0)
integers = torch.full((4,), 7 * (RANK + 1))

assert (hvd.allreduce(x, op=hvd.Sum) == SUM).all()
assert torch.allclose(hvd.allreduce(x), torch.full((5, 3), SUM / SIZE))
assert (hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0) == 1.5 * SUM).all()
assert (hvd.allreduce(integers) == 7 * SUM // SIZE).all()
assert (hvd.allreduce(torch.ones(6), op=hvd.Adasum) == 1).all()
grouped = hvd.grouped_allreduce([x, integers.float()], op=hvd.Sum)
assert (grouped[0] == SUM).all() and (grouped[1] == 7 * SUM).all()
y = x.clone()
hvd.allreduce_(y, op=hvd.Max)
assert (y == SIZE).all()
order = range(20) if RANK else range(19, -1, -1)
handles = [hvd.allreduce_async_(torch.full((100,), float(i)), name=f"tensor {i}", op=hvd.Sum)
           for i in order]
for i, handle in zip(order, handles):
    assert (hvd.synchronize(handle) == SIZE * i).all()
assert (hvd.broadcast(x, 1) == 2).all()
assert hvd.allgather(torch.full((RANK + 1, 2), float(RANK))).shape == (SUM, 2)
assert hvd.alltoall(torch.arange(2.0 * SIZE) + 10 * RANK).tolist() == [
    10 * rank + 2.0 * RANK + i for rank in range(SIZE) for i in range(2)]
assert (hvd.reducescatter(torch.ones(2 * SIZE, 3), op=hvd.Sum) == SIZE).all()
for step in range(RANK + 1):
    assert (hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"step {step}") == SIZE - step).all()
assert hvd.join() == SIZE - 1

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), hvd.SyncBatchNorm(8), nn.Linear(8, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                     model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), 0)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(6, 4) + RANK).square().mean().backward()
    optimizer.step()
weights = hvd.allgather_object(model[0].weight.tolist())
assert weights == SIZE * weights[:1]
hvd.shutdown()
print("all is well", flush=True)
