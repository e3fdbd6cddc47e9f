"""Tests that pytrees are walked in order and copied with their types."""

import collections
from dataclasses import dataclass

import numpy as np

from mpiring.memory.pytrees import at, leaves, mapped

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
    assert all(at(nest, path) is leaf for path, leaf in leaves(nest))
    x = np.ones(3)
    assert [*leaves(x)] == [((), x)]


def test_a_caller_can_walk_through_other_objects():
    opened = leaves([{1}, Plain([2, {3}])], leaf=lambda x: (
        list(x) if isinstance(x, set) else x.x if isinstance(x, Plain) else x))
    assert [*opened] == [((0, 0), 1), ((1, 0), 2), ((1, 1, 0), 3)]


def test_copies_have_the_same_types():
    ordered = collections.OrderedDict(z=1, a=[2, Pair(3, (4,))])
    counted = collections.defaultdict(list, x=5)
    copied = mapped([ordered, counted, {6}], lambda leaf: leaf if isinstance(leaf, set) else -leaf)
    assert copied == [{"z": -1, "a": [-2, (-3, (-4,))]}, {"x": -5}, {6}]
    assert list(copied[0]) == ["z", "a"] and type(copied[0]) is collections.OrderedDict
    assert type(copied[0]["a"][1]) is Pair and copied[1].default_factory is list
    assert ordered["z"] == 1 and counted["x"] == 5


def test_a_copy_reuses_dicts_and_lists_of_the_same_form():
    into = {"gone": 1, "a": [0, 0], "b": [0], "c": {}}
    a, b, c = into["a"], into["b"], into["c"]
    tree = {"a": [1, 2], "b": [3, 4], "c": {"d": 5}}
    assert mapped(tree, lambda leaf: -leaf, into) is into
    assert into == {"a": [-1, -2], "b": [-3, -4], "c": {"d": -5}} and b == [0]
    assert into["a"] is a and into["c"] is c
