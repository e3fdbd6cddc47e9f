"""Trains a transformer with layers split over ranks, and the batch split over groups of ranks.

mpirun -n 4 python examples/train_hybrid.py                # 2 x 2: tensor by data parallel
mpirun -n 4 python examples/train_hybrid.py --tensor 4     # every layer split over all ranks
mpirun -n 4 python examples/train_hybrid.py --tensor 1     # only data parallel
python examples/train_hybrid.py --tensor 1                 # one rank; the same result

The data are the modules of the standard library that runs this program. The loss is in bits per
byte; random guesses have 8. Layers are split as in Megatron-LM (Shoeybi et al., 2019). In a pair of
layers, the first is split by its outputs and the second by its inputs, so that the pair needs one
sum in each direction.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mpiring
from mpiring.torch import DataParallel, DistributedSampler

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tensor", type=int, default=2, help="number of ranks that share each layer")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all ranks")
parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--report", type=int, default=20, help="steps between two reports")
parser.add_argument("--save", metavar="PREFIX",
                    help="prefix of the files PREFIX<number>.pt, each with a part of the weights")
args = parser.parse_args()

comm = mpiring.init()
HEADS = 4
if HEADS % args.tensor or comm.size % args.tensor:
    raise SystemExit(f"--tensor {args.tensor}: must divide {HEADS} heads and {comm.size} ranks")
if args.batch % (comm.size // args.tensor):
    raise SystemExit(f"--batch {args.batch} cannot be shared evenly by "
                     f"{comm.size // args.tensor} groups of ranks")
# Neighboring ranks, which are on one node, split each layer, because they synchronize twice per
# layer and direction. Ranks with the same part of the weights split the batch.
tensor = comm.split(comm.rank // args.tensor)
data = comm.split(comm.rank % args.tensor)
# With the same seed, each rank creates the same complete layers. It keeps a part of them.
torch.manual_seed(1)


class Enter(torch.autograd.Function):
    """Passes on `x`, the same on all ranks of the group; sums its gradients over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return tensor.allreduce(gradient.clone(memory_format=torch.contiguous_format))


class Leave(torch.autograd.Function):
    """Sums `x` over the ranks of the group; each rank receives the gradient of the sum."""

    @staticmethod
    def forward(ctx, x):
        return tensor.allreduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ColumnParallel(nn.Module):
    """A linear layer of which this rank has some of the outputs."""

    def __init__(self, inputs, outputs):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(full.weight.detach().chunk(tensor.size)[tensor.rank].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(tensor.size)[tensor.rank].clone())
        self.cut = [self.weight, self.bias]

    def forward(self, x):
        return F.linear(Enter.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    """A linear layer of which this rank has some of the inputs."""

    def __init__(self, inputs, outputs):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(full.weight.detach().chunk(tensor.size, 1)[tensor.rank].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())
        self.cut = [self.weight]

    def forward(self, x):
        return Leave.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    """Attention to earlier bytes, then two layers on each byte."""

    def __init__(self, width):
        super().__init__()
        self.heads = HEADS // tensor.size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = ColumnParallel(width, 3 * width), RowParallel(width, width)
        self.think = nn.Sequential(
            ColumnParallel(width, 4 * width), nn.GELU(), RowParallel(4 * width, width))

    def forward(self, x):
        n, length, _ = x.shape
        # The outputs are in the order of the heads, so that a rank has complete heads.
        qkv = self.attend(self.norm1(x)).view(n, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norm2(x))


class Transformer(nn.Module):
    """Predicts each next byte."""

    def __init__(self, width, layers, context):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x):
        return self.head(self.blocks(self.byte(x) + self.position.weight[:x.shape[1]]))


def text(modules):
    """Return sequences of context + 1 bytes; the last byte is only a target."""
    raw = torch.frombuffer(bytearray(b"".join(m.read_bytes() for m in modules)), dtype=torch.uint8)
    return raw.unfold(0, args.context + 1, args.context)


def bits_per_byte(sequences):
    sequences = sequences.long()
    scores = model(sequences[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten()) / math.log(2)


def clip(limit):
    """Clip gradients by the norm over the complete model; split parameters are on all ranks."""
    squares = {p: p.grad.square().sum() for p in model.parameters()}
    parts = sum(squares.pop(p) for p in cut)
    norm = (tensor.allreduce(parts) + sum(squares.values())).sqrt()
    for p in model.parameters():
        p.grad *= (limit / (norm + 1e-6)).clamp(max=1)


modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
train, validation = text(modules[: -len(modules) // 10]), text(modules[-len(modules) // 10:])
sampler = DistributedSampler(train, data, seed=1, drop_last=True)       # the same in a group
loader = DataLoader(train, args.batch // data.size, sampler=sampler, drop_last=True)
mine = list(DistributedSampler(range(256), data, shuffle=False, pad=False))

model = DataParallel(Transformer(args.width, args.layers, args.context), data)
cut = [p for part in model.modules() for p in getattr(part, "cut", ())]
optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
for step, sequences in zip(range(1, args.steps + 1), loader):
    optimizer.zero_grad()
    loss = bits_per_byte(sequences)
    loss.backward()                     # sums in layers, and means over `data` at the same time
    clip(1.0)
    optimizer.step()
    if step % args.report == 0 or step == args.steps:
        with torch.no_grad():
            held_out = bits_per_byte(validation[mine]) * len(mine)
        data.allreduce(held_out)
        if comm.rank == 0:
            print(f"step {step:5d}  training {loss:.3f}  validation {held_out / 256:.3f} bits per "
                  f"byte", flush=True)

if args.save and data.rank == 0:
    torch.save(model.state_dict(), f"{args.save}{tensor.rank}.pt")
comm.close()
