"""The cases of all tests of kernels: sums, conversions, codecs and updates.

The vectors are in a memory. Its method `put` returns a vector with an array's elements, a number of
bytes above an aligned address; `get` returns the content of a vector after all work.
"""

import itertools
import zlib

import contract
import numpy as np

from mpiring.gpu import kernels, vectors, warps
from mpiring.memory.arrays import COMPLEX, FLOATING, SIXTEEN_BIT
from mpiring.memory.reduction import quietly, reduction
from mpiring.optim import adam, lamb, lars, parts, sgd
from mpiring.reducers.codecs.blocks import EightBit
from mpiring.reducers.codecs.halves import SixteenBit
from mpiring.reducers.codecs.signs import Sign

DTYPES = {np.dtype(dtype).name: np.dtype(dtype)
          for dtype in contract.DTYPES if dtype != "longdouble"}
CASES = [(op, np.dtype(dtype).name) for op, dtypes in contract.OPS_OF.items()
         for dtype in dtypes if dtype != "longdouble"]
# Of those, results may be NaN or Inf.
ALARMED = [name for name in DTYPES if name in (*FLOATING, *COMPLEX)]
# Sources and outs: those of a ring and of a node's window, and more than are unrolled.
COUNTS = [(2, 1), (3, 3), (18, 1)]
LENGTHS = [1, 5, 1000]

FLOATS = [dtype for dtype in FLOATING if dtype in DTYPES]
CONVERSIONS = [(dtype, "float32") for dtype in FLOATS] + [
    ("float32", other) for other in FLOATS if other != "float32"]

CODECS = [EightBit(512), EightBit(2048), EightBit(7), Sign(32), Sign(1024), SixteenBit("float16"),
          SixteenBit("bfloat16")]
# One element, a part of a block, blocks and a part that is no pack, and complete blocks.
CODED_LENGTHS = [1, 100, 3001, 4096]
KINDS = ["normal", "not finite", "small", "large", "any bits"]

UPDATES = [sgd.PLAIN, sgd.MOMENTUM, sgd.NESTEROV, adam.ADAM, lars.LARS_UPDATE, lamb.MOMENTS,
           lamb.DIRECTION, lamb.APPLY]


def same(x, y):
    """Return whether vectors have the same bits, except for NaN."""
    parts = [part.view(part.real.dtype) for part in (x, y)]
    different = parts[0].view(f"u{parts[0].itemsize}") != parts[1].view(f"u{parts[1].itemsize}")
    return all(np.isnan(parts[0][different]) & np.isnan(parts[1][different]))


def counts(op):
    """Return the counts to test: all for sums and means, one for other ops with like loops."""
    return COUNTS if op in ("sum", "mean") else COUNTS[1:2]


def divisors(op):
    """Return the divisors of a result; kernels multiply for a power of two."""
    return [3.0, 4.0, 2.5] if op == "mean" else [1.0]


def kernels_of(op, name=None):
    """Return the kernels of the checks for an op, and for one dtype if given."""
    by_name = {}
    for dtype in [DTYPES[of] for other, of in CASES if other == op and name in (None, of)]:
        several = [*counts(op), (1, 1)] if op == "mean" else counts(op)
        for (p, q), divisor in itertools.product(several, divisors(op)):
            divides, _ = kernels.division(dtype, divisor)
            for alarm in (False, True) if dtype.name in ALARMED else (False,):
                kernel = kernels.combine(
                    "sum" if op == "mean" else op, dtype, p, q, divides, alarm)
                by_name[kernel.name] = kernel
    return list(by_name.values())


def numbers(dtype, n, seed, plain=False):
    """Return numbers of all sizes, and NaN and Inf if the dtype has them.

    Args:
        plain: If true, floating-point numbers are of one size, and finite.
    """
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if dtype.kind == "c":
        return numbers(np.dtype(f"f{dtype.itemsize // 2}"), 2 * n, seed, plain).view(dtype)
    if plain:
        return rng.standard_normal(n).astype(dtype)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 5, n)).astype(dtype)
    with np.errstate(over="ignore"):
        special = np.array([np.nan, np.inf, -np.inf, 0, 6e-8, 65504, 1e38], dtype)
    where = rng.random(n) < 0.05
    x[where] = rng.choice(special, where.sum())
    return x


