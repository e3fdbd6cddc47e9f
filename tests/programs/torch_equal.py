"""Trains a model by mpiring's DataParallel and by PyTorch's over Gloo: all must be equal.

On the CPU, or on a GPU; see whereabouts.
"""

import copy
import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from whereabouts import WHERE

import mpiring
from mpiring.torch import DataParallel

# Rounding grows apart with time; replicas never may.
TOGETHER, STEPS = 10, int(sys.argv[2])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)[:, -1]}


class ControlFlow(nn.Module):
    """Takes a branch by the data: ranks use different parameters, and some nobody uses."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(20, 5) for _ in range(4))

    def forward(self, x):
        return self.branches[int(x.sum() * 1000) % 3](x)


def embeddings(sparse=False):
    return nn.Sequential(nn.EmbeddingBag(500, 16, sparse=sparse), nn.Linear(16, 5))


def numbers(rng, n):
    return torch.randn(n, 20, generator=rng), torch.randint(0, 5, (n,), generator=rng)


def images(rng, n):
    return torch.randn(n, 3, 8, 8, generator=rng), torch.randint(0, 5, (n,), generator=rng)


def words(rng, n):
    return torch.randint(0, 64, (n, 12), generator=rng), torch.randint(0, 5, (n,), generator=rng)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)), numbers, {}),
    "conv": (lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)),
        images, {}),
    "channels_last": (lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5),
    ).to(memory_format=torch.channels_last), images, {}),
    "transformer": (Transformer, words, {}),
    "embedding": (embeddings, words, {}),
    "sparse": (lambda: embeddings(sparse=True), words, {}),
    "control": (ControlFlow, numbers, {"find_unused_parameters": True}),
}


def step_of(model, optimizer, x, y, *, to_none, clips):
    """Take a step, and return the loss."""
    optimizer.zero_grad(set_to_none=to_none)
    out = model(x)
    loss = F.cross_entropy(out["logits"] if isinstance(out, dict) else out, y)
    loss.backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item()


def compare(name):
    torch.manual_seed(comm.rank)
    make, data, options = MODELS[name]
    theirs = make().to(WHERE)
    ours = copy.deepcopy(theirs)
    theirs = nn.parallel.DistributedDataParallel(theirs, **options)
    ours = DataParallel(ours, comm, bucket_bytes=4000, **options)
    momentum = 0.0 if name == "sparse" else 0.9
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
                  for model in (ours, theirs)]
    rng = torch.Generator().manual_seed(100 + comm.rank)
    for step in range(STEPS):
        x, y = (array.to(WHERE) for array in data(rng, 6))
        how = {"to_none": step % 2 == 0, "clips": step % 5 == 4 and name != "sparse"}
        loss = step_of(ours, optimizers[0], x, y, **how)
        if step >= TOGETHER:
            continue
        other = step_of(theirs, optimizers[1], x, y, **how)
        assert abs(loss - other) < 1e-4 * max(1, abs(other)), (name, step, loss, other)
        for (key, a), b in zip(ours.state_dict().items(), theirs.module.state_dict().values()):
            if comm.rank and "running" in key:
                # BatchNorm's statistics are rank 0's again already.
                continue
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6, msg=f"{key} in step {step}")
    for key, value in ours.state_dict().items():
        everyone = comm.allgather_object(value.contiguous().cpu().numpy().tobytes())
        assert len(set(everyone)) == 1, f"replicas differ: {key}"
    if comm.rank == 0:
        print(f"equal: {name}", flush=True)


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
comm = mpiring.init()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=comm.rank,
                        world_size=comm.size, timeout=datetime.timedelta(seconds=60))
for name in MODELS:
    compare(name)
comm.close()
dist.destroy_process_group()
print("all is well", flush=True)
