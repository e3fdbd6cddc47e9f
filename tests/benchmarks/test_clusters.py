"""Tests the study of clusters: its models, and that the page has what the command computes."""

import json
import math
from dataclasses import replace

import pytest
from launching import ROOT

from benchmarks import clusters, main
from mpiring.tools.simulate.step import Compute, Flag, RankStep, Workload, predict_step

# Numbers of parameters of the models in torchvision, in the Swin repository, and of
# BertForPreTraining with the settings of BERT-large.
PARAMETERS = {"ResNet-50": (161, 25_557_032), "VGG-16": (32, 138_357_544),
              "BERT-large": (398, 336_226_108), "Swin-B": (329, 87_768_224)}


@pytest.mark.parametrize("model", clusters.MODELS)
def test_models_have_all_parameters(model):
    tensors = [*clusters.MODELS[model][0]()]
    sizes = {name: math.prod(shape) for name, shape, _ in tensors}
    assert len(sizes) == len(tensors)
    assert (len(sizes), sum(sizes.values())) == PARAMETERS[model]


def test_the_page_has_the_results_of_the_command(tmp_path):
    path = tmp_path / "out.json"
    words = ["--models", "ResNet-50", "--networks", "TCP 25 Gb/s", "--json", str(path)]
    assert main("clusters", clusters.declare, words) == 0
    shown = json.loads((ROOT / "docs/benchmarks/data/clusters.json").read_text())["rows"]
    assert len(shown) == 4 * 4 * 2
    for row in json.loads(path.read_text())["rows"]:
        (same,) = (other for other in shown if all(
            other[name] == row[name] for name in ("model", "network", "nodes")))
        assert row == pytest.approx(same)


def test_each_tensor_and_then_each_bucket_is_sent_by_a_ring_of_all_ranks():
    cluster = replace(clusters.NETWORKS["TCP 25 Gb/s"], nodes=2)
    times = clusters.steps_of("VGG-16", cluster)
    profile = clusters._profile([*clusters.vgg16()], clusters.MODELS["VGG-16"][1] / 1e3)

    def one_by_one(work, step):
        planned = RankStep([Compute(step.compute_s, then=(last := Flag()))])
        for bucket in work.buckets:
            last = planned.submit([last], clusters._ring, bucket)
        return planned

    work = Workload(profile, cluster, bucket_bytes=1)
    assert len(work.buckets) == len(profile.tensors)
    plain = predict_step(work, one_by_one, steps=1)
    assert times["plain_ms"] == pytest.approx(1e3 * plain.seconds, rel=0.01)
    # A ring of 16 ranks sends all bytes almost twice over each link.
    bytes_ms = 1e3 * profile.nbytes * 2 * 15 / 16 / (cluster.bandwidth * cluster.goodput)
    assert 1 < (times["fused_ms"] - times["compute_ms"]) / bytes_ms < 1.02
    # The backward pass hides a part of it, except for that of the last bucket.
    backward_ms = 2 / 3 * times["compute_ms"]
    assert 0.9 * backward_ms < times["fused_ms"] - times["overlapped_ms"] < backward_ms


def test_powersgd_compresses_matrices_only_if_that_pays():
    assert clusters._compressed((1024, 1024)) == 4 * 2048
    assert clusters._compressed((64, 3, 7, 7)) == 4 * (64 + 147)
    assert clusters._compressed((2, 1024)) == 2048 and clusters._compressed((1024,)) == 1024
