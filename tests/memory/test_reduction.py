"""Tests the elementwise ops: what they accept, and their edges."""

import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import contract
import ml_dtypes
import numpy as np
import pytest
from launching import HANG_S, ROOT, environment, needed

from mpiring import ConfigError
from mpiring.jit import copies, loops, sums
from mpiring.memory import reduction, sixteen
from mpiring.memory.reduction import Reduction

SIXTEEN_BIT = ["float16", ml_dtypes.bfloat16]


@pytest.fixture
def without_numba(monkeypatch):
    """Combine by NumPy."""
    monkeypatch.setattr(loops, "combiner", lambda name: None)
    monkeypatch.setattr(sums, "code", lambda name: None)
    monkeypatch.setattr(copies, "code", lambda: None)


@pytest.fixture(params=["NumPy", "numba"])
def by(request):
    """Combine in either way what both can."""
    if request.param == "numba":
        request.getfixturevalue("machine_code")
        assert sums.code("float32") and sums.code("float64") and copies.code()
    else:
        request.getfixturevalue("without_numba")
    return request.param


@pytest.mark.parametrize("op", contract.OPS)
def test_which_op_is_defined_for_which_dtype(op):
    for dtype in contract.DTYPES:
        if contract.defined(op, dtype):
            Reduction(op, dtype, 2)
        else:
            with pytest.raises(ConfigError, match=f"op='{op}' is not defined for .*; "):
                Reduction(op, dtype, 2)


def test_remedies():
    for op, dtype, remedy in (
            ("sum", "bool", "numpy.uint8"), ("mean", "int32", "use sum"),
            ("max", "complex64", "real and imaginary"), ("avg", "float32", "one of sum, mean")):
        with pytest.raises(ConfigError, match=remedy):
            Reduction(op, dtype, 2)


def combined(op, a, b, size=2):
    reduction = Reduction(op, a.dtype, size)
    for x in (a, b):
        reduction.prepare(x)
    reduction.accumulate(a, b)
    reduction.finish(a)
    return a


def test_nan_infinity_and_overflow_pass_through_silently():
    a = np.array([np.nan, 1, np.inf, 3e38], "float32")
    for op in ("max", "min", "sum", "mean", "prod"):
        with np.errstate(all="raise"):
            result = combined(op, a.copy(), np.array([1, np.nan, -np.inf, 3e38], "float32"))
        assert np.isnan(result[:2]).all()
    assert combined("sum", np.array([127], "int8"), np.array([1], "int8"))[0] == -128


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_a_16_bit_mean_divides_first(dtype):
    a, b = np.array([60000], dtype), np.array([60000], dtype)
    assert float(combined("mean", a, b)[0]) == pytest.approx(60000, rel=1e-2)


