"""Saves optimizers' slices on all ranks, and goes on from them on fewer; run by mpirun -n 4."""

import sys

import ml_dtypes
import numpy as np
import torch
from torch import nn

import mpiring
import mpiring.optim
from mpiring.__main__ import main
from mpiring.numpy import DataParallel as NumpyDataParallel
from mpiring.torch import Checkpoints, DataParallel, Sharded, load_file, whole

# Of a step: 1 to 4 ranks have equal shares of them.
SAMPLES = 12
SAVED, LAST = 3, 6
SHAPES = {"w": (37, 5), "b": (5,), "half": (41, 3), "scale": ()}


class OfTorch:
    """A module, and torch.optim.AdamW in slices, or as it is."""

    def __init__(self, comm, saved, is_plain):
        torch.manual_seed(1)
        self.comm = comm
        module = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3))
        matrices, others = ([p for p in module.parameters() if (p.dim() > 1) is is_matrix]
                            for is_matrix in (True, False))
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        if saved:
            module.load_state_dict(saved.replicated)
        if is_plain:
            self.model, self.optimizer = module, torch.optim.AdamW(groups, lr=0.01)
        else:
            self.model = DataParallel(module, comm, bucket_bytes=300)
            self.optimizer = Sharded(torch.optim.AdamW, self.model, groups, lr=0.01)
        if saved:
            self.optimizer.load_state_dict(whole(saved.sharded) if is_plain else saved.sharded)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(SAMPLES, n, generator=generator)[self.comm.rank::self.comm.size]
                for n in (7, 3))
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()
        self.optimizer.step()

    def weights(self):
        return {name: x.clone() for name, x in self.model.state_dict().items()}


class OfNumpy:
    """Arrays, some of bfloat16, and an optimizer of mpiring's, in slices or as a whole."""

    def __init__(self, comm, saved, is_plain, method):
        random = np.random.default_rng(1)
        params = {name: np.asarray(random.standard_normal(shape), "f4")
                  for name, shape in SHAPES.items()}
        params["half"] = params["half"].astype(ml_dtypes.bfloat16)
        self.dp = NumpyDataParallel(saved.replicated if saved else params, comm, bucket_bytes=300)
        self.optimizer = method(self.dp, lr=0.01, no_decay=("b", "scale"), sharded=not is_plain)
        if saved:
            self.optimizer.load_state_dict(saved.sharded)

    def step(self, number):
        comm = self.dp.comm
        for name, shape in reversed(SHAPES.items()):
            # Multiples of 1/3, so that no mean of any ranks is rounded in 16 bits otherwise.
            each = np.random.default_rng([number, len(name)]).integers(-3, 4, (SAMPLES, *shape))
            mine = each[comm.rank::comm.size].sum(axis=0) * comm.size
            self.dp.grads[name][...] = mine
            self.dp.ready(name)
        assert self.optimizer.step()

    def weights(self):
        return {name: x.copy() for name, x in self.dp.params.items()}


def bits(nest):
    """Return a nest with the bytes of its arrays and tensors."""
    if isinstance(nest, dict):
        return {key: bits(x) for key, x in nest.items()}
    if isinstance(nest, list | tuple):
        return [bits(x) for x in nest]
    if isinstance(nest, torch.Tensor):
        nest = nest.numpy()
    return (str(nest.dtype), nest.shape, nest.tobytes()) if isinstance(nest, np.ndarray) else nest


def close(one, other):
    for name, x in one.items():
        tolerance = 2**-7 if name == "half" else 1e-5
        np.testing.assert_allclose(np.asarray(x, "f4"), np.asarray(other[name], "f4"),
                                   tolerance, tolerance, err_msg=name)


def check(comm, folder, make):
    run = make(comm, None, False)
    for number in range(SAVED):
        run.step(number)
    with Checkpoints(folder, comm) as checkpoints:
        checkpoints.save(SAVED, replicated=run.weights(),
                         sharded=run.optimizer.sharded_state_dict())
    state = bits(run.optimizer.state_dict())
    for number in range(SAVED, LAST):
        run.step(number)
    for size, is_plain in [(4, False), (3, False), (2, False), (1, False), (1, True)]:
        part = comm.split(0 if comm.rank < size else None)
        if part is None:
            continue
        with part, Checkpoints(folder, part) as checkpoints:
            saved = checkpoints.load()
            if is_plain and make is OfTorch:
                file = f"{folder}/all.safetensors"
                assert main(["checkpoint", "consolidate", folder, file]) == 0
                assert bits(load_file(file)["sharded"]) == bits(whole(saved.sharded))
            again = make(part, saved, is_plain)
            assert bits(again.optimizer.state_dict()) == state, (size, is_plain)
            for number in range(SAVED, LAST):
                again.step(number)
            close(again.weights(), run.weights())


with mpiring.init() as comm:
    check(comm, f"{sys.argv[1]}/torch", OfTorch)
    for method in (mpiring.optim.AdamW, mpiring.optim.LAMB):
        check(comm, f"{sys.argv[1]}/{method.__name__}",
              lambda *arguments: OfNumpy(*arguments, method))
    if comm.rank == 0:
        print("goes on from slices")
