"""Trains a byte-level transformer on Python's own source text, on any number of ranks.

python examples/train_torch.py                                    # one rank
mpirun -n 4 python examples/train_torch.py                        # four ranks, the same result
mpirun -n 4 python examples/train_torch.py --checkpoint run1      # stop and resume it
mpirun -n 4 python examples/train_torch.py --device cuda          # on GPUs, assigned in turn

The data are the modules of the standard library that runs this program: about ten million
bytes of real text on every machine. The loss is in bits per byte; random guesses have 8.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mpiring
from mpiring.data import prefetch
from mpiring.progress import Progress
from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK
from mpiring.resilience import Stopping
from mpiring.torch import DataParallel, DistributedSampler, TrainState, device_for

# Methods to compress gradients between nodes, which saves time on a slow network.
REDUCERS = {"mean": lambda: None, "cast": lambda: Cast("bfloat16"),
            "int8": lambda: ErrorFeedback(Int8()), "onebit": lambda: OneBit(warmup_steps=20),
            "topk": lambda: TopK(warmup_steps=50), "powersgd": lambda: PowerSGD(rank=4)}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all ranks")
parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--reducer", choices=REDUCERS, default="mean", help="Reducer between nodes")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                    help="device; the GPUs of a node are assigned to its ranks in turn")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint", metavar="FOLDER",
                    help="folder to resume from, and to save to every --report steps and at a stop")
parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of the job")
parser.add_argument("--metrics", metavar="FILE", help="file that gets a line of JSON per report")
parser.add_argument("--save", metavar="FILE", help="file for the final weights")
parser.add_argument("--report", type=int, default=50, help="steps between two reports")
args = parser.parse_args()

comm = mpiring.init()
if args.batch % comm.size:
    raise SystemExit(f"--batch {args.batch} cannot be shared evenly by {comm.size} ranks")
torch.manual_seed(args.seed)
device = device_for(comm) if args.device == "cuda" else torch.device("cpu")


class Block(nn.Module):
    """Attention to earlier bytes, then two layers on each byte."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, length, width = x.shape
        qkv = self.attend(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, length, width))
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
    data = torch.frombuffer(bytearray(b"".join(m.read_bytes() for m in modules)), dtype=torch.uint8)
    return data.unfold(0, args.context + 1, args.context)


def bits_per_byte(model, sequences):
    sequences = sequences.long()
    scores = model(sequences[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten()) / math.log(2)


modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
train, validation = text(modules[: -len(modules) // 10]), text(modules[-len(modules) // 10:])
sampler = DistributedSampler(train, comm, seed=args.seed, drop_last=True)
loader = DataLoader(train, args.batch // comm.size, sampler=sampler, drop_last=True)
mine = DistributedSampler(range(min(256, len(validation))), comm, shuffle=False, pad=False)

model = DataParallel(Transformer(args.width, args.layers, args.context).to(device), comm,
                     reducer=REDUCERS[args.reducer]())
optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
state = TrainState(comm, seed=args.seed, model=model, optimizer=optimizer, sampler=sampler)
step = state.restore(args.checkpoint)           # 0 without a checkpoint


@torch.no_grad()
def validate():
    """Return the mean over all ranks' shares of the validation sequences."""
    shares = validation[list(mine)].to(device).split(32)
    total = torch.tensor([sum(bits_per_byte(model, share).item() * len(share) for share in shares),
                          float(len(mine))], dtype=torch.float64)
    comm.allreduce(total)
    return (total[0] / total[1]).item()


def train(sequences):
    """Do one step, and return the loss of this rank's share of the batch."""
    optimizer.zero_grad()
    loss = bits_per_byte(model, sequences)
    loss.backward()                             # gradients are sent while it runs
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


began, first = time.perf_counter(), step
with Stopping(comm, time_limit_s=args.time_limit, checkpoints=state) as stopping, \
        Progress("training", args.steps, shown=comm.rank == 0, done=step,
                 metrics=args.metrics) as progress:
    while step < args.steps and not stopping.reason:
        seen = 0                                # samples that this rank has trained on
        for sequences in prefetch(loader, device, comm=comm):
            loss = train(sequences)
            step += 1
            seen += len(sequences)
            progress.step()
            if step % args.report == 0 or step == args.steps:
                held_out = validate()
                rate = (step - first) * args.batch * args.context / (time.perf_counter() - began)
                progress.say(f"step {step:5d}  training {loss:.3f}  validation {held_out:.3f} "
                             f"bits per byte  {rate:,.0f} bytes/s")
                progress.record(step, training=loss, validation=held_out, bytes_per_s=rate)
                state.save(args.checkpoint, step, seen=seen)
            if step == args.steps or stopping.now():    # on all ranks at the same step
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    if stopping.reason:
        state.save(args.checkpoint, step, seen=seen)
        progress.say(f"stopped at step {step}: {stopping.reason}")

state.close()
if args.save and comm.rank == 0 and not stopping.reason:
    torch.save(model.state_dict(), args.save)
comm.close()
