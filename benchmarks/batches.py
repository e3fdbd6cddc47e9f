"""Compares methods of dividing samples of different lengths among the ranks, in training."""

import ast
import itertools
import random
import sys
import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpiring import ConfigError
from mpiring.data import TokenBatches
from mpiring.provisional import Array
from mpiring.tools.arguments import checked, names, positive
from mpiring.tools.bench import gradients, peers, timing
from mpiring.tools.bench.benchmark import Benchmark, Measurement, declare_turns, run, with_case
from mpiring.tools.bench.world import World
from mpiring.tools.table import Column, Environment, Row
from mpiring.tools.units import parse_count

from . import main
from .plot import DRAWINGS

if TYPE_CHECKING:
    from mpiring.tools.bench.torch_training import Training

    from .torch_padding import PaddedBatches

EQUAL, PADDED, APART, TOGETHER, OURS = (
    "equal lengths", "DistributedSampler", "buckets of a rank", "buckets of all ranks",
    "TokenBatches")
# Number of batches in a window that is sorted by length, as in Transformers' LengthGroupedSampler.
_WINDOW = 50

# Function of the samples' lengths, which yields this rank's samples, batch by batch, endlessly.
Sampling = Callable[[World, Namespace, Array], Iterator[list[int]]]

_DESCRIPTION = f"""\
Trains a byte-level transformer on the functions of Python's standard library, and counts the
real tokens per second. A sample is a function, and a token is a byte. Each rank pads its samples
to its longest one. All methods have the same number of samples in a step, on average.

  {EQUAL:20}   the same text in pieces of the mean length, which need no padding or waiting
  {PADDED:20}   PyTorch's sampler, --samples per rank, at random
  {APART:20}   --samples per rank, of similar length, each rank separately
  {TOGETHER:20}   --samples per rank, of similar length on all ranks
  {OURS:20}   mpiring.data.TokenBatches, with similar numbers of tokens

  idle %     share of the step in which a rank waits for others and the allreduce, on average
  + idle %   excess of idle % over that with equal lengths
  largest    tokens of a rank's largest batch with padding, which determine its memory"""


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("--ways", type=names(tuple(METHODS)), default=list(METHODS),
                        metavar="A,B", help=f"methods, some of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--parameters", type=checked(parse_count), default=1_000_000, metavar="N",
                        help="approximate number of the transformer's parameters (default: 1M)")
    parser.add_argument("--samples", type=positive, default=8,
                        help="number of samples per rank and step, on average (default: 8)")
    parser.add_argument("--longest", type=positive, default=1024, metavar="TOKENS",
                        help="length to which longer functions are cut (default: 1024)")
    parser.add_argument("--functions", type=positive, metavar="N",
                        help="number of functions to train on, from the first (default: all)")
    parser.add_argument("--calls", type=positive, default=3, help="steps per round (default: 3)")
    declare_turns(parser)
    parser.set_defaults(action=partial(run, BATCHES))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train by all methods in each round; the last round yields all measurements.

    Raises:
        MissingDependencyError: There is no PyTorch.
        ConfigError: There is no text, or too little of it.
        WrongAnswerError: A model's final parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    world.call_on_all(peers.refuse_missing_torch)
    trainings = _trainings(world, options)
    readings = yield from timing.in_turns(options, random.Random(options.seed), {
        name: partial(_round, world, options, *training)
        for name, training in trainings.items()})
    gradients.check_parameters(
        world, {name: training.parameters() for name, (training, _) in trainings.items()})
    labels = {"samples": options.samples, "longest": options.longest,
              "thread_level": world.thread_level}
    yield [Measurement({**labels, "parameters": training.parameter_count, "contender": name},
                       readings[name]) for name, (training, _) in trainings.items()]


def _trainings(world: World, options: Namespace) -> "dict[str, tuple[Training, PaddedBatches]]":
    """Read the text, and return the trainings and their batches, by method."""
    from mpiring.torch import share_cores
    from . import torch_padding
    share_cores(world.comm)
    functions_read: list[bytes] = []
    world.call_on_all(lambda: functions_read.extend(
        functions(options.functions) if world.rank == 0 else ()))
    texts = torch_padding.texts_of(world.raw.bcast(functions_read, root=0), options.longest)
    world.warm_up()
    trainings = {}
    for way in options.ways:
        name, sampling = METHODS[way]
        samples = torch_padding.equal_pieces(texts) if name == EQUAL else texts
        lengths = np.array(list(map(len, samples)))
        if len(lengths) < options.samples * world.size:
            raise ConfigError(f"--samples {options.samples}: {len(lengths)} functions make no "
                              f"batch for {world.size} ranks; use more functions, or fewer samples")
        trainings[name] = torch_padding.training_on(
            world, options, samples, sampling(world, options, lengths))
    return trainings


def _round(world: World, options: Namespace, training: "Training", batches: "PaddedBatches",
           ) -> dict[str, list[float]]:
    """Return the readings of some steps."""
    before_s = world.comm.statistics.exposed_s
    seconds = timing.timed(world, training.step, options.calls)
    exposed_s = world.comm.statistics.exposed_s - before_s
    ranks = world.raw.allgather((batches.take_count(), exposed_s))
    return {"step": seconds,
            "samples": [sum(count.samples for count, _ in ranks)],
            "tokens": [sum(count.tokens for count, _ in ranks)],
            "padded": [sum(count.padded for count, _ in ranks)],
            "most": [max(count.most for count, _ in ranks)],
            "exposed_s": [sum(seconds for _, seconds in ranks) / len(ranks)]}


