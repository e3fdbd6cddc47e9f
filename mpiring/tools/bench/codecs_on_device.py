"""Times what encodes gradients on a GPU, beside a copy in its memory."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...gpu.arrays import device_named
from ...gpu.base import DeviceVector
from ...gpu.device import Device
from ...memory.arrays import Array
from ...reducers.codecs.base import Codec
from ..files import Row
from .timing import finish

# What is done: with what is lost in encoding as well, and what was decoded added to a sum.
KINDS = ("encode", "encode + lost", "decode", "add")
# Between two looks at the clock, so that to launch and to look costs little.
_LAUNCHES = 20
_READINGS = 9


def shares(n: int, named: tuple[tuple[str, Codec], ...]) -> tuple[dict[str, Any], Iterator[Row]]:
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
        payload = device.allocate(coded)
        actions: list[tuple[int, Callable[[], object]]] = [
            (x.nbytes, lambda: kernels.encode(stream, codec, x, payload, None, 1)),
            (2 * x.nbytes, lambda: kernels.encode(stream, codec, x, payload, other, 1)),
            (x.nbytes, lambda: kernels.decode(stream, codec, payload, other, False)),
            (2 * x.nbytes, lambda: kernels.decode(stream, codec, payload, other, True))]
        for nbytes, action in actions:
            yield (nbytes + coded) / seconds(action) / copy

    return {"device": str(device), "copy_GBps": copy / 1e9}, (
        {"codec": name, **dict(zip(KINDS, of_codec(codec)))} for name, codec in named)


def _put(device: Device, x: Array) -> DeviceVector:
    """Return a copy on the GPU."""
    host = device.gpu.pinned(x.nbytes).view(x.dtype)
    host[...] = x
    vector = device.allocate(x.nbytes).view(x.dtype)
    finish(device.to_device(host, vector))
    return vector
