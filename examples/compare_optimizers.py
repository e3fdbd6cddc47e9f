"""Compares optimizers as batches grow, with equal grids of learning rates, on any number of ranks.

python examples/compare_optimizers.py --quick                   # a trial, in seconds
mpirun -n 2 python examples/compare_optimizers.py --task digits --runs runs.csv
mpirun -n 2 python examples/compare_optimizers.py --task bytes --runs runs.csv

The task `digits` trains a network on scikit-learn's digits in NumPy, and scores test accuracy. The
task `bytes` trains a small transformer on Python's standard library in PyTorch, and scores bits per
byte of held-out modules. All methods see the same samples, have equally many learning rates, and
have the same schedule: linear warm-up over a tenth of the steps, then linear decay to zero. A
larger batch has fewer steps. The file of --runs has a line per run; runs that are already in it are
not repeated.
"""

import argparse
import csv
import itertools
import math
import statistics
import sysconfig
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

import mpiring
from mpiring.numpy import DataParallel
from mpiring.optim import LAMB, LARS, SGD, AdamW
from mpiring.progress import Progress

# By name: the middle of the grid of learning rates, and a function that returns the optimizer.
METHODS = {
    "Nesterov": (0.1, lambda dp, **settings: SGD(
        dp, momentum=0.9, nesterov=True, weight_decay=1e-4, **settings)),
    "AdamW": (1e-3, AdamW), "LARS": (6.4, LARS), "LAMB": (1e-2, LAMB)}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--task", choices=["digits", "bytes"], nargs="+", default=["digits", "bytes"])
parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
parser.add_argument("--batch", type=int, nargs="+", default=[32, 256, 1024],
                    help="samples per step, over all ranks")
parser.add_argument("--rates", type=int, default=7, help="learning rates per method")
parser.add_argument("--factor", type=float, default=4.0, help="ratio of neighboring rates")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--samples", type=int, default=32768, help="samples per run, with repetitions")
parser.add_argument("--at-once", type=int, default=128,
                    help="samples per pass and rank; larger batches are accumulated")
parser.add_argument("--runs", metavar="FILE",
                    help="CSV file of results; runs in it are not repeated")
parser.add_argument("--quick", action="store_true", help="use a small grid and few samples")
args = parser.parse_args()
if args.quick:
    args.batch, args.rates, args.seeds, args.samples = [32, 128], 2, 1, 512

comm = mpiring.init()
threadpool_limits(1)                    # the matrices are too small for several threads


class Digits:
    """Three layers in plain NumPy."""

    unit, sign, worst, no_decay = "test accuracy", 1, 0.0, ("b*",)

    def __init__(self):
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        shuffled = np.random.default_rng(0).permutation(len(images))
        images, self._labels = (images / 16 - 0.3).astype(np.float32)[shuffled], labels[shuffled]
        self._images, self.size = images, len(images) - len(images) // 5

    def start(self, seed):
        """Return new parameters."""
        random, sizes = np.random.default_rng(seed), [64, 128, 128, 10]
        self._params = {}
        for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:]), start=1):
            weights = random.standard_normal((rows, columns)) * np.sqrt(2 / rows)
            self._params[f"w{layer}"] = weights.astype(np.float32)
            self._params[f"b{layer}"] = np.zeros(columns, np.float32)
        return self._params

    def gradients(self, samples):
        """Return the gradients of the sum of these samples' losses, the last layer first."""
        inputs, scores = self._forward(self._images[samples])
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(samples)), self._labels[samples]] -= 1
        gradients = {}
        for layer in (3, 2, 1):
            gradients[f"w{layer}"] = inputs[layer - 1].T @ error
            gradients[f"b{layer}"] = error.sum(axis=0)
            error = (error @ self._params[f"w{layer}"].T) * (inputs[layer - 1] > 0)
        return gradients

    def score(self):
        """Return the sum of scores of this rank's share of the test images, and their number."""
        mine = slice(self.size + comm.rank, None, comm.size)
        right = self._forward(self._images[mine])[1].argmax(axis=1) == self._labels[mine]
        return right.sum(), right.size

    def _forward(self, x):
        inputs = []
        for layer in (1, 2, 3):
            inputs.append(x)
            x = x @ self._params[f"w{layer}"] + self._params[f"b{layer}"]
            if layer < 3:
                x = np.maximum(x, 0)
        return inputs, x