def expected(op, sources, divisor):
    """Return the result of Reduction on the host."""
    out = sources[0].copy()
    reduction(op, out.dtype, divisor).combine(sources, out)
    return out


def _near(out, wanted):
    return bool((abs(out - wanted) <= 8 * np.finfo(out.dtype).eps * abs(wanted)).all())


def check_combine(stream, memory, op, name, plain=False):
    """Fail unless vectors are combined as on the host, for all counts and divisors.

    Args:
        plain: See `numbers`.
    """
    dtype = DTYPES[name]
    # NumPy contracts products inside its loop, but not at the end of the loop.
    near = dtype.kind == "c" and (op == "prod" or plain)
    plain, agree = plain or near, _near if near else same
    for (p, q), n, divisor in itertools.product(counts(op), LENGTHS, divisors(op)):
        seed = zlib.crc32(f"{op} {name} {p} {n}".encode())
        arrays = [numbers(dtype, n, seed + i, plain) for i in range(p)]
        wanted = expected(op, arrays, divisor)
        sources = [memory.put(x) for x in arrays]
        # The last result replaces a source.
        outs = [memory.put(np.zeros(n, dtype)) for _ in range(q - 1)] + [sources[n % p]]
        stream.combine(op, sources, divisor, outs)
        assert all(agree(memory.get(out), wanted) for out in outs), (p, q, n, divisor)


