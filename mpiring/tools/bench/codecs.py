"""Measures how fast gradients are encoded and decoded, on one core or a GPU."""

import importlib.util
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...gpu.arrays import device_named
from ...gpu.base import DeviceVector
from ...gpu.device import Device
from ...memory.arrays import Array
from ...reducers import Int8, OneBit
from ...reducers.codecs.base import Codec
from ...reducers.codecs.blocks import EightBit
from ...reducers.codecs.halves import Halves
from ...reducers.codecs.largest import select_largest
from ...reducers.codecs.signs import Sign
from ..arguments import checked
from ..files import Row, machine, refuse_unwritable, write_json
from ..table import Column, head, line
from ..units import parse_count
from .options import declare_device
from .timing import finish

DENSITY = 0.001

_CODECS: tuple[tuple[str, Codec], ...] = (
    ("float16", Halves("float16")), ("bfloat16", Halves("bfloat16")),
    ("int8", EightBit(Int8().block)), ("sign", Sign(OneBit().block)))
# What is timed: also with what encoding loses, and with what was decoded added to a sum.
KINDS = ("encode", "encode + lost", "decode", "add")
_COLUMNS = [Column("codec", -16), *(Column(kind, 14, 3) for kind in KINDS)]
_CALLS = 15
# On a GPU: launches between two looks at the clock, so that launching and looking cost little.
_LAUNCHES = 20
_READINGS = 9


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--elements", type=checked(parse_count), default=4_000_000,
                        help="numbers in a vector; default: 4M")
    declare_device(parser)
    parser.add_argument("--json", metavar="FILE", help="write results; -: to stdout alone")
    parser.set_defaults(action=run)


def run(options: Namespace) -> int:
    """Print the table, and write it if asked to; needs no MPI.

    Raises:
        ConfigError: The file cannot be written.
        MissingDependencyError: There is no CuPy, or no GPU.
    """
    if options.json:
        refuse_unwritable(options.json)
    n, rows = options.elements, []
    if options.device == "cuda":
        about, found = _shares(n)
        title = (f"on {about['device']}; a copy reads and writes {about['copy_GBps']:,.0f} GB/s; "
                 f"shares of that")
    else:
        way = "numba's code" if importlib.util.find_spec("numba") else "NumPy, for want of numba"
        about, found = {"device": "cpu", "way": way}, _rates(n)
        title = f"1e9 numbers per second, by {way}"
    print(f"# {n:,} float32, {title}\n{head(_COLUMNS)}")
    for row in found:
        rows.append(row)
        print(line(row, _COLUMNS), flush=True)
    if options.json:
        write_json(options.json, "codecs", {**machine(), **about, "elements": n}, rows)
    return 0


def _rates(n: int) -> Iterator[Row]:
    """Measure each codec on n random numbers: 1e9 numbers per second, by kind."""
    x = np.random.default_rng(0).standard_normal(n, np.float32)
    out = np.zeros_like(x)
    for name, codec in _CODECS:
        yield {"codec": name, **_rates_of(codec, x, out)}
    count = max(1, int(DENSITY * n))
    yield {"codec": f"largest {DENSITY:g}", "encode": _rate(n, lambda: select_largest(x, count, 1))}


def _rates_of(codec: Codec, x: Array, out: Array) -> dict[str, float]:
    payload = np.zeros(codec.payload_size(x.size), np.uint8)
    actions: tuple[Callable[[], object], ...] = (
        lambda: codec.encode(x, payload, None, 1), lambda: codec.encode(x, payload, out, 1),
        lambda: codec.decode(payload, out), lambda: codec.decode(payload, out, adds=True))
    return {kind: _rate(x.size, action)
            for kind, action in zip(KINDS, actions)}


def _rate(n: int, call: Callable[[], object]) -> float:
    """Return 1e9 numbers per second: the median of several calls, after one that compiles."""
    seconds = []
    for _ in range(1 + _CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return n / statistics.median(seconds[1:]) / 1e9


def _shares(n: int) -> tuple[dict[str, Any], Iterator[Row]]:
    """Measure codecs on n random numbers.

    Returns:
        Which GPU, and 1e9 bytes per second of a copy, read and written; and for each codec, by
        what is done: the bytes that it must read and write, per second, as a share of that.

    Raises:
        MissingDependencyError: There is no CuPy, or no GPU.
    """
    from ...reducers.codecs import kernels
    device = device_named("cuda", 0)
    x = _put(device, np.random.default_rng(0).standard_normal(n, np.float32))
    other = device.allocate(x.nbytes).view(np.float32)
    stream = device.gpu.stream()

    def seconds(launch: Callable[[], object]) -> float:
        readings = []
        for _ in range(1 + _READINGS):
            began = time.perf_counter()
            for _ in range(_LAUNCHES):
                launch()
            finish(stream.record())
            readings.append((time.perf_counter() - began) / _LAUNCHES)
        # The first one compiles.
        return statistics.median(readings[1:])

    copy = 2 * x.nbytes / seconds(lambda: stream.combine("sum", [x], 1, [other]))

    def of_codec(codec: Any) -> Iterator[float]:
        coded = codec.payload_size(n)
        payload, on_gpu = device.allocate(coded), kernels.OnDevice(codec, stream)
        actions: list[tuple[int, Callable[[], object]]] = [
            (x.nbytes, lambda: on_gpu.encode(x, payload, None, 1)),
            (2 * x.nbytes, lambda: on_gpu.encode(x, payload, other, 1)),
            (x.nbytes, lambda: on_gpu.decode(payload, other)),
            (2 * x.nbytes, lambda: on_gpu.decode(payload, other, adds=True))]
        for nbytes, action in actions:
            yield (nbytes + coded) / seconds(action) / copy

    return {"device": str(device), "copy_GBps": copy / 1e9}, (
        {"codec": name, **dict(zip(KINDS, of_codec(codec)))} for name, codec in _CODECS)


def _put(device: Device, x: Array) -> DeviceVector:
    """Return a copy on the GPU."""
    host = device.gpu.pinned(x.nbytes).view(x.dtype)
    host[...] = x
    vector = device.allocate(x.nbytes).view(x.dtype)
    finish(device.to_device(host, vector))
    return vector
