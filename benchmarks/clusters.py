"""Simulates training steps of published models on GPU clusters, with and without each method."""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import cast

import numpy as np

from mpiring.provisional import Array, Schedule, buckets
from mpiring.tools.simulate.algorithms import SimulatedOperation, SimulatedTime, predict
from mpiring.tools.simulate.cluster import Cluster
from mpiring.tools.simulate.profile import Profile, StepCompute
from mpiring.tools.simulate.step import Workload, predict_step
from mpiring.tools.simulate.strategies import averaged
from mpiring.tools.table import Column, Row

from . import declare_json, main, report

# A name, a shape, and the number of positions (pixels, tokens) at which a weight is used.
Tensor = tuple[str, tuple[int, ...], int]
# Rank of the simulated PowerSGD, and the smallest reduction for which it compresses a matrix.
_RANK, _REDUCTION = 4, 2
# Share of a step before the first gradient: a forward pass costs half of a backward pass.
_FORWARD = 1 / 3
_COLUMNS = [Column("model", -10), Column("network", -14), Column("nodes", 6), *(
    Column(name, 14, 4) for name in (
        "compute_ms", "plain_ms", "fused_ms", "overlapped_ms", "hierarchical_ms", "bits16_ms",
        "powersgd_ms"))]


def _conv(name: str, out: int, into: int, kernel: int, side: int) -> Tensor:
    return name, (out, into, kernel, kernel), side * side


def _vectors(name: str, *sizes: int) -> list[Tensor]:
    return [(f"{name}.{i}", (size,), 0) for i, size in enumerate(sizes)]


def resnet50() -> Iterator[Tensor]:
    """Yield the 161 tensors of ResNet-50."""
    yield _conv("conv1", 64, 3, 7, 112)
    yield from _vectors("bn1", 64, 64)
    into = 64
    for stage, (width, blocks, side) in enumerate(
            ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))):
        for block in range(blocks):
            name = f"{stage}.{block}"
            convs = [("1", width, into, 1), ("2", width, width, 3), ("3", 4 * width, width, 1)]
            for part, out, fan_in, kernel in convs + [("4", 4 * width, into, 1)] * (not block):
                yield _conv(f"{name}.conv{part}", out, fan_in, kernel, side)
                yield from _vectors(f"{name}.bn{part}", out, out)
            into = 4 * width
    yield "fc", (1000, 2048), 1
    yield from _vectors("fc.bias", 1000)


def vgg16() -> Iterator[Tensor]:
    """Yield the 32 tensors of VGG-16."""
    into, widths = 3, ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
    for stage, outs in enumerate(widths):
        for i, out in enumerate(outs):
            yield _conv(f"{stage}.{i}", out, into, 3, 224 >> stage)
            yield from _vectors(f"{stage}.{i}.bias", out)
            into = out
    for out, fan_in in ((4096, 25088), (4096, 4096), (1000, 4096)):
        yield f"fc{out}x{fan_in}", (out, fan_in), 1
        yield from _vectors(f"fc{out}x{fan_in}.bias", out)


def bert_large() -> Iterator[Tensor]:
    """Yield the tensors of BERT-large with its heads for pretraining."""
    width = 1024
    for name, rows in (("words", 30522), ("positions", 512), ("types", 2)):
        yield name, (rows, width), 0
    yield from _vectors("embeddings.norm", width, width)
    linears = [("q", width, width), ("k", width, width), ("v", width, width), ("o", width, width),
               ("up", 4 * width, width), ("down", width, 4 * width)]
    named = [(f"{layer}.{name}", out, into) for layer in range(24) for name, out, into in linears]
    for name, out, into in [*named, ("pooler", width, width), ("head", width, width)]:
        yield name, (out, into), 1
        yield from _vectors(f"{name}.bias", out)
        if name.endswith((".o", ".down", "head")):
            yield from _vectors(f"{name}.norm", width, width)
    yield from _vectors("head.words", 30522)
    yield "next", (2, width), 0
    yield from _vectors("next.bias", 2)


def swin_b() -> Iterator[Tensor]:
    """Yield the tensors of Swin-B for images of 224 x 224 pixels."""
    yield _conv("patches", 128, 3, 4, 56)
    yield from _vectors("patches.bias", 128, 128, 128)
    for stage, (depth, heads, side) in enumerate(
            ((2, 4, 56), (2, 8, 28), (18, 16, 14), (2, 32, 7))):
        width = 128 << stage
        for block in range(depth):
            name = f"{stage}.{block}"
            yield from _vectors(f"{name}.norms", *[width] * 4)
            yield f"{name}.table", (169, heads), 0
            for part, out, into in (("qkv", 3 * width, width), ("proj", width, width),
                                    ("up", 4 * width, width), ("down", width, 4 * width)):
                yield f"{name}.{part}", (out, into), side * side
                yield from _vectors(f"{name}.{part}.bias", out)
        if stage < 3:
            yield from _vectors(f"{stage}.norm", 4 * width, 4 * width)
            yield f"{stage}.merge", (2 * width, 4 * width), side * side // 4
    yield from _vectors("norm", 1024, 1024)
    yield "head", (1000, 1024), 1
    yield from _vectors("head.bias", 1000)


