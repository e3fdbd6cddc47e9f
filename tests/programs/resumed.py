"""Trains with several Reducers, stops, and goes on from a checkpoint, bit by bit; run by mpirun."""

import sys

import numpy as np

import mpiring
from mpiring.numpy import DataParallel, LossScaler, MasterWeights, TrainState
from mpiring.optim import AdamW
from mpiring.reducers import Int8, OneBit, PowerSGD, TopK

SHAPES = {"a": (40, 30), "b": (500,), "c": (30, 20), "d": (700,), "e": ()}


class Run:
    """A training in 16 bits, from its beginning or from a checkpoint."""

    def __init__(self, comm, folder, make):
        self.params = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
        # Short buckets, so that their order matters to the bits.
        self.dp = DataParallel(self.params, comm, bucket_bytes=1000, reducer=make())
        self.random = np.random.default_rng(comm.rank)
        np.random.seed(comm.rank)
        self.sums = {"of": [np.zeros(3)], "steps": 0}
        self.state = TrainState(comm, seed=1, random=self.random, sums=self.sums, **self.parts())
        self.step = self.state.restore(folder)

    def parts(self):
        self.masters, self.scaler = MasterWeights(self.dp), LossScaler(self.dp)
        return {"model": self.masters, "scaler": self.scaler}

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            # In an order that is not that of the first buckets.
            for name in "dbeca":
                dice = np.random if name in "db" else self.random
                grad = dice.standard_normal(SHAPES[name]) * self.scaler.scale / 2**16
                self.dp.grads[name][...] = grad
                self.dp.ready(name)
            self.update()
            self.sums["of"][0] += self.params["b"][:3]
            self.sums["steps"] += 1

    def update(self):
        self.dp.wait()
        if self.scaler.step():
            for name, master in self.masters.items():
                master -= 0.1 * self.scaler.unscaled(name)
            self.masters.round_off()

    def bits(self):
        return ({name: x.tobytes() for name, x in self.masters.items()},
                self.sums["of"][0].tobytes(), self.sums["steps"])


class InSlices(Run):
    """The same with an optimizer of which each rank has a slice."""

    def parts(self):
        self.scaler, self.optimizer = LossScaler(self.dp), AdamW(self.dp, lr=0.1, sharded=True)
        return {"optimizer": self.optimizer, "scaler": self.scaler, "model": self.dp}

    def update(self):
        self.optimizer.step(self.scaler)

    @property
    def masters(self):
        tensors = self.optimizer.state_dict()["tensors"]
        return {f"{name} {vector}": x for name, its in tensors.items() for vector, x in its.items()}


MAKERS = {
    "mean": (Run, lambda: None),
    "topk": (Run, lambda: TopK(0.05, momentum=0.9, warmup_steps=5)),
    "mixed": (Run, lambda: {"a": PowerSGD(1, start_step=0), "b": Int8(64),
                            "[cd]": OneBit(64, warmup_steps=2)}),
    "slices": (InSlices, lambda: None),
}

# To compile would take longer than all that follows; the bits are the same.
config = mpiring.Config(shared_memory=False, tuning=False, algorithm="ring", machine_code=False)
with mpiring.init(config=config) as comm:
    for name, (kind, make) in MAKERS.items():
        folder = f"{sys.argv[1]}/{name}"
        whole = kind(comm, None, make)
        whole.train(9)
        for steps in (1, 5):
            stopped = kind(comm, folder, make)
            stopped.train(steps)
            stopped.state.save(folder, stopped.step)
            stopped.state.close()
        resumed = kind(comm, folder, make)
        assert resumed.step == 6
        resumed.train(3)
        resumed.state.close()
        assert resumed.bits() == whole.bits(), f"{name} does not go on bit by bit"
        if comm.rank == 0:
            print(f"{name} goes on bit by bit", flush=True)
    fewer = comm.split(0 if comm.rank < 2 else None)
    saved = stopped.bits()
    if fewer is not None:
        with fewer:
            assert kind(fewer, folder, make).bits() == saved
