"""Trains a network in plain NumPy, or CuPy, on real handwritten digits, on any number of ranks.

python examples/train_numpy.py                  # one rank
mpirun -n 4 python examples/train_numpy.py      # four ranks, the same result in less time
srun -n 4 python examples/train_numpy.py        # the same under Slurm
mpirun -n 4 python examples/train_numpy.py --dtype float16      # half the bytes
mpirun -n 4 python examples/train_numpy.py --checkpoint run1    # stop and resume it
mpirun -n 4 python examples/train_numpy.py --device cuda        # on GPUs, with CuPy

The data are scikit-learn's 1,797 digits of 8 x 8 pixels. The global batch is
the same for any number of ranks; each rank has a share of it.
"""

import argparse
import os
import time

import ml_dtypes
import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import mpiring
from mpiring.gpus import cupy_for
from mpiring.numpy import DataParallel, LossScaler, MasterWeights, TrainState
from mpiring.progress import Progress
from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK
from mpiring.resilience import Stopping

# Methods to compress gradients between nodes, which saves time on a slow network.
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
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                    help="device; the GPUs of a node are assigned to its ranks in turn")
parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                    help="dtype of weights, gradients and messages; arithmetic is float32")
parser.add_argument("--reducer", choices=REDUCERS, default="mean", help="Reducer between nodes")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--checkpoint", metavar="FOLDER",
                    help="folder to resume from, and to save to after each epoch and at a stop")
parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of the job")
parser.add_argument("--metrics", metavar="FILE", help="file that gets a line of JSON per epoch")
parser.add_argument("--save", metavar="PREFIX",
                    help="prefix of the files PREFIX<rank>.npz with the weights")
args = parser.parse_args()

comm = mpiring.init()
xp = cupy_for(comm) if args.device == "cuda" else np
# Ranks on one node share its cores; NumPy's threads would compete for them.
threadpool_limits(max(1, os.cpu_count() // comm.local_size))

# Every rank reads the same data and splits it in the same way: one fifth for the test.
images, labels = load_digits(return_X_y=True)
images, labels = xp.asarray((images / 16.0 - 0.3).astype(np.float32)), xp.asarray(labels)
shuffled = np.random.default_rng(0).permutation(len(images))
test, train_set = np.split(shuffled, [len(images) // 5])
test = xp.asarray(test)

# Three layers. Rank 0's initial weights are broadcast to all ranks.
dtype = ml_dtypes.bfloat16 if args.dtype == "bfloat16" else np.dtype(args.dtype)
sizes = [images.shape[1], args.hidden, args.hidden, 10]
random = np.random.default_rng(args.seed)
params = {}
for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:]), start=1):
    weights = random.standard_normal((rows, columns)) * np.sqrt(2 / rows)
    params[f"w{layer}"] = xp.asarray(weights.astype(dtype))
    params[f"b{layer}"] = xp.zeros(columns, dtype)
dp = DataParallel(params, comm, bucket_bytes=args.bucket_bytes, reducer=REDUCERS[args.reducer]())

# 16-bit weights are updated in float32, and the loss is scaled so that their gradients do not
# vanish. With float32 the masters are the weights themselves, and the scale changes no result.
masters, scaler = MasterWeights(dp), LossScaler(dp)
velocity = {name: xp.zeros_like(master) for name, master in masters.items()}
loss = np.zeros(2)                              # sum over this epoch, and number of images
state = TrainState(comm, seed=args.seed, model=masters, scaler=scaler, velocity=velocity,
                   own={"loss": loss})
step = state.restore(args.checkpoint)           # 0 without a checkpoint
# Every thousandth step, ranks compare digests of these arrays, in addition to params.
dp.watch(masters=masters, velocity=velocity)


def forward(x):
    """Return the input of each layer, and the scores of the ten classes."""
    inputs = []
    for layer in range(1, len(sizes)):
        inputs.append(x)
        x = x @ params[f"w{layer}"] + params[f"b{layer}"]
        if layer < len(sizes) - 1:
            x = xp.maximum(x, 0)
    return inputs, x


@np.errstate(over="ignore")        # if float16 overflows, the step is skipped
def backward(inputs, error):
    """Write every layer's gradient and mark it ready, the last layer first."""
    for layer in reversed(range(1, len(sizes))):
        x = inputs[layer - 1]
        xp.matmul(x.T, error, out=dp.grads[f"w{layer}"])
        dp.ready(f"w{layer}")
        dp.grads[f"b{layer}"][...] = error.sum(axis=0)
        dp.ready(f"b{layer}")
        # mpiring sends these while the next layer's gradients are computed.
        if layer > 1:
            error = (error @ params[f"w{layer}"].T) * (x > 0)


def probabilities_of(scores):
    """Return the softmax of each row."""
    exponents = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def train(batch):
    """Do one step with this rank's share of a batch."""
    mine = xp.asarray(batch[comm.rank::comm.size])
    inputs, scores = forward(images[mine])
    probabilities = probabilities_of(scores)
    picked = xp.arange(len(mine)), labels[mine]
    loss[:] += -float(xp.log(probabilities[picked]).sum()), len(mine)
    error = probabilities
    error[picked] -= 1
    # Shares may differ by an image. With this factor the mean over ranks is the mean over the
    # global batch.
    backward(inputs, error * (scaler.scale * comm.size / len(batch)))
    dp.wait()
    if scaler.step():
        for name, master in masters.items():
            velocity[name] *= args.momentum
            velocity[name] += scaler.unscaled(name)
            master -= args.learning_rate * velocity[name]
        masters.round_off()


starts = range(0, len(train_set), args.batch)
steps = args.epochs * len(starts)
with Stopping(comm, time_limit_s=args.time_limit, checkpoints=state) as stopping, \
        Progress("training", steps, shown=comm.rank == 0, done=step,
                 metrics=args.metrics) as progress:
    while step < steps and not stopping.reason:
        epoch, first = divmod(step, len(starts))
        order = np.random.default_rng((args.seed, epoch)).permutation(train_set)
        began, statistics = time.perf_counter(), mpiring.Statistics()
        for start in starts[first:]:
            if stopping.now():                  # on all ranks at the same step
                break
            train(order[start:start + args.batch])
            statistics += dp.statistics
            step += 1
            progress.step()
        else:
            rate = len(starts[first:]) * args.batch / (time.perf_counter() - began)
            total, seen = comm.allreduce(loss.copy())
            accuracy = float((forward(images[test])[1].argmax(axis=1) == labels[test]).mean())
            progress.say(f"epoch {epoch + 1:3}  loss {total / seen:.4f}  "
                         f"test accuracy {accuracy:.2%}  {rate:,.0f} images/s  "
                         f"{statistics.hidden_share:.0%} of communication hidden")
            progress.record(step, loss=total / seen, accuracy=accuracy, images_per_s=rate)
            loss[:] = 0
            state.save(args.checkpoint, step)
    if stopping.reason:
        state.save(args.checkpoint, step)
        progress.say(f"stopped at step {step}: {stopping.reason}")

state.close()
if args.save and not stopping.reason:
    xp.savez(f"{args.save}{comm.rank}.npz", **masters)
comm.close()
