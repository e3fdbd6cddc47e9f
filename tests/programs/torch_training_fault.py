"""Trains on several ranks, of which the last one does something wrong in the third step."""

import sys

import torch
from torch import nn

import mpiring
from mpiring.torch import DataParallel

kind = sys.argv[1]
comm = mpiring.init()
last = comm.rank == comm.size - 1


class Net(nn.Linear):
    def forward(self, x):
        if step == 2 and last and kind == "forward":
            raise ValueError("a bug in forward")
        return super().forward(x)


step = -1
model = DataParallel(Net(4, 3), comm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    wrong = last and step == 2
    if wrong and kind == "exit":
        sys.exit(0)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
comm.close()
print("unreachable", flush=True)
