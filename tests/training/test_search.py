"""Tests the search for the fastest settings, by steps that take the time that a function says."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mpiring.training.search import Axis, Choice, Descent

MIB = 1 << 20
LADDER = [MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 200 * MIB]
AXES = [Axis("bucket_bytes", LADDER), Axis("long", ["auto", "native", "ring"], ordered=False),
        Axis("operations", [1, 2, 4]), Axis("pieces", (0.5, 1.0, 2.0))]
STARTS = [Choice(MIB, 2), Choice(200 * MIB, 2)]
TRIALS = 15


def seconds_of(choice):
    """Return the seconds of a step: the fastest has buckets of 4 MiB, the ring, four in flight."""
    octaves = math.log2(min(choice.bucket_bytes, 16 * MIB) / (4 * MIB))
    return ((1 + 0.03 * octaves ** 2) * {"auto": 1, "native": 1.1, "ring": 0.9}[choice.long]
            * {1: 1.1, 2: 1.0, 4: 0.97}[choice.operations] * (1 + 0.02 * math.log2(choice.pieces)))


def run(search, seconds):
    """Return what was tried, and the outcome."""
    tried = [next(search)]
    try:
        while True:
            tried.append(search.send(seconds(tried[-1])))
    except StopIteration as end:
        return tried, end.value


def searched(first, seconds=seconds_of, *, identity=lambda choice: choice, axes=AXES):
    """Return what a search has tried, and its outcome."""
    return run(Descent(first, axes, identity, TRIALS).search(), seconds)


@pytest.mark.parametrize("first", STARTS, ids=str)
def test_the_fastest_settings_are_found_in_few_trials(first):
    tried, outcome = searched(first)
    best = Choice(4 * MIB, 4, "ring", pieces=0.5)
    assert seconds_of(outcome.choice) <= 1.02 * seconds_of(best)
    assert len(tried) <= TRIALS + 4 and tried[0] == first
    assert (outcome.first_s, outcome.seconds) == (seconds_of(first), seconds_of(outcome.choice))
    assert str(outcome).startswith("buckets of 4 MiB, 4 in flight, algorithm ring")
    assert str(outcome).endswith(f"% less than with {first}")


@pytest.mark.parametrize("first", STARTS, ids=str)
def test_noise_leads_nowhere_worse(first):
    gains = []
    for seed in range(50):
        noise = np.random.default_rng(seed)
        _, outcome = searched(first, lambda choice: seconds_of(choice) * (
            1 + 0.03 * min(abs(noise.standard_normal(2)))))
        gains.append(seconds_of(outcome.choice) / seconds_of(first))
    assert max(gains) <= 1.03 and np.median(gains) < 0.9


def test_noise_alone_is_no_gain():
    for seed in range(50):
        noise = np.random.default_rng(seed)
        _, outcome = searched(STARTS[0], lambda choice: 1 + 0.005 * noise.random())
        assert outcome.choice == outcome.first
    assert str(outcome) == f"no other settings are clearly faster than {outcome.first}"


def test_a_first_step_that_was_fast_by_luck_hides_nothing():
    first, asked = STARTS[1], []

    def seconds(choice):
        asked.append(choice)
        return 0.5 if asked == [first] else seconds_of(choice)

    tried, outcome = searched(first, seconds)
    assert seconds_of(outcome.choice) < 0.95 * seconds_of(first) and len(tried) <= TRIALS + 4


@pytest.mark.parametrize(("of_first", "of_best"), [(0.8, None), (None, 2.0)])
def test_a_gain_that_does_not_last_is_given_up(of_first, of_best):
    """At the end, the first settings are faster than before, or the best ones slower."""
    first, asked = STARTS[0], []

    def seconds(choice):
        asked.append(choice)
        compares = asked.count(first) > 2
        return (compares and (of_first if choice == first else of_best)) or seconds_of(choice)

    _, outcome = searched(first, seconds)
    assert outcome.choice == first and asked.count(first) == 4 and asked[-1] != first


def test_equal_steps_are_tried_once():
    def identity(choice):
        return replace(choice, pieces=1.0, long="auto" if choice.long == "native" else choice.long)

    tried, _ = searched(STARTS[0], identity=identity)
    # The first one twice, and with the best one at the end.
    identities = [identity(choice) for choice in tried[1:-4]]
    assert len(set(identities)) == len(identities)


def test_a_setting_without_choice_is_left_alone():
    axes = [Axis("bucket_bytes", [MIB]), Axis("long", ["auto"], ordered=False)]
    tried, outcome = searched(STARTS[0], axes=axes)
    assert tried == 2 * [STARTS[0]] and outcome.choice == STARTS[0]
