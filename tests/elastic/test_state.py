"""Tests what a commit copies, and what comes back from it."""

import threading
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from launching import needed

from mpiring import ConfigError
from mpiring.communicator import Communicator
from mpiring.elastic.state import Commits, copy_value, restore_value

Pair = namedtuple("Pair", "a b")


def tree():
    return {"w": np.arange(6.0).reshape(2, 3), "list": [np.ones(2), 3, "text"], 7: None,
            "pair": Pair(1.5, np.zeros(1, np.int32)), "order": OrderedDict(x=True),
            "scalar": np.float32(2)}


def test_a_copy_is_equal_and_shares_nothing():
    original = tree()
    copy = copy_value(original)
    np.testing.assert_equal(copy, original)
    assert type(copy["pair"]) is Pair and type(copy["order"]) is OrderedDict
    original["w"][0] = original["list"][0][:] = original["pair"].b[:] = 9
    original["order"]["x"] = False
    np.testing.assert_equal(copy, tree())


def test_a_copy_takes_over_the_memory_of_what_is_alike():
    memory, original = copy_value(tree()), tree()
    kept = memory["w"], memory["list"], memory["list"][0]
    original["w"] += 1
    assert copy_value(original, memory) is memory
    assert memory["w"] is kept[0] and memory["list"] is kept[1] and memory["list"][0] is kept[2]
    np.testing.assert_equal(memory, original)


@pytest.mark.parametrize("other", [
    {}, {"w": np.zeros((3, 2))}, {"w": np.zeros((2, 3), np.float32)}, {"w": 1, "list": []},
    {"list": [np.ones(2)], "more": 1}, [], None,
    {"w": np.broadcast_to(0.0, (2, 3))}])
def test_what_is_not_alike_is_replaced(other):
    np.testing.assert_equal(copy_value(tree(), other), tree())


@pytest.mark.parametrize("value", [threading.Lock(), {1, 2}, np.array([None]), {"x": [object()]}])
def test_what_cannot_be_copied_is_refused_by_name(value):
    with pytest.raises(ConfigError, match="attribute 'odd' of the state: a .* cannot be copied"):
        Commits().add({"odd": value})


def test_what_communicates_is_refused_by_name():
    """To load its state, all ranks would be needed, also those that have died."""
    class Outer:
        state_dict = load_state_dict = None

    odd = Outer()
    Commits().add({"odd": np.ones(1)})
    odd.comm = Communicator.__new__(Communicator)
    with pytest.raises(ConfigError, match="'odd' of the state: a Outer communicates, with ranks of "
                                          "which one may die; keep what its state_dict.. returns"):
        Commits().add({"odd": odd})


class Ranks:
    """Stands for a communicator: the other ranks have certain commits."""

    rank = 0

    def __init__(self, *others):
        self._others = others

    def allgather_object(self, obj, *, label=None):
        return [obj, *self._others]


def test_the_last_two_commits_are_kept():
    commits, x = Commits(), np.zeros(4)
    for number in range(5):
        x[:] = number
        commits.add({"x": x})
    assert commits.agreed(Ranks({3, 4})) == 4
    assert commits.agreed(Ranks({2, 3}, {3, 4})) == 3
    assert commits.at(3)["x"].tolist() == [3] * 4
    assert commits.agreed(Ranks({3, 4})) == 3, "what came after is forgotten"
    commits.add({"x": np.full(4, 9.0)})
    with pytest.raises(ConfigError):
        commits.add({"x": x, "odd": object()})
    assert commits.agreed(Ranks({3, 4})) == 4, "what was not finished counts for nothing"
    assert commits.at(4)["x"].tolist() == [9] * 4


def test_arrays_come_back_in_their_own_memory():
    commits, params = Commits(), {"w": np.ones(3)}
    commits.add({"params": params})
    w = params["w"]
    w[:] = params["new"] = 5
    assert restore_value(commits.at(0)["params"], params) is params
    assert params["w"] is w and w.tolist() == [1, 1, 1] and list(params) == ["w"]
    w[:] = 6
    assert commits.at(0)["params"]["w"].tolist() == [1, 1, 1], "training goes on in another copy"


def test_modules_and_optimizers_come_back_as_they_were():
    torch = needed("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    step()
    commits = Commits()
    commits.add({"model": model, "optimizer": optimizer})
    step()
    right = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        step()
    for _ in range(2):
        for committed in commits.at(0).values():
            restore_value(committed, None)
        assert all(p.grad is None for p in model.parameters())
        step()
        assert all(map(torch.equal, model.parameters(), right))