def combined_at_once(op, sources, *outs):
    with np.errstate(all="raise"):
        Reduction(op, sources[0].dtype, len(sources)).combine(sources, *outs)
    return outs[0]


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("op", contract.OPS)
@pytest.mark.usefixtures("by")
def test_combine_every_dtype_into_any_vectors(op, p, monkeypatch):
    """Sources, others, at odd offsets; what is no result stays as it was."""
    monkeypatch.setattr(reduction, "_LONG_BYTES", 1000)
    monkeypatch.setattr(reduction, "BLOCK_BYTES", 3000)
    for dtype in map(np.dtype, contract.OPS_OF[op]):
        # At offset 1 the numbers are not aligned.
        for n, offset in ((0, 0), (1, dtype.itemsize), (1024, 1), (2049, 0), (2049, 1)):
            memory = np.empty(((p + 1) * n + 1) * dtype.itemsize, np.uint8)
            vectors = [memory[offset + k * n * dtype.itemsize:][:n * dtype.itemsize].view(dtype)
                       for k in range(p + 1)]
            # The last one is no source.
            for results in ([0], [p // 2], [p], [*range(p // 2, p + 1)]):
                for rank, x in enumerate(vectors):
                    x[...] = contract.contribution(rank, n, dtype)
                before = [x.tobytes() for x in vectors]
                combined_at_once(op, vectors[:p], *[vectors[k] for k in results])
                contract.check(vectors[results[0]], p, op)
                for k, x in enumerate(vectors):
                    wanted = vectors[results[0]].tobytes() if k in results else before[k]
                    assert x.tobytes() == wanted


def values(rank, n, dtype):
    """Return numbers whose sum depends on the order."""
    random = np.random.default_rng(rank)
    return (random.standard_normal(n) * 10.0 ** random.integers(-5, 5, n)).astype(dtype)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("by")
def test_long_sums_have_the_bits_of_numpy_from_left_to_right(dtype, op, monkeypatch):
    monkeypatch.setattr(reduction, "_LONG_BYTES", 1000)
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
        sources = [values(rank, 5001, dtype) for rank in range(p)]
        for x in sources:
            x.flags.writeable = False
        expected = sources[0].copy()
        for x in sources[1:]:
            expected += x
        if op == "mean":
            expected /= np.dtype(dtype).type(p)
        outs = [np.empty(5001, dtype) for _ in range(3)]
        combined_at_once(op, sources, *outs)
        assert all(out.tobytes() == expected.tobytes() for out in outs)
        for x in sources:
            x.flags.writeable = True
        # As vectors in windows are.
        combined_at_once(op, sources, *sources)
        assert all(x.tobytes() == expected.tobytes() for x in sources)


@pytest.mark.usefixtures("by")
def test_long_sums_of_what_is_not_finite(monkeypatch):
    monkeypatch.setattr(reduction, "_LONG_BYTES", 0)
    rows = np.array([[np.nan, np.inf, 3e38, -0.0, 1e-45], [1, -np.inf, 3e38, -0.0, -1e-45],
                     [1, 1, 1, -0.0, 1e-45]], "float32")
    sums = combined_at_once("sum", list(rows), np.empty(5, "float32"))
    assert np.isnan(sums[:2]).all() and np.isinf(sums[2])
    assert sums[3] == 0 and np.signbit(sums[3]) and sums[4] == np.float32(1e-45)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 20_000])
def test_copies_to_any_addresses_change_nothing_else(n, past_caches):
    x = (np.arange(n) % 251).astype("uint8")
    memories = [np.full(n + 300, 7, "uint8") for _ in range(3)]
    outs = [memory[k * k * 9:][:n] for k, memory in enumerate(memories)]
    Reduction("max", "uint8", 2).copy(x, past_caches=past_caches)
    Reduction("max", "uint8", 2).copy(x, *outs, past_caches=past_caches)
    for k, (memory, out) in enumerate(zip(memories, outs)):
        assert out.tobytes() == x.tobytes()
        assert (memory[:k * k * 9] == 7).all() and (memory[k * k * 9 + n:] == 7).all()


def test_combine_goes_in_the_order_given():
    big, small = np.array([1e8], "float32"), np.array([1.0], "float32")
    out = np.empty(1, "float32")
    assert combined_at_once("sum", [big, -big, small], out)[0] == 1
    assert combined_at_once("sum", [big, small, -big], out)[0] == 0


# A block of 16-bit numbers, and a part of one.
N = sixteen.BLOCK + 999


def numbers(kind, seed, n, dtype):
    """Vectors that lead down every way through the 16-bit sums."""
    random = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        return {
            "usual": lambda: random.standard_normal(n),
            "tiny": lambda: random.standard_normal(n) * 1e-6,
            "spread": lambda: random.standard_normal(n) * 10 ** random.uniform(-8, 4, n),
            "large": lambda: random.choice([60000.0, -60000.0, 3e38, 1.0, 0.0], n),
            "anything": lambda: random.integers(0, 1 << 16, n, dtype=np.uint16).view(dtype),
            "full": lambda: random.uniform(-65000, 65000, n),
            "zeros": lambda: random.choice([0.0, -0.0], n),
        }[kind]().astype(dtype)


