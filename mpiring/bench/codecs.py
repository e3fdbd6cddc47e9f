"""Times what encodes gradients on one core: how many numbers per second."""

import importlib.util
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import numpy as np

from ..codecs.base import Codec
from ..codecs.blocks import EightBit
from ..codecs.halves import Halves
from ..codecs.largest import select_largest
from ..codecs.signs import Sign
from ..memory.arrays import Array
from ..reducers import Int8, OneBit
from . import codecs_on_device
from .results import Row
from .table import Column, head, line

DENSITY = 0.001

_CODECS: tuple[tuple[str, Codec], ...] = (
    ("float16", Halves("float16")), ("bfloat16", Halves("bfloat16")),
    ("int8", EightBit(Int8().block)), ("sign", Sign(OneBit().block)))
_COLUMNS = [Column("codec", "codec", -16), *(
    Column(kind, kind, 14, 3) for kind in ("encode", "encode + lost", "decode", "add"))]
_CALLS = 15


def run(options: Namespace) -> int:
    """Print the table; needs no MPI."""
    if options.device == "cuda":
        return codecs_on_device.run(options, _CODECS)
    way = "numba's code" if importlib.util.find_spec("numba") else "NumPy, for want of numba"
    print(f"# {options.elements:,} float32, 1e9 numbers per second, by {way}\n{head(_COLUMNS)}")
    for row in rates(options.elements):
        print(line(row, _COLUMNS), flush=True)
    return 0


def rates(n: int) -> Iterator[Row]:
    """Measure each codec on n random numbers.

    Returns:
        For each, 1e9 numbers per second, by what is done to them.
    """
    x = np.random.default_rng(0).standard_normal(n, np.float32)
    out = np.zeros_like(x)
    for name, codec in _CODECS:
        yield {"codec": name, **_rates_of(codec, x, out)}
    count = max(1, int(DENSITY * n))
    yield {"codec": f"largest {DENSITY:g}", "encode": _rate(n, lambda: select_largest(x, count, 1))}


def _rates_of(codec: Codec, x: Array, out: Array) -> dict[str, float]:
    payload = np.zeros(codec.payload_size(x.size), np.uint8)
    return {
        "encode": _rate(x.size, lambda: codec.encode(x, payload, None, 1)),
        "encode + lost": _rate(x.size, lambda: codec.encode(x, payload, out, 1)),
        "decode": _rate(x.size, lambda: codec.decode(payload, out)),
        "add": _rate(x.size, lambda: codec.add(payload, out)),
    }


def _rate(n: int, call: Callable[[], object]) -> float:
    """Return 1e9 numbers per second: the median of several calls, after one that compiles."""
    seconds = []
    for _ in range(1 + _CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return n / statistics.median(seconds[1:]) / 1e9
