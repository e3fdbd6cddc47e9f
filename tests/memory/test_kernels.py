"""Holds the kernels that combine vectors to the bits of the host's Reduction, on the host."""

import itertools
import zlib

import ml_dtypes
import numpy as np
import pytest
from host_kernels import HostStream, compiled, complaints, placed, same, vector

from mpiring.errors import ConfigError
from mpiring.memory import kernels
from mpiring.memory.arrays import COMPLEX, FLOATING, INTEGER
from mpiring.memory.reduction import reduction

OPS = ("sum", "mean", "prod", "max", "min", "band", "bor", "bxor")
DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
          for name in (*FLOATING, *COMPLEX, *INTEGER, "bool") if not name.endswith("longdouble")
          and name != "clongdouble"}
# Sources and outs: what a ring and a node's window need, and more than are unrolled.
COUNTS = [(2, 1), (3, 3), (18, 1)]
LENGTHS = [1, 5, 1000]


def _defined(op, dtype):
    try:
        reduction(op, dtype, 2)
    except ConfigError:
        return False
    return True


CASES = [(op, name) for op, name in itertools.product(OPS, DTYPES) if _defined(op, DTYPES[name])]


def _counts(op):
    """Return the counts to test; a long loop of one op is like that of any other."""
    return COUNTS if op in ("sum", "mean") else COUNTS[:2]


def _divisors(op):
    """Return by what a result is divided: a power of two is done by multiplying."""
    return [3.0, 4.0, 2.5] if op == "mean" else [1.0]


def _kernels():
    found = {}
    for op, name in CASES:
        dtype = DTYPES[name]
        counts = [*_counts(op), (1, 1)] if op == "mean" else _counts(op)
        for (p, q), divisor in itertools.product(counts, _divisors(op)):
            divides, _ = kernels.division(dtype, divisor)
            kernel = kernels.combine("sum" if op == "mean" else op, dtype, p, q, divides)
            found[kernel.name] = kernel
    return list(found.values())


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return HostStream(compiled(_kernels(), tmp_path_factory.mktemp("kernels")))


def _numbers(dtype, n, seed, plain=False):
    """Return numbers of all sizes, and where the dtype has them NaN and Inf.

    Args:
        plain: Complex numbers are of one size, and finite.
    """
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if dtype.kind == "c":
        parts = np.dtype(f"f{dtype.itemsize // 2}")
        x = rng.standard_normal(2 * n).astype(parts) if plain else _numbers(parts, 2 * n, seed)
        return x.view(dtype)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 5, n)).astype(dtype)
    with np.errstate(over="ignore"):
        special = np.array([np.nan, np.inf, -np.inf, 0, 6e-8, 65504, 1e38], dtype)
    where = rng.random(n) < 0.05
    x[where] = rng.choice(special, where.sum())
    return x


def _expected(op, sources, divisor):
    out = sources[0].copy()
    if len(sources) > 1 or divisor != 1:
        kind = "mean" if divisor != 1 else "sum" if op == "mean" else op
        reduction(kind, out.dtype, divisor).combine(sources, out)
    return out


def _agree(op, out, expected):
    if op != "prod" or out.dtype.kind != "c":
        return same(out, expected)
    # NumPy contracts them in its loop, and not at the loop's end.
    return bool((abs(out - expected) <= 8 * np.finfo(out.dtype).eps * abs(expected)).all())


@pytest.mark.parametrize(("op", "name"), CASES)
def test_results_have_the_bits_of_the_host(stream, op, name):
    dtype = DTYPES[name]
    for (p, q), n in itertools.product(_counts(op), LENGTHS):
        for divisor in _divisors(op):
            seed = zlib.crc32(f"{op} {name} {p} {n}".encode())
            sources = [placed(_numbers(dtype, n, seed + i, op == "prod"), 0)
                       for i in range(p)]
            expected = _expected(op, sources, divisor)
            # The last result takes the place of a source.
            outs = [placed(np.zeros(n, dtype), 0) for _ in range(q - 1)] + [sources[1]]
            stream.combine(op, [vector(x) for x in sources], divisor, [vector(x) for x in outs])
            assert all(_agree(op, out, expected) for out in outs), (p, q, n, divisor)


@pytest.mark.parametrize(("offsets", "packs"), [((0, 0, 0), 250), ((8, 8, 8), 249),
                                                ((4, 52, 20), 249), ((0, 4, 0), 0)])
def test_any_place_will_do(stream, offsets, packs):
    """Whole packs are read wherever they lie alike, between elements that go one by one."""
    first, second, out = (placed(_numbers(np.dtype("f4"), 1000, seed), offset)
                          for seed, offset in enumerate(offsets))
    expected = _expected("sum", [first, second], 1)
    stream.combine("sum", [vector(first), vector(second)], 1, [vector(out)])
    assert same(out, expected)
    assert stream.launched[-1]["packs"] == packs


def test_a_single_source_is_divided_or_copied(stream):
    x = placed(_numbers(np.dtype("f4"), 100, 0), 0)
    out = np.zeros_like(x)
    stream.combine("mean", [vector(x)], 3.0, [vector(out)])
    assert same(out, x / np.float32(3))
    launches = len(stream.launched)
    stream.combine("mean", [vector(x)], 1, [vector(x), vector(out)])
    assert same(out, x) and len(stream.launched) == launches


def test_the_compiler_of_gpus_takes_all_kernels():
    """Where it is there: NVRTC, which needs no GPU; g++ has taken all of them in any case."""
    assert complaints(_kernels()) == {}
