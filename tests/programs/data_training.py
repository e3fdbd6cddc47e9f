"""Counts how often each sample is trained on in each epoch, and goes on from its checkpoints.

    mpirun -n 2 python tests/programs/data_training.py FOLDER SOURCE TOKENS EVERY

Its batches are drawn as SOURCE says, and a checkpoint is saved after EVERY steps. Rank 0 writes a
line to FOLDER/log after each step, each rank its process to FOLDER/pid…; at the end all is counted.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpiring
from mpiring.data import TokenBatches, prefetch
from mpiring.resilience import TrainState

EPOCHS, SAMPLES = 2, 3000
LENGTHS = np.random.default_rng(7).integers(1, 300, SAMPLES)


class Counted:
    """A source that is asked for its state with a count, as samplers with workers ahead are."""

    def __init__(self, batches, loader):
        self._batches, self._loader, self._seen = batches, loader, 0

    def __iter__(self):
        self._seen = 0
        for batch in self._loader:
            self._seen += 1
            yield batch

    def state_dict(self):
        return self._batches.state_dict(seen=self._seen)

    def load_state_dict(self, state):
        self._batches.load_state_dict(state)


def source(name, batches):
    """Return what is trained on."""
    def by(kind):
        return kind(range(SAMPLES), batch_sampler=batches, num_workers=1, collate_fn=list)

    if name == "plain":
        return batches
    if name == "prefetch":
        return prefetch(batches, "cpu", depth=3)
    if name == "workers":
        from torch.utils.data import DataLoader
        return Counted(batches, by(DataLoader))
    if name == "workers, prefetch":
        from torch.utils.data import DataLoader
        return Counted(batches, prefetch(by(DataLoader), "cpu"))
    from torchdata.stateful_dataloader import StatefulDataLoader
    return prefetch(by(StatefulDataLoader), "cpu")


def main():
    """Train."""
    folder, name, tokens, every = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    with mpiring.init() as comm:
        (folder / f"pid{comm.rank}").write_text(str(os.getpid()))
        data = source(name, TokenBatches(LENGTHS, comm, tokens=tokens, seed=3))
        done = {"epoch": 0, "counts": np.zeros((EPOCHS, SAMPLES), np.int64)}
        state = TrainState(comm, data=data, done=done)
        step, counts = state.restore(folder / "run"), done["counts"]
        for epoch in range(done["epoch"], EPOCHS):
            done["epoch"] = epoch
            for batch in data:
                new = np.bincount(batch, minlength=SAMPLES)
                counts[epoch] += comm.allreduce(new)
                step += 1
                time.sleep(0.002)
                if step % every == 0:
                    state.save(folder / "run", step)
                if comm.rank == 0:
                    with (folder / "log").open("a") as log:
                        print(step, file=log)
        state.close()
        if comm.rank == 0:
            once = np.all(counts == 1)
            print(f"each of {counts.size} once" if once else f"WRONG {np.bincount(counts.ravel())}")


main()
