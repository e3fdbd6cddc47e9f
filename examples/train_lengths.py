"""Trains on samples of very different lengths, the functions of Python's standard library.

python examples/train_lengths.py                                # one rank
mpirun -n 4 python examples/train_lengths.py                    # four ranks, the same result
mpirun -n 4 python examples/train_lengths.py --framework numpy  # plain NumPy instead of PyTorch
mpirun -n 4 python examples/train_lengths.py --checkpoint run1  # stop and resume it

Each function is a sample, and each byte is a token, predicted from the bytes before it. All batches
have about the same number of tokens, and so do the ranks' shares of a batch. The loss on held-out
modules is in bits per byte; random guesses have 8.
"""

import argparse
import ast
import math
import sysconfig
import time
from pathlib import Path

import numpy as np

import mpiring
from mpiring.data import TokenBatches, prefetch
from mpiring.progress import Progress
from mpiring.resilience import Stopping

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--framework", choices=["torch", "numpy"], default="torch")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--tokens", type=int, default=16384, help="largest number of tokens per step")
parser.add_argument("--longest", type=int, default=1024, help="length to which functions are cut")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--modules", type=int, help="number of modules to use (default: all)")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint", metavar="FOLDER",
                    help="folder to resume from, and to save to every --report steps and at a stop")
parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of the job")
parser.add_argument("--metrics", metavar="FILE", help="file that gets a line of JSON per report")
parser.add_argument("--report", type=int, default=50, help="steps between two reports")
args = parser.parse_args()


def functions_of(module):
    """Return the functions and methods of a module, as vectors of bytes, cut to the longest."""
    lines = module.read_bytes().splitlines(keepends=True)
    sources = (b"".join(lines[node.lineno - 1:node.end_lineno])
               for node in ast.walk(ast.parse(b"".join(lines)))
               if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [np.frombuffer(source[:args.longest], np.uint8) for source in sources]


if args.framework == "torch":
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from mpiring.torch import DataParallel, TrainState, share_cores

    class Transformer(nn.Module):
        """Scores each next byte, given the bytes before it."""

        def __init__(self, width, layers=2):
            super().__init__()
            self.byte, self.position = nn.Embedding(256, width), nn.Embedding(args.longest, width)
            layer = nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
            mask = nn.Transformer.generate_square_subsequent_mask(args.longest)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x):
            length = x.shape[1]
            x = self.byte(x) + self.position.weight[:length]
            return self.head(self.body(x, self.mask[:length, :length], is_causal=True))

    class Learner:
        """A transformer; functions are padded to the longest in the batch."""

        def __init__(self, comm):
            share_cores(comm)
            torch.manual_seed(args.seed)
            self.model = DataParallel(Transformer(args.width), comm)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate)

        def batch_of(self, functions):
            """Return inputs and targets; the target -100 is padding, and is ignored."""
            functions = [torch.tensor(x, dtype=torch.long) for x in functions]
            # A rank without functions also runs the model, on one byte.
            targets = pad_sequence(functions or [torch.tensor([-100])], True, -100)
            return nn.functional.pad(targets.clamp(min=0), (1, -1)), targets

        def bits_of(self, batch):
            """Return the loss of a batch in bits."""
            before, targets = batch
            return cross_entropy(self.model(before).flatten(0, 1), targets.flatten(),
                                 reduction="sum") / math.log(2)

        def tokens_of(self, batch):
            return int((batch[1] >= 0).sum())

        def step(self, batch):
            """Learn from a batch."""
            tokens = self.tokens_of(batch)
            self.model.weigh(tokens)            # the mean over ranks is the mean over all tokens
            self.optimizer.zero_grad()
            (self.bits_of(batch) / max(1, tokens)).backward()
            self.optimizer.step()

        evaluating = torch.no_grad
