"""Trains a network in plain NumPy on real handwritten digits, on ranks of different speeds.

mpirun -n 4 python examples/train_async.py                          # a parameter server
mpirun -n 4 python examples/train_async.py --staleness none         # no rank waits
mpirun -n 4 python examples/train_async.py --way pairs              # averages in random pairs
mpirun -n 4 python examples/train_async.py --way synchronous        # an allreduce in each step
mpirun -n 4 python examples/train_async.py --straggler 30,0.25      # some steps 30 ms longer

The data are scikit-learn's 1,797 digits of 8 x 8 pixels, a fifth of them for the test. Each rank
trains on its own share and in its own batches.
"""

import argparse
import os
import time
from functools import partial

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import mpiring
from mpiring.asynchronous import PairAveraging
from mpiring.numpy import AsyncDataParallel, DataParallel
from mpiring.optim import SGD


def straggling(text):
    """Return the seconds and the share of the steps in a string such as "30,0.25"."""
    milliseconds, share = map(float, text.split(","))
    return milliseconds / 1000, share


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--way", choices=["server", "pairs", "synchronous"], default="server")
parser.add_argument("--staleness", type=lambda x: None if x == "none" else int(x), default=4,
                    help="largest number of steps by which a rank may be ahead, or 'none'")
parser.add_argument("--straggler", type=straggling, default=(0.0, 0.0), metavar="MS,SHARE",
                    help="pause in milliseconds, and share of the steps that have it, at random")
parser.add_argument("--compute", type=float, default=0.0, metavar="MS",
                    help="pause in every step, as if the model were larger")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=32, help="images per step, over all ranks")
parser.add_argument("--learning-rate", type=float, default=0.3,
                    help="initial rate, which falls to 0")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

comm = mpiring.init()
threadpool_limits(max(1, os.cpu_count() // comm.local_size))
images, labels = load_digits(return_X_y=True)
images = (images / 16.0 - 0.3).astype(np.float32)
test, train_set = np.split(np.random.default_rng(0).permutation(len(images)), [len(images) // 5])
mine = train_set[comm.rank::comm.size]
batch = max(1, args.batch // comm.size)
# All ranks take the same number of steps, although their shares may differ by an image.
steps = args.epochs * (len(train_set) // comm.size // batch)

random = np.random.default_rng(args.seed)
params = {
    "w1": (random.standard_normal((64, 128)) * np.sqrt(2 / 64)).astype(np.float32),
    "b1": np.zeros(128, np.float32),
    "w2": (random.standard_normal((128, 10)) * np.sqrt(2 / 128)).astype(np.float32),
    "b2": np.zeros(10, np.float32)}


def rate(update, updates):
    """Return the learning rate, which ends near 0, so that no late update dominates."""
    return args.learning_rate * max(0.0, 1 - update / updates)


def gradients_of(x, label):
    """Return the gradients of the mean loss over a batch."""
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    scores = hidden @ params["w2"] + params["b2"]
    error = np.exp(scores - scores.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(label)), label] -= 1
    error /= len(label)
    below = (error @ params["w2"].T) * (hidden > 0)
    return {"w2": hidden.T @ error, "b2": error.sum(axis=0),
            "w1": x.T @ below, "b1": below.sum(axis=0)}


if args.way == "server":
    # Updates are one per clock, or one per push of any rank.
    updates = steps if args.staleness == 0 else steps * comm.size
    way = AsyncDataParallel(params, comm, optimizer=partial(SGD, lr=partial(rate, updates=updates)),
                            staleness=args.staleness)
    step = way.step
elif args.way == "pairs":
    way, done = PairAveraging(params, comm, seed=args.seed), 0

    def step(gradients):
        """Update this rank's own weights, and exchange them in the background."""
        global done
        for name, gradient in gradients.items():
            params[name] -= rate(done, steps) * gradient
        done += 1
        way.step()
else:
    way = DataParallel(params, comm)
    optimizer = SGD(way, lr=partial(rate, updates=steps))

    def step(gradients):
        """Average the gradients of all ranks, and update."""
        for name, gradient in gradients.items():
            way.grads[name][...] = gradient
            way.ready(name)
        optimizer.step()

shuffles, delays = (np.random.default_rng([args.seed, comm.rank, i]) for i in range(2))
order, late_s, share = mine, *args.straggler
comm.barrier()
began, position = time.perf_counter(), len(mine)
for _ in range(steps):
    if position + batch > len(mine):
        order, position = shuffles.permutation(mine), 0
    chosen = order[position:position + batch]
    position += batch
    time.sleep(args.compute / 1000 + late_s * (delays.random() < share))
    step(gradients_of(images[chosen], labels[chosen]))
seconds = time.perf_counter() - began
if args.way != "synchronous":
    way.close()                              # all ranks have the same weights now

rate = comm.allreduce(steps * batch / seconds)
scores = np.maximum(images[test] @ params["w1"] + params["b1"], 0) @ params["w2"] + params["b2"]
if comm.rank == 0:
    accuracy = float((scores.argmax(axis=1) == labels[test]).mean())
    print(f"{args.way}: test accuracy {accuracy:.2%}, {rate:,.0f} images/s")
comm.close()
