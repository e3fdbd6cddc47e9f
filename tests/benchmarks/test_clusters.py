"""Tests the study of clusters: its models, and that the page has what the command computes."""

import json
import math
from dataclasses import replace

import pytest
from launching import ROOT

from benchmarks import clusters, main
from mpiring.tools.simulate.algorithms import predict

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


@pytest.mark.parametrize("network", clusters.NETWORKS)
def test_the_ring_is_a_bound(network):
    cluster = replace(clusters.NETWORKS[network], nodes=2)
    for nbytes, most in ((4096, 1.05), (1 << 20, 1.7), (18 << 20, 1.05)):
        ratio = predict("ring", cluster, nbytes).seconds / clusters.ring_s(cluster, nbytes)
        assert 1 <= ratio < most


def test_powersgd_compresses_matrices_only_if_that_pays():
    assert clusters._compressed((1024, 1024)) == 4 * 2048
    assert clusters._compressed((64, 3, 7, 7)) == 4 * (64 + 147)
    assert clusters._compressed((2, 1024)) == 2048 and clusters._compressed((1024,)) == 1024
