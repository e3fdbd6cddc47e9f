"""Trains with each pair of features of Horovod's optimizer; compares with one process, or refuses.

    mpiexec -n 3 python tests/programs/horovod_pairs.py FOLDER
"""

import itertools
import json
import sys

import torch
from torch import nn

import mpiring.horovod.torch as hvd

FOLDER = sys.argv[1]
PAIR = hvd.ProcessSet([0, 2])
hvd.init(process_sets=[PAIR])
RANK, SIZE = hvd.rank(), hvd.size()
# For each feature, its arguments of DistributedOptimizer.
FEATURES = {
    "join": {}, "elastic": {}, "timeline": {}, "sparse": {},
    "process set": {"process_set": PAIR}, "groups": {"groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "accumulation": {"backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16}, "Adasum": {"op": hvd.Adasum}}
REFUSED = {
    ("join", "Adasum"): (hvd.HorovodInternalError, "Step adasum is not supported with Join"),
    ("predivide", "Adasum"): (ValueError, "gradient_predivide_factor not supported with op != ")}
RATE = 0.1


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, words):
        return self.layers(self.embedding(words)).square().mean()


def words(step, rank, features):
    # Adasum of equal changes is the change of one rank.
    rank = 0 if "Adasum" in features else rank
    return torch.tensor([(step + rank) % 5, (step * rank) % 5, 5])


def steps_of(rank, features):
    return 2 + rank if "join" in features else 3


def passes_of(features):
    return range(2 if "accumulation" in features else 1)


def alone(features):
    """Return what one process makes of the data of the ranks that this rank trains with."""
    ranks = range(SIZE)
    if "process set" in features:
        ranks = PAIR.ranks if RANK in PAIR.ranks else [RANK]
    model = Model(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(steps_of(RANK, features)):
        optimizer.zero_grad()
        for rank, each in itertools.product(ranks, passes_of(features)):
            # Ranks that have joined contribute zeros.
            if step < steps_of(rank, features):
                (model(words(2 * step + each, rank, features)) / len(ranks)).backward()
        optimizer.step()
    return model


def train(model, optimizer, features):
    def steps(state=None):
        for step in range(steps_of(RANK, features)):
            optimizer.zero_grad()
            for each in passes_of(features):
                model(words(2 * step + each, RANK, features)).backward()
            optimizer.step()
            if state is not None:
                state.commit()

    if "elastic" not in features:
        steps()
        return
    state = hvd.elastic.TorchState(model, optimizer)
    hvd.elastic.run(steps)(state)
    nn.init.zeros_(model.embedding.weight)
    state.restore()


def join(features):
    last = hvd.join()
    # Elsewhere, ranks have no steps in common that would show which rank comes last.
    assert last == SIZE - 1 or "process set" in features or features in REFUSED
    assert hvd.allgather_object(last) == SIZE * [last]


def holds(features):
    model = Model("sparse" in features)
    settings = {name: value for each in features for name, value in FEATURES[each].items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE), model.named_parameters(), **settings)
    path = f"{FOLDER}/{'-'.join(features)}.json"
    if "timeline" in features:
        hvd.start_timeline(path)
    train(model, optimizer, features)
    if "join" in features:
        join(features)
    if "timeline" in features:
        hvd.stop_timeline()
        if RANK == 0:
            assert {"NEGOTIATE_STEP", "STEP"} <= {event["name"] for event in json.load(open(path))}
    for (name, p), q in zip(model.named_parameters(), alone(features).parameters(), strict=True):
        # Between nodes, gradients are rounded to float16.
        torch.testing.assert_close(p, q, rtol=1e-4, atol=3e-4 if "fp16" in features else 1e-6,
                                   msg=lambda text: f"{features}, {name}: {text}")


def is_refused(features, kind, words):
    try:
        holds(features)
    except kind as error:
        assert words in str(error), error
    else:
        # The first rank has joined, and waits until the ranks that were refused have also joined.
        assert "join" in features and RANK == 0, features
        return
    if "join" in features:
        join(features)


assert SIZE > 2
for pair in [(name,) for name in FEATURES] + [*itertools.combinations(FEATURES, 2)]:
    if pair in REFUSED:
        is_refused(pair, *REFUSED[pair])
    else:
        holds(pair)
hvd.shutdown()
print("all is well", flush=True)