else:
    from contextlib import nullcontext

    from threadpoolctl import threadpool_limits

    from mpiring.numpy import DataParallel, TrainState
    from mpiring.optim import AdamW

    class Learner:
        """Two layers that read the eight bytes before each byte: nothing has to be padded."""

        def __init__(self, comm, context=8):
            # Ranks on one node share its cores; NumPy's threads would compete for them.
            threadpool_limits(1)
            random, width = np.random.default_rng(args.seed), args.width
            shapes = {"byte": (256, 16), "w1": (context * 16, width), "w2": (width, 256)}
            self.params = {name: (random.standard_normal(shape) * shape[0] ** -0.5).astype("f")
                           for name, shape in shapes.items()}
            self.context = context
            self.params |= {"b1": np.zeros(width, "f"), "b2": np.zeros(256, "f")}
            self.model = DataParallel(self.params, comm)
            self.optimizer = AdamW(self.model, lr=args.learning_rate, no_decay=["b*"])

        def batch_of(self, functions):
            """Return inputs and targets, one function after the other."""
            nothing = np.zeros(self.context, np.uint8)
            before = [np.lib.stride_tricks.sliding_window_view(
                np.concatenate([nothing, x[:-1]]), self.context) for x in functions]
            return np.concatenate([nothing.reshape(1, -1)[:0], *before]), np.concatenate(
                [nothing[:0], *functions])

        def forward(self, before):
            """Return both layers' inputs, and the scores of each next byte."""
            params = self.params
            x = params["byte"][before].reshape(len(before), len(params["w1"]))
            hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
            return x, hidden, hidden @ params["w2"] + params["b2"]

        def bits_of(self, batch):
            """Return the loss of a batch in bits."""
            before, targets = batch
            probabilities = softmax(self.forward(before)[-1])
            return -np.log2(probabilities[np.arange(len(targets)), targets]).sum()

        def tokens_of(self, batch):
            return len(batch[1])

        def step(self, batch):
            """Learn from a batch."""
            before, targets = batch
            self.model.weigh(len(targets))      # the mean over ranks is the mean over all tokens
            x, hidden, scores = self.forward(before)
            error = softmax(scores)
            error[np.arange(len(targets)), targets] -= 1
            error /= max(1, len(targets))
            self.ready("w2", hidden.T @ error)
            self.ready("b2", error.sum(axis=0))
            error = error @ self.params["w2"].T * (hidden > 0)
            self.ready("w1", x.T @ error)
            self.ready("b1", error.sum(axis=0))
            error = (error @ self.params["w1"].T).reshape(-1, 16)
            self.model.grads["byte"][...] = 0
            np.add.at(self.model.grads["byte"], before.ravel(), error)
            self.model.ready("byte")
            self.optimizer.step()

        def ready(self, name, gradient):
            self.model.grads[name][...] = gradient
            self.model.ready(name)              # sent while the next gradients are computed

        evaluating = nullcontext

    def softmax(scores):
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        return exponents / exponents.sum(axis=1, keepdims=True)


comm = mpiring.init()
modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:args.modules]
train = [x for module in modules[:-len(modules) // 10] for x in functions_of(module)]
held_out = [x for module in modules[-len(modules) // 10:] for x in functions_of(module)]
held_out = sorted(held_out[::max(1, len(held_out) // 128)], key=len)[comm.rank::comm.size]
batches = TokenBatches([len(x) for x in train], comm, tokens=args.tokens, seed=args.seed)

learner = Learner(comm)
state = TrainState(comm, seed=args.seed, model=learner.model, optimizer=learner.optimizer,
                   batches=batches)
step = state.restore(args.checkpoint)           # 0 without a checkpoint


def validate():
    """Return the bits per byte of held-out functions; ranks share the work."""
    with learner.evaluating():
        bits = sum(float(learner.bits_of(learner.batch_of(held_out[i:i + 8])))
                   for i in range(0, len(held_out), 8))
    total = comm.allreduce(np.array([bits, sum(map(len, held_out))]))
    return total[0] / total[1]


began, tokens = time.perf_counter(), 0
with Stopping(comm, time_limit_s=args.time_limit, checkpoints=state) as stopping, \
        Progress("training", args.steps, shown=comm.rank == 0, done=step,
                 metrics=args.metrics) as progress:
    progress.say(f"{len(train):,} functions in {len(batches)} batches: imbalance of ranks "
                 f"{batches.imbalance:.1%}, padding, where there is any, {batches.padding:.1%}")
    while step < args.steps and not stopping.reason:
        seen = 0                                # batches of this iteration: the rest of an epoch
        loader = (learner.batch_of([train[i] for i in mine]) for mine in batches)
        for batch in prefetch(loader, "cpu", comm=comm):
            learner.step(batch)
            tokens += learner.tokens_of(batch)
            step, seen = step + 1, seen + 1
            progress.step()
            if step % args.report == 0 or step == args.steps:
                bits = validate()
                rate = comm.allreduce(np.array([tokens]))[0] / (time.perf_counter() - began)
                progress.say(f"step {step:5d}  held out {bits:.3f} bits per byte  "
                             f"{rate:,.0f} tokens/s")
                progress.record(step, held_out=bits, tokens_per_s=rate)
                state.save(args.checkpoint, step, seen=seen)
            if step == args.steps or stopping.now():    # on all ranks at the same step
                break
    if stopping.reason:
        state.save(args.checkpoint, step, seen=seen)
        progress.say(f"stopped at step {step}: {stopping.reason}")

state.close()
comm.close()