@pytest.mark.parametrize("kind", [
    "usual", "tiny", "spread", "large", "full", "anything", "zeros"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.usefixtures("by")
def test_16_bits_are_rounded_once(dtype, op, kind):
    for p in (1, 2, 3, 4, 7, 16):
        rows = [numbers(kind, 100 * p + rank, N, dtype) for rank in range(p)]
        out = combined_at_once(op, rows, np.empty(N, dtype))
        assert contract.same_bits(out, contract.rounded_once(rows, op)), (p, kind)


@pytest.mark.usefixtures("by")
def test_a_float16_mean_over_very_many_ranks_is_rounded_once():
    """8193 / 16385 is so little above one half that it must not be rounded to that first."""
    rows = [np.array([steps * 2.0**-24], "float16") for steps in (8192, 1)]
    out = np.empty(1, "float16")
    Reduction("mean", "float16", 16385).combine(rows, out)
    assert out[0] == np.float16(2.0**-24)


@pytest.mark.usefixtures("by")
def test_a_float16_mean_at_and_beside_the_ties_of_subnormal_numbers():
    for p in (3, 6, 7, 24, 1000):
        steps = np.arange(60_000, dtype=np.uint16)
        rows = [(steps % 2048).view("float16"), (steps // 2048).view("float16"),
                *[np.zeros(60_000, "float16")] * (p - 2)]
        out = combined_at_once("mean", rows, np.empty(60_000, "float16"))
        assert contract.same_bits(out, contract.rounded_once(rows, "mean")), p


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN_BIT])
def test_threads_may_share_a_reduction(dtype):
    reduction = Reduction("sum", dtype, 3)
    wrong = []

    def work(seed):
        rows = [contract.contribution(seed + rank, 70_000, dtype) for rank in range(3)]
        want = sum(row.astype("float32") for row in rows)
        for _ in range(30):
            out = np.empty(70_000, dtype)
            reduction.combine(rows, out)
            if not np.array_equal(out.astype("float32"), want):
                wrong.append(seed)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("dtype", ["float32", "float64", *SIXTEEN_BIT])
def test_combine_takes_no_memory_of_the_length_of_its_data(dtype):
    rows = [np.ones(3_000_000, dtype) for _ in range(4)]
    Reduction("mean", dtype, 4).combine(rows, rows[2])
    tracemalloc.start()
    Reduction("mean", dtype, 4).combine(rows, rows[2])
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN_BIT])
def test_a_signals_handler_may_combine_vectors_amid_a_combination(dtype):
    x, y = (np.full(20_000, value, dtype) for value in (1, 2))
    out, other = np.empty_like(x), np.empty_like(x)
    total = Reduction("sum", dtype, 3)
    total.combine([x, x, x], out)
    wrong, handled = 0, []

    def handler(*_):
        total.combine([y, y, y], other)
        handled.append((other == 6).all())

    before = signal.signal(signal.SIGALRM, handler)
    try:
        while len(handled) < 10:
            signal.setitimer(signal.ITIMER_REAL, 2e-4)
            total.combine([x, x, x], out)
            wrong += (out != 3).any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong and all(handled)


def run(code, **variables):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT,
                          env=environment(**variables),
                          check=True, text=True, capture_output=True, timeout=HANG_S).stdout


SUM = ("import numpy as np; from mpiring.memory.reduction import Reduction; "
       "x = np.array([1, 2.5], 'float16'); Reduction('sum', x.dtype, 2).combine([x, x], x); ")


def test_numba_is_loaded_when_16_bits_are_combined():
    needed("numba")
    assert run("import sys; from mpiring.memory.reduction import Reduction; "
               "Reduction('max', 'float16', 2); Reduction('sum', 'float32', 2); "
               "print('numba' in sys.modules)") == "False\n"
    assert run(SUM + "import sys; print(x, 'numba' in sys.modules)") == "[2. 5.] True\n"


def test_without_numba():
    assert run("import sys; sys.modules['numba'] = None; " + SUM + "print(x)") == "[2. 5.]\n"


def test_a_processor_that_cannot_convert_float16():
    """LLVM would call a function that is not there, and the process would end by a signal."""
    needed("numba")
    assert run(SUM + "print(x)", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == "[2. 5.]\n"