def functions(count: int | None) -> list[bytes]:
    """Return the functions and methods of this interpreter's standard library, as source text.

    Args:
        count: Largest number of functions, from the first modules; None for all, about 7,000.

    Raises:
        ConfigError: There are none.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[bytes] = []
    for module in sorted(folder.glob("*.py")):
        if count is None or len(texts) < count:
            texts += _functions_of(module.read_bytes())
    if not texts:
        raise ConfigError(f"there is no text to train on: {folder} holds no modules of the "
                          f"standard library")
    return texts[:count]


def _functions_of(source: bytes) -> list[bytes]:
    """Return a module's functions, from the line of `def` to the last line."""
    lines = source.splitlines(keepends=True)
    return [b"".join(lines[node.lineno - 1:node.end_lineno]) for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _random_batches(world: World, options: Namespace, lengths: Array) -> Iterator[list[int]]:
    """Yield batches with equal numbers of samples, from PyTorch's sampler."""
    from torch.utils.data import DistributedSampler
    count = options.samples
    sampler = DistributedSampler(range(len(lengths)), world.size, world.rank, seed=options.seed,
                                 drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        samples = list(sampler)
        yield from (samples[end - count:end] for end in range(count, len(samples) + 1, count))


def _bucketed_batches(world: World, options: Namespace, lengths: Array, *, together: bool,
                      ) -> Iterator[list[int]]:
    """Yield batches with equal numbers of samples of similar lengths, in random order.

    Args:
        together: If true, all ranks divide the same batches; otherwise, each rank has separate
            samples and batches.
    """
    first, ranks = (0, 1) if together else (world.rank, world.size)
    count = options.samples * world.size // ranks
    for epoch in itertools.count():
        samples = np.random.default_rng([options.seed, epoch]).permutation(len(lengths))
        samples = samples[first:len(samples) - len(samples) % (options.samples * world.size):ranks]
        windows = [samples[begin:begin + _WINDOW * count]
                   for begin in range(0, len(samples), _WINDOW * count)]
        by_length = np.concatenate(
            [window[lengths[window].argsort(kind="stable")] for window in windows])
        batches = by_length.reshape(-1, count)
        for batch in np.random.default_rng([options.seed, epoch, first]).permutation(batches):
            yield batch[world.rank::world.size].tolist() if together else batch.tolist()


def _token_batches(world: World, options: Namespace, lengths: Array) -> Iterator[list[int]]:
    """Yield batches with as many tokens as those of the other methods have on average."""
    tokens = round(options.samples * world.size * float(lengths.mean()))
    batches = TokenBatches(lengths, world.comm, tokens=tokens, seed=options.seed)
    while True:
        yield from batches


# Names for tables, and samplings.
METHODS: dict[str, tuple[str, Sampling]] = {
    "equal": (EQUAL, _random_batches),
    "distributed": (PADDED, _random_batches),
    "apart": (APART, partial(_bucketed_batches, together=False)),
    "together": (TOGETHER, partial(_bucketed_batches, together=True)),
    "tokens": (OURS, _token_batches),
}


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method."""
    table = []
    for measurement, case in with_case(measurements, "thread_level"):
        totals = {kind: sum(values) for kind, values in measurement.readings.items()}
        steps = len(measurement.readings["step"])
        rate = _per_second(measurement, "tokens")
        idle = _per_second(measurement, "exposed_s")
        table.append({
            **measurement.labels, **timing.summary(measurement.readings["step"]),
            "samples_per_step": totals["samples"] / steps,
            "tokens_per_step": totals["tokens"] / steps,
            "padding_percent": 100 * (1 - totals["tokens"] / totals["padded"]),
            "largest": max(measurement.readings["most"]), "tokens_per_s": rate,
            "over_distributed": (
                rate / _per_second(case[PADDED], "tokens") if PADDED in case else None),
            "idle_percent": 100 * idle,
            "idle_beyond_equal": (100 * (idle - _per_second(case[EQUAL], "exposed_s"))
                                  if EQUAL in case else None)})
    return table


def _per_second(measurement: Measurement, kind: str) -> float:
    """Return the total of a reading over the total time of the steps."""
    return sum(measurement.readings[kind]) / sum(measurement.readings["step"])


_COLUMNS = [
    Column("contender", -20, title="batches"), Column("thread_level", -10, title="threads"),
    Column("steps", 5, 1), Column("samples_per_step", 8, 3, "samples"),
    Column("tokens_per_step", 7, 4, "tokens"), Column("padding_percent", 9, 3, "padding %"),
    Column("largest", 7, 4), Column("median_ms", 9, 4), Column("tokens_per_s", 8, 4, "tokens/s"),
    Column("over_distributed", 14, 3, "× Distributed"), Column("idle_percent", 6, 2, "idle %"),
    Column("idle_beyond_equal", 8, 2, "+ idle %")]
BATCHES = Benchmark("batches", lambda options: options.rounds, measure, rows, _COLUMNS,
                    drawings=DRAWINGS)


if __name__ == "__main__":
    sys.exit(main("batches", declare))
