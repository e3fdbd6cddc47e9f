"""Trains a PyTorch model for some steps, with an optimizer, and a trace."""

import torch

import mpiring
from mpiring.torch import DataParallel

comm = mpiring.init()
torch.manual_seed(0)
model = DataParallel(torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.ReLU(),
                                         torch.nn.Linear(300, 100)), comm)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(8, 200)).square().mean().backward()
    optimizer.step()
comm.close()
