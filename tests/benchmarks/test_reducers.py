"""Tests the rows and the picture of training with each Reducer."""

from argparse import Namespace

import pytest

from benchmarks import reducers
from mpiring.tools.bench.benchmark import Measurement

ABOUT, REDUCING = {"ranks": 4}, Namespace(settled=2, target_loss=None)
NAN = float("nan")


def of_reducer(name, step, bits=(), seed=1, steps=5, settled=True, **costs):
    labels = {"reducer": name, "parameters": 13_000_000, "optimizer": "adamw", "seed": seed}
    cost = {"dense_bytes": 80, "sent_bytes": 80, "host_bytes": 100, "encode_s": 0.0,
            "wire_s": 0.0, "decode_s": 0.0} | costs
    return Measurement(labels, {
        "step": [9 * step, *[step] * (steps - 1)], "bits": list(bits),
        "validated": [1, 3, 5][:len(bits)],
        "sent": [100, 300, 500][:len(bits)],
        **({key: [value] for key, value in cost.items()} if bits and settled else {})})


REDUCED = [of_reducer("alone", 0.5), of_reducer("dense", 1.0, [7.0, 5.0, 4.0]),
           of_reducer("topk", 0.75, [8.0, 4.5, 4.25], sent_bytes=8, host_bytes=20, encode_s=0.01),
           of_reducer("slow", 2.0, [7.0, 5.25], steps=3),
           of_reducer("alone", 1.0, seed=2), of_reducer("dense", 2.0, [7.0, 5.5, 4.5], 2),
           of_reducer("topk", 1.5, [8.0, 5.0, 4.75], 2, sent_bytes=8, host_bytes=20),
           of_reducer("slow", 20.0, [7.0], 2, steps=1, settled=False)]


def test_rows_of_reducers():
    alone, dense, topk, slow = reducers.rows(REDUCED, ABOUT, REDUCING)
    assert [row["seeds"] for row in (alone, dense, topk, slow)] == [2] * 4
    # Ratios are those of a seed, in which the machine was half as fast with the second one.
    assert alone["over_alone"] == dense["over_dense"] == 1 and dense["over_alone"] == 2
    assert topk["over_dense"] == 0.75 and topk["median_ms"] == 1125 and topk["p95_ms"] == 1500
    assert dense["compression_ratio"] == dense["wire_ratio"] == 1
    assert topk["compression_ratio"] == 10 and topk["wire_ratio"] == 5
    assert topk["encode_ms"] == 5 and alone["encode_ms"] != alone["encode_ms"]
    assert dense["curve_steps"] == [1, 3, 5] and dense["curve_s"] == [13.5, 16.5, 19.5]
    assert dense["curve_bytes"] == [100, 300, 500]
    assert dense["curve_bits"] == [7, 5.25, 4.25] and topk["curve_bits"] == [8, 4.75, 4.5]
    # What dense reaches at or after 4 of its 5 steps, and both reach at the last one.
    assert dense["target_bits"] == 4.25 and dense["seconds_to_target"] == 19.5
    assert topk["bits_over_dense"] == 0.25 and topk["spread_of_seeds"] == 0.5
    assert topk["seconds_to_target"] != topk["seconds_to_target"]
    assert alone["bits_per_byte"] != alone["bits_per_byte"] and alone["curve_s"] == []


def test_rows_of_reducers_that_were_stopped_or_have_a_target():
    options = Namespace(settled=2, target_loss=5.25)
    _, dense, topk, slow = reducers.rows(REDUCED, ABOUT, options)
    assert dense["seconds_to_target"] == 16.5 and dense["times_faster"] == 1
    assert topk["seconds_to_target"] == 12.375 and topk["times_faster"] == pytest.approx(4 / 3)
    # As far as all its seeds have come, and there compared.
    assert slow["steps"] == 1 and slow["curve_steps"] == [1] and slow["bits_over_dense"] == 0
    assert slow["median_ms"] == 2000 and slow["over_dense"] == 2
    (row,) = reducers.rows([of_reducer("dense", 1.0, [7.0, 5.0, 4.241])], ABOUT, REDUCING)
    assert row["target_bits"] == 4.25, "rounded up"
    (row,) = reducers.rows([of_reducer("dense", 1.0, [7.0, NAN, NAN])], ABOUT, REDUCING)
    assert row["target_bits"] != row["target_bits"]
    (row,) = reducers.rows([of_reducer("topk", 1.0, [8.0])], ABOUT, REDUCING)
    assert row["bits_per_byte"] == 8
    for name in "over_dense", "bits_over_dense", "target_bits", "times_faster", "wire_ratio":
        assert row[name] != row[name]
