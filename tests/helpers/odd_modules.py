"""Trains modules of odd sizes, for tests of the PyTorch adapter on real MPI."""

import torch
from torch import nn

from mpiring.torch import DataParallel


class Odd(nn.Module):
    """Tensors of odd sizes, including a scalar, and a tensor that is not in C order."""

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


class OddWithBuffers(Odd):
    """A module that also has statistics and a frozen parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype)
        self.norm = nn.BatchNorm1d(6, affine=False).to(dtype)
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return super().forward(self.norm(x)) + self.frozen


def loss_of(model, comm, step):
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(8, n, generator=generator).to(dtype) for n in (6, 3))
    return (model(x) - y).square().mean()


def wrapped(comm, dtype=torch.float32, make=Odd, **settings):
    return DataParallel(make(dtype), comm, **{"bucket_bytes": 700, **settings})


def train(model, optimizer, comm, steps, *, outer=None, factor=1.0):
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, comm, step) * factor).backward()
        optimizer.step()
        if outer is not None:
            outer.step()


def bits(tensors):
    """Return tensors as bytes; bfloat16 is converted to float32."""
    return [x.detach().float().numpy().tobytes() for x in tensors]


def equal_on_all(tensors, comm):
    own_bits = bits(tensors)
    return all(other_bits == own_bits for other_bits in comm.allgather_object(own_bits))
