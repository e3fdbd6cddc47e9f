"""Measures how fast gradients are encoded and decoded, on one core or a GPU."""

import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiring.provisional import codecs, gpu
from mpiring.reducers import Int8, OneBit
from mpiring.tools.bench.benchmark import declare_device
from mpiring.tools.bench.timing import Action, by_clock, finish
from mpiring.tools.table import Column, Row

from . import main, report, vectors

DENSITY = 0.001

_CODECS: tuple[tuple[str, Any], ...] = (
    ("float16", codecs.SixteenBit("float16")), ("bfloat16", codecs.SixteenBit("bfloat16")),
    ("int8", codecs.EightBit(Int8().block)), ("sign", codecs.Sign(OneBit().block)))
# Measured operations: encoding and decoding, also with the loss and with a sum.
KINDS = ("encode", "encode + lost", "decode", "add")
_COLUMNS = [Column("codec", -16), *(Column(kind, 14, 3) for kind in KINDS)]
# Number of vectors that each kind reads and writes, in addition to the payload.
_VECTORS = (1, 2, 1, 2)
# Number of launches on a GPU between two clock readings, which keeps their overhead small.
_LAUNCHES = 20


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    vectors.declare_elements(parser, 4, "numbers in a vector")
    declare_device(parser)
    parser.set_defaults(action=run)


def run(options: Namespace) -> int:
    """Print the table, and write it if requested; needs no MPI.

    Raises:
        ConfigError: The file cannot be written.
        MissingDependencyError: There is no CuPy, or no GPU.
    """
    def measure() -> tuple[str, dict[str, Any], Iterator[Row]]:
        if options.device == "cuda":
            about, rows = _shares(options.elements)
            title = (f"on {about['device']}; a copy reads and writes {about['copy_GBps']:,.0f} "
                     f"GB/s; shares of that")
        else:
            about, rows = {"device": "cpu", "way": vectors.code_kind()}, _rates(options.elements)
            title = f"1e9 numbers per second, by {about['way']}"
        return (f"{options.elements:,} float32, {title}",
                {**about, "elements": options.elements}, rows)

    return report("codecs", options, _COLUMNS, measure)


def _rates(n: int) -> Iterator[Row]:
    """Measure each codec on n random numbers, in 1e9 numbers per second, by kind."""
    x = np.random.default_rng(0).standard_normal(n, np.float32)
    out = np.zeros_like(x)
    for name, codec in _CODECS:
        payload = np.zeros(codec.payload_size(n), np.uint8)
        yield {"codec": name, **{kind: n / _seconds(action) / 1e9 for kind, action in
                                 _actions(codec, x, payload, out).items()}}
    count = max(1, int(DENSITY * n))
    yield {"codec": f"largest {DENSITY:g}",
           "encode": n / _seconds(lambda: codecs.select_largest(x, count, 1)) / 1e9}


def _shares(n: int) -> tuple[dict[str, Any], Iterator[Row]]:
    """Measure each codec on n random numbers on a GPU.

    Returns:
        The GPU with the bandwidth of a copy in 1e9 bytes per second, read and written. Then, for
        each codec and kind, the bandwidth of necessary reads and writes as a share of the copy's.

    Raises:
        MissingDependencyError: There is no CuPy, or no GPU.
    """
    device = gpu.device_named("cuda", 0)
    host = device.gpu.pinned(4 * n).view(np.float32)
    host[...] = np.random.default_rng(0).standard_normal(n, np.float32)
    x, out = (device.allocate(4 * n).view(np.float32) for _ in range(2))
    finish(device.to_device(host, x))

    def seconds(action: Action) -> float:
        return _seconds(action, _LAUNCHES, lambda: finish(device.event()))

    copy = 2 * x.nbytes / seconds(lambda: device.combine("sum", [x], 1, [out]))

    def rows() -> Iterator[Row]:
        for name, codec in _CODECS:
            coded = codec.payload_size(n)
            actions = _actions(codec, x, device.allocate(coded), out)
            yield {"codec": name, **{kind: (vectors * x.nbytes + coded) / seconds(action) / copy
                                     for vectors, (kind, action) in zip(_VECTORS, actions.items())}}

    return {"device": str(device), "copy_GBps": copy / 1e9}, rows()


def _actions(codec: Any, x: Any, payload: Any, out: Any) -> dict[str, Action]:
    return dict(zip(KINDS, (
        lambda: codec.encode(x, payload, None, 1), lambda: codec.encode(x, payload, out, 1),
        lambda: codec.decode(payload, out), lambda: codec.decode(payload, out, adds=True))))


def _seconds(action: Action, times: int = 1, finished: Action = lambda: None) -> float:
    """Return the seconds of an action: the median of several readings after one that compiles."""
    def launched() -> None:
        for _ in range(times):
            action()
        finished()

    return statistics.median([by_clock(launched) / times for _ in range(1 + vectors.READINGS)][1:])


if __name__ == "__main__":
    sys.exit(main("codecs", declare))
