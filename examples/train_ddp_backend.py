"""Trains with PyTorch's own DistributedDataParallel over MPI. Only one line is special.

mpirun -n 4 python examples/train_ddp_backend.py
srun -n 4 python examples/train_ddp_backend.py

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpiring.torch  # noqa: F401 (registers the back end)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", default="mpiring", help="back end, or gloo under torchrun")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks")
parser.add_argument("--save", metavar="FILE", help="file for the weights")
args = parser.parse_args()

# This line is special. It needs no address, port or RANK, because MPI provides them.
dist.init_process_group(args.backend, "mpi://" if args.backend == "mpiring" else "env://")
rank, size = dist.get_rank(), dist.get_world_size()

# Every rank reads the same data and splits it in the same way: one fifth for the test.
torch.manual_seed(0)
images, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
images = images.float() / 16 - 0.3
shuffled = torch.randperm(len(images))
test, train = shuffled[:len(images) // 5], shuffled[len(images) // 5:]
dataset = TensorDataset(images[train], labels[train])
sampler = DistributedSampler(dataset, seed=1)
loader = DataLoader(dataset, args.batch // size, sampler=sampler)

model = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(),
    nn.Linear(128, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    total = torch.zeros(())
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    model.eval()
    with torch.no_grad():
        accuracy = (model.module(images[test]).argmax(1) == labels[test]).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1:3}  loss {total / len(loader) / size:.4f}  "
              f"test accuracy {accuracy:.2%}", flush=True)

if args.save and rank == 0:
    torch.save(model.module.state_dict(), args.save)
dist.destroy_process_group()