# Tensors by model, and milliseconds of compute per step of a V100. See the page for the sources.
MODELS: dict[str, tuple[Callable[[], Iterable[Tensor]], float]] = {
    "ResNet-50": (resnet50, 1e3 * 256 / 1200),
    "VGG-16": (vgg16, 58.8),
    "BERT-large": (bert_large, 1e3 * 16 / 125.44),
    "Swin-B": (swin_b, 1e3 * 64 / (278 / 3))}
# GPUs of a node are connected by NVLink.
_NODE = Cluster(ranks_per_node=8, node_bandwidth=100e9, reduction_rate=400e9, node_latency_s=5e-6,
                barrier_s=10e-6, gpus=True)
NETWORKS = {
    **{f"TCP {rate} Gb/s": replace(_NODE, bandwidth=rate / 8 * 1e9, goodput=0.956, latency_s=25e-6)
       for rate in (25, 30, 100)},
    "RDMA 100 Gb/s": replace(_NODE, bandwidth=12.5e9, goodput=0.97, latency_s=2e-6)}


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Simulates training steps of four models on 2 and 4 nodes with 8 V100 each, from published "
        "times of one GPU. Takes minutes; the results do not depend on the machine.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS],
                        help="models (default: all)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS],
                        help="networks (default: all)")
    declare_json(parser)
    parser.set_defaults(action=run)


def run(options: Namespace) -> int:
    """Simulate, print, and write the results; return the exit status."""
    return report("clusters", options, _COLUMNS, lambda: (
        "simulated training steps, ms", {}, _rows(options)))


def _rows(options: Namespace) -> Iterator[Row]:
    for model in options.models:
        for network in options.networks:
            for nodes in (2, 4):
                cluster = replace(NETWORKS[network], nodes=nodes)
                yield {"model": model, "network": network, "nodes": nodes, **steps_of(
                    model, cluster)}


def steps_of(model: str, cluster: Cluster) -> dict[str, float]:
    """Return the milliseconds of a model's step without communication, and by each method."""
    tensors, compute_ms = [*MODELS[model][0]()], MODELS[model][1]
    profile = _profile(tensors, compute_ms / 1e3)
    shrunk = _profile(tensors, compute_ms / 1e3, _compressed)
    halves = replace(profile, tensors=[
        replace(spec, dtype=np.dtype(np.float16)) for spec in profile.tensors])
    late = replace(profile, steps=[replace(step, ready_s=(step.compute_s,) * len(tensors))
                                   for step in profile.steps])
    ring_ms = cache(lambda size: 1e3 * cast(
        SimulatedTime, predict("ring", cluster, 4 * size)).seconds)
    ringed = partial(averaged, reduce=_ring)
    return {
        "compute_ms": compute_ms,
        "plain_ms": compute_ms + sum(ring_ms(spec.size) for spec in profile.tensors),
        **{f"{name}_ms": 1e3 * predict_step(Workload(sent, cluster), plan, steps=1).seconds
           for name, sent, plan in (
               ("fused", late, ringed), ("overlapped", profile, ringed),
               ("hierarchical", profile, averaged), ("bits16", halves, averaged),
               ("powersgd", shrunk, averaged))}}


def _ring(call: SimulatedOperation, x: Array) -> Schedule[None]:
    return call.allreduce(x, op="mean", algorithm="ring")


def _compressed(shape: tuple[int, ...]) -> int:
    """Return the number of elements that PowerSGD sends of a tensor."""
    n, m = shape[0], math.prod(shape[1:])
    sent = _RANK * (n + m)
    return sent if len(shape) > 1 and _REDUCTION * sent <= n * m else n * m


def _profile(tensors: Sequence[Tensor], compute_s: float,
             size_of: Callable[[tuple[int, ...]], int] = math.prod) -> Profile:
    """Return a model's step, in which each layer takes time in proportion to its operations."""
    work = [math.prod(shape) * positions for _, shape, positions in tensors]
    # The backward pass goes from the last tensor to the first.
    done = np.cumsum(work[::-1])[::-1] / sum(work)
    ready_s = tuple((compute_s * (_FORWARD + (1 - _FORWARD) * done)).tolist())
    specs = [buckets.TensorSpec(name, (size_of(shape),), np.dtype(np.float32))
             for name, shape, _ in tensors]
    step = StepCompute(0.0, (0.0, _FORWARD * compute_s), ready_s, compute_s, compute_s)
    return Profile(specs, [step], compute_s, 1, 1, True, "published times")


if __name__ == "__main__":
    sys.exit(main("clusters", declare))
