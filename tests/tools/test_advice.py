"""Tests what is predicted of Reducers, given curves and costs; and once what is measured."""

import re

import pytest
from jobs import run
from launching import shell

from mpiring import ConfigError
from mpiring.tools.tune.advice import Method, Wire, Workload, parse_matrix, predict, report, verdict

# 10 MB/s.
WIRE = Wire(latency_s=1e-3, s_per_byte=1e-7)
DENSE = Method("Mean()", -1, 1.0, 1.0, 0.0)
HALF = Method("half", 0, 0.5, 0.5, 1e-9)
TENTH = Method("tenth", 2, 0.1, 0.1, 2e-9)
BUCKETS = [1_000_000, 3_000_000]


def predictions(*methods):
    return [predict(method, WIRE, BUCKETS) for method in methods]


def said(compute_s, *methods):
    dense, *others = predictions(DENSE, *methods)
    return " ".join(verdict(dense, others, compute_s))


def test_bytes_cost_a_reducer_what_they_cost_the_plain_mean():
    dense, half, tenth = predictions(DENSE, HALF, TENTH)
    assert (dense.sent_bytes, dense.codec_s) == (4e6, 0)
    assert dense.wire_s == pytest.approx(0.402), "two buckets, two latencies"
    assert half.wire_s == pytest.approx(0.202) and half.codec_s == pytest.approx(0.004)
    assert tenth.wire_s == pytest.approx(0.042) and tenth.sent_bytes == pytest.approx(4e5)


def test_the_wire_hides_behind_backward_but_the_last_bucket_and_codecs_behind_nothing():
    (half,) = predictions(HALF)
    assert half.step_s() == pytest.approx(0.206)
    assert half.step_s(0.03) == pytest.approx(0.03 + 0.004 + 0.202 - 0.02)
    assert half.step_s(3.0) == pytest.approx(3 + 0.004 + 0.151)


def test_the_gentlest_that_pays_is_named_first():
    text = said(None, TENTH, HALF)
    assert "half changes gradients least" in text and "predicted to take 0.51" in text
    assert "tenth is predicted to take 0.12, and may cost accuracy" in text
    assert re.search(r"From a computing time of 15[12] ms a step on, .* bucket's 301 ms", text)
    assert "tenth changes gradients least" in said(0.1, TENTH)


def test_what_is_clearly_faster_is_preferred_and_what_is_hardly_faster_unmentioned():
    slower = Method("slower", 0, 0.6, 0.6, 0.0)
    close, closer = Method("close", 2, 0.48, 0.48, 0.0), Method("closer", 0, 0.49, 0.49, 0.0)
    text = said(None, slower, HALF, closer, close)
    assert "half changes gradients least" in text and "close" not in text


@pytest.mark.parametrize(("compute_s", "codec_s", "reason"), [
    (None, 1e-6, "the fastest, half, is predicted to take 10.45 of the time that communication"),
    (0.3, 0.0345e-6, "half, is predicted to take 0.98 of the time that a step"),
    (10.0, 0.0, "communication, 101 of 402 ms can hide behind the backward pass"),
])
def test_it_is_said_that_nothing_pays_and_why(compute_s, codec_s, reason):
    text = said(compute_s, Method("half", 0, 0.5, 0.5, codec_s))
    assert text.startswith("Compression does not pay here") and reason in text
    assert ("--compute-ms" in text) == (compute_s is None)


def test_buckets_are_those_of_a_model_of_so_many_bytes():
    buckets = Workload(52 << 20).buckets(1)
    assert sum(buckets) == 52 << 20 and 8 << 20 < max(buckets) <= 25 << 20 and len(buckets) > 3
    assert Workload(52 << 20).buckets(2) == [4 << 20] * 13
    assert Workload(1000).buckets(2) == [1024], "a cache line is the least"
    assert Workload((4 << 20) + 2).buckets(2) == [4 << 20]


def test_the_table_has_a_line_for_each():
    dense, *others = predictions(DENSE, HALF, TENTH)
    lines = report(Workload(4_000_000, compute_s=0.15), dense, others).splitlines()
    assert "150 ms of computing" in lines[0]
    assert lines[2].split()[-3:] == ["step", "ms", "/dense"]
    assert lines[3].split() == ["Mean()", "4.00", "1.00", "0.00", "402", "452", "1.0"]
    assert lines[4].split() == ["half", "2.00", "2.00", "4.00", "202", "305", "0.67"]
    assert max(map(len, lines[3:])) <= 100


def test_shapes():
    assert parse_matrix("512x2048") == (512, 2048)
    for text in ("512", "0x4", "4x-1", "axb"):
        with pytest.raises(ConfigError, match="expected rows x columns"):
            parse_matrix(text)


def test_reducers_are_measured_where_there_are_nodes():
    ended = run(2, "-m", "mpiring", "tune", "--model-bytes", "1M", "--largest-matrix", "64x128",
                MPIRING_SHARED_MEMORY="0")
    assert ended.status == 0, ended.output
    rows = {line.split()[0]: line.split()[-6:] for line in ended.output.splitlines()
            if re.fullmatch(r"\w+\(.*?(\s+[\d.,]+){6}", line)}
    assert list(rows) == ["Mean()", 'Cast("bfloat16")', 'Cast("float16")', "Int8()",
                          "PowerSGD(rank=2)", "OneBit()", "TopK(0.001)"]
    ratios = {name: float(row[1]) for name, row in rows.items()}
    assert ratios["Mean()"] == 1
    assert 1.9 < ratios['Cast("float16")'] <= 2 and 3.5 < ratios["Int8()"] <= 4
    # r (n + m) numbers instead of n m, and a few bytes to agree.
    assert 0.8 < ratios["PowerSGD(rank=2)"] / (64 * 128 / (2 * (64 + 128))) <= 1
    assert 25 < ratios["OneBit()"] <= 32 and ratios["TopK(0.001)"] > 50
    assert "--compute-ms" in ended.output and "Casts change them least" in ended.output
    assert "auto takes " in ended.output and "auto takes shared" not in ended.output


def test_on_one_node_nothing_is_compressed():
    ended = run(2, "-m", "mpiring", "tune", "--model-bytes", "52M", "--compute-ms", "100")
    assert ended.status == 0, ended.output
    assert "have nothing to compress" in ended.output and "MB sent" not in ended.output
    assert re.search(r"simulate --reduction-rate [\d.]+GB/s --node-bandwidth [\d.]+GB/s$",
                     ended.output, re.MULTILINE), ended.output


def test_what_cannot_be_measured_is_refused():
    ended = shell("python -m mpiring tune || python -m mpiring tune --compute-ms 100")
    assert ended.status == 2 and "start several, as with mpirun" in ended.output, ended.output
    assert "--model-bytes" in ended.output