class Bytes:
    """A byte-level transformer of one block, in PyTorch; its parameters are NumPy's memory."""

    unit, sign, worst, no_decay = "bits per byte", -1, 8.0, ("*bias", "*norm*")

    def __init__(self, context=32, width=32):
        import torch

        torch.set_num_threads(1)
        self._torch, self._context, self._width = torch, context, width
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        cut = len(modules) - len(modules) // 10
        train, test = ([b"".join(module.read_bytes() for module in part)]
                       for part in (modules[:cut], modules[cut:]))
        self._train, self._test = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)
            for text, in (train, test))
        self.size, self._test = len(self._train), self._test[:512]

    def start(self, seed):
        """Return new parameters."""
        torch, nn, width = self._torch, self._torch.nn, self._width
        torch.manual_seed(seed)
        self._model = nn.ModuleDict({
            "byte": nn.Embedding(256, width), "position": nn.Embedding(self._context, width),
            "norm1": nn.LayerNorm(width), "attend": nn.Linear(width, 3 * width),
            "project": nn.Linear(width, width), "norm2": nn.LayerNorm(width),
            "think": nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            "norm3": nn.LayerNorm(width), "head": nn.Linear(width, 256)})
        return {name: p.detach().numpy() for name, p in self._model.named_parameters()}

    def gradients(self, samples):
        """Return the gradients of the sum of these samples' losses, the last layer first."""
        self._model.zero_grad()
        self._losses(self._train[samples]).sum().backward()
        named = reversed(list(self._model.named_parameters()))
        return {name: p.grad.numpy() for name, p in named}

    def score(self):
        """Return the sum of scores of this rank's share of the test, and their number."""
        with self._torch.no_grad():
            losses = self._losses(self._test[comm.rank::comm.size])
        return losses.sum().item() / math.log(2), len(losses)

    def _losses(self, sequences):
        """Return the mean loss of each sequence."""
        m, sequences = self._model, sequences.long()
        x = m["byte"](sequences[:, :-1]) + m["position"].weight
        n, length, width = x.shape
        qkv = m["attend"](m["norm1"](x)).view(n, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = self._torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + m["project"](seen.transpose(1, 2).reshape(n, length, width))
        scores = m["head"](m["norm3"](x + m["think"](m["norm2"](x))))
        return self._torch.nn.functional.cross_entropy(
            scores.transpose(1, 2), sequences[:, 1:], reduction="none").mean(dim=1)


@np.errstate(all="ignore")              # rates that are too large are part of the grid
def run(task, samples, batch, method, rate, seed):
    """Train once, and return the score: the worst one if gradients have overflowed."""
    steps = samples // batch
    warm_up = max(1, steps // 10)

    def scheduled(step):
        return rate * min((step + 1) / warm_up, (steps - step) / (steps - warm_up))

    random = np.random.default_rng(seed)
    epochs = (random.permutation(task.size) for _ in itertools.count())
    order = itertools.chain.from_iterable(epochs)       # the same on all ranks, and for all methods
    dp = DataParallel(task.start(seed), comm)
    optimizer = METHODS[method][1](dp, lr=scheduled, no_decay=task.no_decay, sharded=True)
    for _ in range(steps):
        mine = np.fromiter(itertools.islice(order, batch), int, batch)[comm.rank::comm.size]
        passes = [mine[start:start + args.at_once] for start in range(0, len(mine), args.at_once)]
        for part in passes:
            for name, gradient in task.gradients(part).items():
                gradient = gradient * np.float32(comm.size / batch)
                if part is passes[0]:
                    dp.grads[name][...] = gradient
                else:
                    dp.grads[name] += gradient
                if part is passes[-1]:
                    dp.ready(name)
        optimizer.step()
        if not dp.finite:
            return task.worst
    total, number = comm.allreduce(np.array(task.score(), np.float64))
    score = total / number
    return max(score, task.worst) if task.sign > 0 else min(score, task.worst)


def summary(name, task, batch, runs):
    """Return lines of a Markdown table with the score of each method at a batch.

    A score is the mean over seeds at the best rate, with the standard deviation. A method ties with
    the best method if their scores differ by no more than the larger deviation. The last column is
    the share of all runs with a score within 1 % of this mean or better.
    """
    best = {}
    for method in args.method:
        by_rate = {}
        for (*which, rate, _), score in runs.items():
            if which == [name, args.samples, batch, method]:
                by_rate.setdefault(rate, []).append(score)
        means = {rate: statistics.fmean(scores) for rate, scores in by_rate.items()}
        rate = max(means, key=lambda rate: task.sign * means[rate])
        spread = statistics.stdev(by_rate[rate]) if len(by_rate[rate]) > 1 else 0.0
        scores = [score for at_rate in by_rate.values() for score in at_rate]
        near = sum(abs(score - means[rate]) <= 0.01 * means[rate]
                   or task.sign * score > task.sign * means[rate] for score in scores)
        edge = " (edge)" if rate in (min(means), max(means)) else ""
        best[method] = means[rate], spread, f"{rate:.2g}{edge}", near / len(scores)
    best_mean, best_spread, *_ = max(best.values(), key=lambda row: task.sign * row[0])
    digits = (lambda x: f"{x:.2%}") if task.sign > 0 else (lambda x: f"{x:.3f}")
    return [f"| {name} | {batch} | {args.samples // batch} | {method} | {digits(mean)} "
            f"| {digits(spread)} "
            f"| {'yes' if abs(mean - best_mean) <= max(spread, best_spread) else ''} "
            f"| {rate} | {near:.0%} |"
            for method, (mean, spread, rate, near) in best.items()]


def grid(method):
    """Return the learning rates."""
    return [float(f"{METHODS[method][0] * args.factor ** (i - args.rates // 2):.4g}")
            for i in range(args.rates)]


runs = {}
if comm.rank == 0 and args.runs and Path(args.runs).exists():
    with open(args.runs, newline="") as file:
        runs = {(task, int(samples), int(batch), method, float(rate), int(seed)): float(score)
                for task, samples, batch, method, rate, seed, score in csv.reader(file)}
runs = comm.broadcast_object(runs, root=0)
tasks = {name: {"digits": Digits, "bytes": Bytes}[name]() for name in args.task}
wanted = [(name, args.samples, batch, method, rate, seed) for name in tasks for batch in args.batch
          for method in args.method for rate in grid(method) for seed in range(args.seeds)]
todo = [key for key in wanted if key not in runs]
with Progress("runs", len(todo), shown=comm.rank == 0) as progress:
    for key in todo:
        runs[key] = run(tasks[key[0]], *key[1:])
        if comm.rank == 0 and args.runs:
            with open(args.runs, "a", newline="") as file:
                csv.writer(file).writerow([*key, f"{runs[key]:.6g}"])
        progress.step()
if comm.rank == 0:
    runs = {key: runs[key] for key in wanted}
    print("| task | batch | steps | method | best | deviation | first, or a tie | rate "
          "| within 1 % |\n| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |")
    for name, batch in itertools.product(tasks, args.batch):
        print("\n".join(summary(name, tasks[name], batch, runs)))
comm.close()
