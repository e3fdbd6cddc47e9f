"""Passes arrays in each memory order to each collective of Horovod's interface; run by mpirun."""

import itertools

import numpy as np
import torch

import mpiring.horovod
import mpiring.horovod.torch

mpiring.horovod.init()
RANK, SIZE = mpiring.horovod.rank(), mpiring.horovod.size()
VALUES = np.random.default_rng(RANK).integers(1, 9, (2 * SIZE + 1, 4, 3, 2)).astype("float32")


class OwnArray(np.ndarray):
    """A subclass."""


class OwnTensor(torch.Tensor):
    """A subclass."""


def unaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    raw[...] = x
    return raw


def spread(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


# Functions that copy an array to another memory order, for each package.
ARRAYS = {
    "C": np.array, "Fortran": np.asfortranarray, "strided": spread,
    "backward": lambda x: np.array(x[::-1, :, ::-1])[::-1, :, ::-1],
    "permuted": lambda x: np.array(x.transpose(1, 0, 3, 2)).transpose(1, 0, 3, 2),
    "subclass": lambda x: np.asfortranarray(x).view(OwnArray), "unaligned": unaligned}
TENSORS = {
    "C": torch.tensor,
    "channels last": lambda x: torch.tensor(x).to(memory_format=torch.channels_last),
    "strided": lambda x: torch.tensor(np.repeat(x, 2, axis=-1))[..., ::2],
    "transposed": lambda x: torch.tensor(x.T.copy()).permute(3, 2, 1, 0),
    "subclass": lambda x: torch.tensor(x.T.copy()).permute(3, 2, 1, 0).as_subclass(OwnTensor)}


def calls_of(hvd):
    """Return functions of one array; those in place are marked, and change it."""
    sync, splits = hvd.synchronize, [2] * (SIZE - 1) + [3]
    calls = {}
    for op in (hvd.Average, hvd.Sum, hvd.Max, hvd.Adasum):
        more = {"op": op, "prescale_factor": 1.5 if op == hvd.Sum else 1.0}
        calls |= {
            ("allreduce", op): lambda x, more=more: [hvd.allreduce(x, **more)],
            ("async", op): lambda x, more=more: [sync(hvd.allreduce_async(x, **more))],
            ("grouped", op): lambda x, more=more: hvd.grouped_allreduce([x, x], **more),
            ("allreduce_", op): lambda x, more=more: [hvd.allreduce_(x, **more)],
            ("async_", op): lambda x, more=more: [sync(hvd.allreduce_async_(x, **more))],
            ("grouped_", op): lambda x, more=more: hvd.grouped_allreduce_([x, x[:1] * 1], **more)}
        if op != hvd.Adasum:
            calls |= {
                ("reducescatter", op): lambda x, more=more: [hvd.reducescatter(x, **more)],
                ("reducescatter_async", op): lambda x, more=more: [
                    sync(hvd.reducescatter_async(x, **more))],
                ("grouped reducescatter", op): lambda x, more=more: hvd.grouped_reducescatter(
                    [x, x], **more)}
    return calls | {
        ("fp16", ""): lambda x: [hvd.allreduce(x, compression=hvd.Compression.fp16)],
        ("allgather", ""): lambda x: [hvd.allgather(x[RANK:])],
        ("allgather_async", ""): lambda x: [sync(hvd.allgather_async(x))],
        ("grouped allgather", ""): lambda x: hvd.grouped_allgather([x, x]),
        ("alltoall", ""): lambda x: [hvd.alltoall(x, splits)[0]],
        ("alltoall_async", ""): lambda x: [sync(hvd.alltoall_async(x, splits))[0]],
        ("broadcast", ""): lambda x: [hvd.broadcast(x, 1)],
        ("broadcast_async", ""): lambda x: [sync(hvd.broadcast_async(x, 1))],
        ("broadcast_", ""): lambda x: [hvd.broadcast_(x, 1)],
        ("broadcast_async_", ""): lambda x: [sync(hvd.broadcast_async_(x, 1))],
        ("parameters_", ""): lambda x: [hvd.broadcast_parameters({"x": x}, 1) or x]}


def as_array(x):
    return np.array(x if isinstance(x, np.ndarray) else x.as_subclass(torch.Tensor).numpy())


for hvd, layouts in ((mpiring.horovod, ARRAYS), (mpiring.horovod.torch, TENSORS)):
    pairs = [*itertools.pairwise(layouts), *((name, name) for name in layouts)]
    for name, call in calls_of(hvd).items():
        right = [as_array(x) for x in call(layouts["C"](VALUES))]
        for of_ranks in pairs:
            x = layouts[of_ranks[RANK % 2]](VALUES)
            results = [as_array(result) for result in call(x)]
            told = hvd.__name__, name, of_ranks
            assert all(map(np.array_equal, results, right)), (told, results, right)
            # In place, the array itself has the result; others are unchanged.
            assert np.array_equal(as_array(x), right[0] if name[0][-1] == "_" else VALUES), told

# Conjugates of complex tensors are views.
x = torch.full((3,), 1 + 2j).conj() if RANK else torch.full((3,), 1 - 2j)
assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0).tolist() == [2 * SIZE * (1 - 2j)] * 3
for x in torch.ones(2, dtype=torch.complex64).conj(), torch.ones(1).expand(3):
    for call in (hvd.allreduce_, lambda x: hvd.grouped_allreduce_([torch.ones(2), x]),
                 lambda x: hvd.broadcast_(x, 0)):
        try:
            call(x)
        except mpiring.ConfigError as error:
            assert "cannot take a result" in str(error), error
        else:
            raise AssertionError(f"{x} has taken a result")
mpiring.horovod.shutdown()
print("all is well", flush=True)