def check_alarm(stream, memory, name):
    """Fail unless an alarm tells of NaN and Inf, and leaves the results as they are.

    A sum of finite numbers may be Inf, and in 16 bits it may become Inf when it is stored.
    """
    dtype = DTYPES[name]
    word = memory.device.gpu.pinned(4).view(np.uint32)
    large = dtype.type({"float16": 6e4, "float64": 1e308, "complex128": 1e308}.get(name, 3e38))
    told = set()
    for (p, q), n, divisor in itertools.product([(1, 1), (2, 3)], LENGTHS, [1.0, 3.0]):
        for where, value in ((0, 0), (0, np.nan), (n // 2, np.inf), (n - 1, -np.inf),
                             (n - 1, large)):
            arrays = [numbers(dtype, n, seed, plain=True) for seed in range(p)]
            for x in arrays:
                x[where] = value
            sources = [memory.put(x) for x in arrays]
            outs, plain = [[memory.put(x) for x in (*arrays, *arrays)[:q]] for _ in range(2)]
            word[:] = 7
            stream.combine("sum", sources, divisor, outs, (word, (1 << 32) + 8))
            stream.combine("sum", sources, divisor, plain)
            results = [memory.get(x) for x in plain]
            assert all(same(memory.get(x), y) for x, y in zip(outs, results, strict=True))
            assert word[0] == (7 if np.isfinite(results[0]).all() else 8), (p, n, divisor, where)
            told.add((value, int(word[0])))
    assert {(0, 7), (np.inf, 8), (large, 8)} <= told


def check_convert(memory, names):
    """Fail unless numbers are converted as on the host."""
    source, out = map(DTYPES.get, names)
    for n in LENGTHS:
        array = numbers(source, n, n)
        with np.errstate(all="ignore"):
            wanted = array.astype(out)
        x, y = memory.put(array), memory.put(np.zeros(n, out))
        vectors.convert(y, x)
        assert same(memory.get(y), wanted), n


def floats(n, kind):
    """Return numbers for a codec, of one of KINDS."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n)).astype(np.float32)
    if kind == "not finite":
        x[rng.integers(0, n)] = np.nan
        x[rng.integers(0, n)] = np.inf
    elif kind == "small":
        x *= np.float32(1e-37)
        x[n // 2:] = np.float32(1e-42)
    elif kind == "large":
        x *= np.float32(1e34)
        x[n // 2] = np.finfo(np.float32).max
    elif kind == "any bits":
        x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    return x


def check_encode(memory, codec, n, kind, offset):
    """Fail unless a payload and its error have the bits of the host's codec."""
    array = floats(n, kind)
    wanted = np.zeros(codec.payload_size(n), np.uint8)
    wanted_lost = np.zeros(n, np.float32)
    codec.encode(array, wanted, wanted_lost, 5)
    x, lost = memory.put(array, offset), memory.put(np.zeros(n, np.float32), offset)
    for place in (None, lost, x):
        payload = memory.put(np.zeros_like(wanted), offset)
        codec.encode(x, payload, place, 5)
        assert _same_payload(codec, memory.get(payload), wanted, n)
        assert place is None or same(memory.get(place), wanted_lost)


def _same_payload(codec, payload, wanted, n):
    """Compare payloads; in float16 the bits of NaN may differ."""
    if isinstance(codec, SixteenBit):
        decoded = np.empty((2, n), np.float32)
        codec.decode(payload, decoded[0])
        codec.decode(wanted, decoded[1])
        return same(decoded[0], decoded[1])
    return payload.tobytes() == wanted.tobytes()


def check_decode(memory, codec, n, offset):
    """Fail unless the decoded payload has the bits of the host's codec, added or not."""
    payload = np.zeros(codec.payload_size(n), np.uint8)
    codec.encode(floats(n, "not finite" if n == 100 else "normal"), payload, None, 3)
    for adds in (False, True):
        wanted = floats(n, "normal")
        out = memory.put(wanted, offset)
        codec.decode(payload, wanted, adds=adds)
        codec.decode(memory.put(payload, offset), out, adds=adds)
        assert same(memory.get(out), wanted)


def check_codec(memory, codec):
    """Encode and decode numbers of all kinds, at aligned and other addresses."""
    for i, n in enumerate(CODED_LENGTHS):
        for offset in (0, 4):
            check_decode(memory, codec, n, offset)
        for j, kind in enumerate(KINDS):
            check_encode(memory, codec, n, kind, (i + j) % 2 * 4)


def check_multiply(memory):
    """Fail unless a vector is multiplied as on the host."""
    for n in LENGTHS:
        array = numbers(np.dtype(np.float32), n, n)
        x = memory.put(array)
        vectors.multiply(x, 1 / 3)
        vectors.multiply(array, 1 / 3)
        assert same(memory.get(x), array), n


def check_update(memory, update, name):
    """Fail unless vectors are updated as on the host."""
    dtype = np.dtype(name)
    for n in LENGTHS:
        arrays = {x: numbers(dtype, n, n + i) for i, x in enumerate(update.vectors)}
        values = {x: 1 / (3 + i) for i, x in enumerate(update.numbers)}
        on_gpu = {x: memory.put(array, dtype.itemsize) for x, array in arrays.items()}
        update(on_gpu, values)
        quietly(update, arrays, values)
        assert all(same(memory.get(on_gpu[x]), array) for x, array in arrays.items()), n


def check_master(memory, name):
    """Fail unless only values that do not round to their 16-bit weights are overwritten."""
    for n in LENGTHS:
        master = numbers(np.dtype(np.float32), n, n)
        with np.errstate(all="ignore"):
            weights = master.astype(DTYPES[name])
        weights[::3] = numbers(DTYPES[name], n, n + 1)[::3]
        x = memory.put(master)
        parts._update_master(x, memory.put(weights))
        parts._update_master(master, weights)
        assert same(memory.get(x), master), n


def check_squares(memory, name):
    """Fail unless squares are added as on the host, except for the order, always the same."""
    for n in (*LENGTHS, 100_000):
        array = numbers(np.dtype(name), n, n, plain=True)
        x, totals = memory.put(array), memory.put(np.ones(2))
        for i in range(2):
            parts.add_squares(x, totals[i:i + 1])
        first, second = memory.get(totals)
        np.testing.assert_allclose(first, 1 + np.square(array, dtype=np.float64).sum(), 1e-12)
        assert first == second


def check_elementwise(memory):
    """Check the kernels of vectors and of optimizers."""
    check_multiply(memory)
    for name in ("float32", "float64"):
        check_squares(memory, name)
        for update in UPDATES:
            check_update(memory, update, name)
    for name in SIXTEEN_BIT:
        check_master(memory, name)


def warp_kernels():
    """Return the kernels of all checks but those of sums."""
    return [*(kernel for codec in CODECS for kernel in (
                codec._encode_kernel(), codec._decode_kernel())),
            *map(warps.narrowing, FLOATS), *map(warps.widening, FLOATS), warps.multiplying(),
            *map(parts._master_kernel, SIXTEEN_BIT), parts._sum_kernel(),
            *(make(name) for name in ("float32", "float64") for make in (
                parts._squares_kernel, *(update._kernel for update in UPDATES)))]
