"""Trains with several Reducers, stops, and goes on from a checkpoint, bit by bit; run by mpirun."""

import sys

import numpy as np

import mpiring
from mpiring.numpy import Checkpoints, DataParallel, LossScaler, MasterWeights
from mpiring.reducers import Int8, OneBit, PowerSGD, TopK
from mpiring.resilience import random_state, set_random_state

SHAPES = {"a": (40, 30), "b": (500,), "c": (30, 20), "d": (700,), "e": ()}
MAKERS = {
    "mean": lambda: None,
    "topk": lambda: TopK(0.05, momentum=0.9, warmup_steps=5),
    "mixed": lambda: {"a": PowerSGD(1, start_step=0), "b": Int8(64),
                      "[cd]": OneBit(64, warmup_steps=2)},
}


class Run:
    """A training, from its beginning or from a checkpoint."""

    def __init__(self, comm, folder, make):
        self.checkpoints = Checkpoints(folder, comm, seed=1)
        saved = self.checkpoints.load()
        self.reducer = make()
        each = self.reducer.values() if isinstance(self.reducer, dict) else [self.reducer]
        self.each = [one for one in each if one is not None]
        if saved:
            for one, state in zip(self.each, saved.own["reducers"]):
                one.load_state_dict(state)
        params = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
        # Short buckets, so that their order matters to the bits.
        self.dp = DataParallel(params, comm, bucket_bytes=1000, reducer=self.reducer,
                               order=saved and saved.replicated["order"])
        self.masters, self.scaler, self.step = MasterWeights(self.dp), LossScaler(self.dp), 0
        np.random.seed(comm.rank)
        if saved:
            self.step = saved.step
            self.masters.load_state_dict(saved.replicated["masters"])
            self.scaler.load_state_dict(saved.replicated["scaler"])
            set_random_state(saved.own["random"])

    def save(self):
        self.checkpoints.save(
            self.step,
            replicated={"masters": self.masters.state_dict(), "order": self.dp.order,
                        "scaler": self.scaler.state_dict()},
            own={"reducers": [one.state_dict() for one in self.each], "random": random_state()})

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            # In an order that is not that of the first buckets.
            for name in "dbeca":
                grad = np.random.standard_normal(SHAPES[name]) * self.scaler.scale / 2**16
                self.dp.grads[name][...] = grad
                self.dp.ready(name)
            self.dp.wait()
            if self.scaler.step():
                for name, master in self.masters.items():
                    master -= 0.1 * self.scaler.unscaled(name)
                self.masters.round_off()

    def bits(self):
        return {name: x.tobytes() for name, x in self.masters.items()}


# To compile would take longer than all that follows; the bits are the same.
config = mpiring.Config(shared_memory=False, tuning=False, algorithm="ring", machine_code=False)
with mpiring.init(config=config) as comm:
    for name, make in MAKERS.items():
        whole = Run(comm, None, make)
        whole.train(9)
        for steps in (1, 5):
            stopped = Run(comm, f"{sys.argv[1]}/{name}", make)
            stopped.train(steps)
            stopped.save()
            stopped.checkpoints.close()
        resumed = Run(comm, f"{sys.argv[1]}/{name}", make)
        assert resumed.step == 6
        resumed.train(3)
        resumed.checkpoints.close()
        assert resumed.bits() == whole.bits(), f"{name} does not go on bit by bit"
        if comm.rank == 0:
            print(f"{name} goes on bit by bit", flush=True)
