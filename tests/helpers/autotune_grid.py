"""Compares the choice of autotune, from bad first settings, with the best of a grid of settings.

    mpirun -n 2 python tests/helpers/autotune_grid.py
    python -m mpiring lab run --hosts 2 -- python tests/helpers/autotune_grid.py

Run it by hand, on a quiet machine. It tunes a transformer twice, from buckets of 1 and of 200 MB,
and takes a few steps with each setting of a grid. Then it measures the best settings of the grid,
the first settings and the chosen settings again, in turn. It prints the rows of the table in
docs/benchmarks/autotune.md.
"""

import argparse
import itertools
import random
import statistics
import time

import numpy as np
import torch
from torch.nn import functional

import mpiring
from mpiring.tools.bench.torch_training import batch_of, model_of, width_for
from mpiring.torch import DataParallel
from mpiring.training.autotune import MAX_STEPS, Autotuner, _plans
from mpiring.training.search import Choice

FIRST_BYTES = 10 ** 6, 200 * 10 ** 6
# Number of settings of the grid that are measured again.
FINALISTS = 4


class Training:
    """Steps of a transformer, with settings that may change."""

    def __init__(self, comm, parameters, **options):
        torch.manual_seed(0)
        self.comm = comm
        self._x, self._y = batch_of("transformer", None, 1 + comm.rank)
        self._model = DataParallel(
            model_of("transformer", width_for("transformer", parameters)), comm, **options)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    @property
    def gradients(self):
        return self._model._averaging.gradients

    def step(self):
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(self._x).flatten(0, 1), self._y.flatten()).backward()
        self._optimizer.step()

    def seconds(self, choice, steps):
        """Return the seconds of the fastest of some steps with a choice, on the slowest rank."""
        self.gradients.use(choice)
        self.step()
        times = []
        for _ in range(steps):
            began_s = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began_s)
        return float(self.comm.allreduce(np.array([min(times)]), op="max")[0])


def tuned(comm, parameters, first_bytes):
    """Return the first settings, the chosen settings, and the number of steps of the search."""
    training = Training(comm, parameters, autotune=True, bucket_bytes=first_bytes)
    first = training.gradients.choice
    for step in range(1, MAX_STEPS + 1):
        training.step()
        if training.gradients._autotuner is None:
            break
    choice = training.gradients.choice
    comm.tunable.operations_in_flight = first.operations
    return first, choice, step


def grid_of(training):
    """Return all choices whose steps differ."""
    axes = Autotuner(training.comm, overlaps=training.gradients._overlaps)._axes(
        training.gradients, list(_plans(training.gradients, fixed=False)))
    names = [axis.name for axis in axes]
    values = [[value for value in axis.values if value != "auto"] for axis in axes]
    first = {"operations": training.gradients.choice.operations}
    grid = [Choice(**first | dict(zip(names, each))) for each in itertools.product(*values)]
    # MPI's own call has no pieces.
    return [choice for choice in grid
            if choice.pieces == 1 or (choice.long, choice.short) != ("native", "native")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=13_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    comm = mpiring.init(config=mpiring.Config(tuning_folder=""))
    runs = [tuned(comm, options.parameters, nbytes) for nbytes in FIRST_BYTES]
    training, rng = Training(comm, options.parameters), random.Random(1)
    training.step()
    grid = grid_of(training)
    times = {choice: training.seconds(choice, 2) for choice in rng.sample(grid, len(grid))}
    best = sorted(times, key=times.__getitem__)[:FINALISTS]
    finalists = list(dict.fromkeys([*best, *(choice for run in runs for choice in run[:2])]))
    rounds = {choice: [] for choice in finalists}
    for _ in range(options.rounds):
        for choice in rng.sample(finalists, len(finalists)):
            rounds[choice].append(training.seconds(choice, 3))
    medians = {choice: statistics.median(seconds) for choice, seconds in rounds.items()}
    winner = min(best, key=medians.__getitem__)
    if comm.rank == 0:
        where = f"{len(comm.memory_groups)} × {comm.size // len(comm.memory_groups)}"
        parameters = sum(tensor.size for tensor in training.gradients.tensors.values())
        print(f"{len(grid)} settings, {min(times.values()) * 1e3:.4g} to "
              f"{max(times.values()) * 1e3:.4g} ms; the best: {winner}")
        for first, choice, steps in runs:
            cells = [where, f"{parameters / 1e6:.1f} M", f"{first.bucket_bytes // 10 ** 6} MB",
                     str(steps),
                     *(f"{1e3 * medians[each]:.4g}" for each in (first, choice, winner)),
                     *(f"{medians[each] / medians[winner]:.3f}" for each in (first, choice))]
            print(f"| {' | '.join(cells)} |    {choice}", flush=True)


if __name__ == "__main__":
    main()
