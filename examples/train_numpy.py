"""Trains a network in plain NumPy on real handwritten digits, on any number of ranks.

python examples/train_numpy.py                  # one rank
mpirun -n 4 python examples/train_numpy.py      # four ranks, the same result, sooner
srun -n 4 python examples/train_numpy.py        # the same under Slurm
mpirun -n 4 python examples/train_numpy.py --dtype float16      # half the bytes

The data are scikit-learn's 1,797 digits of 8 x 8 pixels. The global batch is
the same for any number of ranks: each rank takes its share.
"""

import argparse
import os
import sys
import time

import ml_dtypes
import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import mpiring
from mpiring.numpy import DataParallel, LossScaler, MasterWeights
from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK

# What nodes send each other of the gradients: the less, the sooner over a slow network.
REDUCERS = {"mean": lambda: None, "cast": lambda: Cast("bfloat16"),
            "int8": lambda: ErrorFeedback(Int8()), "onebit": lambda: OneBit(warmup_steps=45),
            "topk": lambda: TopK(warmup_steps=75), "powersgd": lambda: PowerSGD(rank=2)}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks")
parser.add_argument("--learning-rate", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--bucket-bytes", type=int, default=128 << 10)
parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                    help="of weights, gradients and messages; arithmetic is float32")
parser.add_argument("--reducer", choices=REDUCERS, default="mean", help="used between nodes")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", metavar="PREFIX", help="write weights to PREFIX<rank>.npz")
args = parser.parse_args()

comm = mpiring.init()
# Ranks on one node share its cores; NumPy's threads would fight over them.
threadpool_limits(max(1, os.cpu_count() // comm.local_size))

# Every rank reads the same data and splits it in the same way: one fifth for the test.
images, labels = load_digits(return_X_y=True)
images = (images / 16.0 - 0.3).astype(np.float32)
shuffled = np.random.default_rng(0).permutation(len(images))
test, train = np.split(shuffled, [len(images) // 5])

# Three layers. Only rank 0's initial weights matter: they are broadcast.
dtype = ml_dtypes.bfloat16 if args.dtype == "bfloat16" else np.dtype(args.dtype)
sizes = [images.shape[1], args.hidden, args.hidden, 10]
random = np.random.default_rng(args.seed)
params = {}
for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:]), start=1):
    weights = random.standard_normal((rows, columns)) * np.sqrt(2 / rows)
    params[f"w{layer}"] = weights.astype(dtype)
    params[f"b{layer}"] = np.zeros(columns, dtype)
dp = DataParallel(
    params, comm, bucket_bytes=args.bucket_bytes, reducer=REDUCERS[args.reducer]())

# Weights of 16 bits are updated in float32, and gradients must not vanish in them. In
# float32 masters are the weights themselves, and the scale, a power of two, rounds nothing.
masters, scaler = MasterWeights(dp), LossScaler(dp)
velocity = {name: np.zeros_like(master) for name, master in masters.items()}
# Every thousandth step, ranks find out whether they all have the same bits, as in params.
dp.watch(masters=masters, velocity=velocity)


def forward(x):
    """Return the input of each layer, and the scores of the ten classes."""
    inputs = []
    for layer in range(1, len(sizes)):
        inputs.append(x)
        x = x @ params[f"w{layer}"] + params[f"b{layer}"]
        if layer < len(sizes) - 1:
            x = np.maximum(x, 0)
    return inputs, x


@np.errstate(over="ignore")        # of float16: such a step is skipped, with a smaller scale next
def backward(inputs, error):
    """Write every layer's gradient and hand it over, the last layer first."""
    for layer in reversed(range(1, len(sizes))):
        x = inputs[layer - 1]
        np.matmul(x.T, error, out=dp.grads[f"w{layer}"])
        dp.ready(f"w{layer}")
        np.sum(error, axis=0, out=dp.grads[f"b{layer}"])
        dp.ready(f"b{layer}")
        # While these travel, the next layer's are computed.
        if layer > 1:
            error = (error @ params[f"w{layer}"].T) * (x > 0)


def probabilities_of(scores):
    """Return the softmax of each row."""
    exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


for epoch in range(args.epochs):
    order = np.random.default_rng((args.seed, epoch)).permutation(train)
    batches = [order[start:start + args.batch] for start in range(0, len(order), args.batch)]
    began = time.perf_counter()
    loss_sum, statistics = np.zeros(1), mpiring.Statistics()
    interactive = comm.rank == 0 and sys.stderr.isatty()
    for batch in tqdm(batches, f"epoch {epoch + 1}", leave=False, disable=not interactive):
        mine = batch[comm.rank::comm.size]
        inputs, scores = forward(images[mine])
        probabilities = probabilities_of(scores)
        picked = np.arange(len(mine)), labels[mine]
        loss_sum -= np.log(probabilities[picked]).sum()
        error = probabilities
        error[picked] -= 1
        # Shares may differ by an image. With this factor the mean over ranks is
        # the mean over the global batch.
        backward(inputs, error * (scaler.scale * comm.size / len(batch)))
        dp.wait()
        statistics += dp.statistics
        if scaler.step():
            for name, master in masters.items():
                velocity[name] *= args.momentum
                velocity[name] += scaler.unscaled(name)
                master -= args.learning_rate * velocity[name]
            masters.round_off()
    seconds = time.perf_counter() - began
    comm.allreduce(loss_sum)
    accuracy = np.mean(forward(images[test])[1].argmax(axis=1) == labels[test])
    if comm.rank == 0:
        print(f"epoch {epoch + 1:3}  loss {loss_sum[0] / len(train):.4f}  "
              f"test accuracy {accuracy:.2%}  {len(train) / seconds:,.0f} images/s  "
              f"{statistics.hidden_share:.0%} of communication hidden", flush=True)

if args.save:
    np.savez(f"{args.save}{comm.rank}.npz", **masters)
comm.close()
