"""Tests that pytrees are walked in order and copied with their types."""

import collections
from dataclasses import dataclass

import numpy as np

from mpiring.memory.pytrees import leaves, mapped

Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Plain:
    x: int


def test_leaves_come_in_order_with_their_paths():
    plain = Plain(3)
    nest = {"a": [1, (2, Pair(plain, {4: "text"}))], "b": (), "c": None, "d": {5}}
    assert list(leaves(nest)) == [
        (("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1, 0), plain), (("a", 1, 1, 1, 4), "text"),
        (("c",), None), (("d",), {5})]
    x = np.ones(3)
    assert [*leaves(x)] == [((), x)]


def test_copies_have_the_same_types():
    ordered = collections.OrderedDict(z=1, a=[2, Pair(3, (4,))])
    counted = collections.defaultdict(list, x=5)
    copied = mapped([ordered, counted, {6}], lambda leaf: leaf if isinstance(leaf, set) else -leaf)
    assert copied == [{"z": -1, "a": [-2, (-3, (-4,))]}, {"x": -5}, {6}]
    assert list(copied[0]) == ["z", "a"] and type(copied[0]) is collections.OrderedDict
    assert type(copied[0]["a"][1]) is Pair and copied[1].default_factory is list
    assert ordered["z"] == 1 and counted["x"] == 5
