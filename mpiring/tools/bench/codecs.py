"""Times what encodes gradients on one core: how many numbers per second."""

import importlib.util
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import numpy as np

from ...memory.arrays import Array
from ...reducers import Int8, OneBit
from ...reducers.codecs.base import Codec
from ...reducers.codecs.blocks import EightBit
from ...reducers.codecs.halves import Halves
from ...reducers.codecs.largest import select_largest
from ...reducers.codecs.signs import Sign
from ..files import Row, machine, refuse_unwritable, write_json
from ..table import Column, head, line
from . import codecs_on_device

DENSITY = 0.001

_CODECS: tuple[tuple[str, Codec], ...] = (
    ("float16", Halves("float16")), ("bfloat16", Halves("bfloat16")),
    ("int8", EightBit(Int8().block)), ("sign", Sign(OneBit().block)))
_COLUMNS = [Column("codec", "codec", -16), *(
    Column(kind, kind, 14, 3) for kind in codecs_on_device.KINDS)]
_CALLS = 15


def run(options: Namespace) -> int:
    """Print the table, and write it where it is asked for; needs no MPI.

    Raises:
        ConfigError: The file cannot be written.
        MissingDependencyError: There is no CuPy, or no GPU.
    """
    if options.json:
        refuse_unwritable(options.json)
    n, rows = options.elements, []
    if options.device == "cuda":
        about, found = codecs_on_device.shares(n, _CODECS)
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
    """Measure each codec on n random numbers: 1e9 numbers per second, by what is done to them."""
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
        lambda: codec.decode(payload, out), lambda: codec.add(payload, out))
    return {kind: _rate(x.size, action)
            for kind, action in zip(codecs_on_device.KINDS, actions)}


def _rate(n: int, call: Callable[[], object]) -> float:
    """Return 1e9 numbers per second: the median of several calls, after one that compiles."""
    seconds = []
    for _ in range(1 + _CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return n / statistics.median(seconds[1:]) / 1e9
