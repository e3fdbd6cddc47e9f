"""Tests what ranks pass to optimizers: a difference is an error on all ranks and changes nothing.

Also what a write to `settings` means, and momentum that begins later.
"""

import re

import numpy as np
import pytest
from threads import TrainingComm, on_ranks

from mpiring.errors import BufferMismatchError, ConfigError, GradientError
from mpiring.sharding.sliced import Sliced
from mpiring.numpy import DataParallel
from mpiring.optim import LAMB, LARS, SGD, Adam, AdamW

SHAPES = {"w1": (5, 7), "w2": (301,), "b1": (7,)}


def model():
    return {name: np.random.default_rng(len(name)).standard_normal(shape).astype("f4")
            for name, shape in SHAPES.items()}


def parallel(comm):
    return DataParallel(model(), comm, bucket_bytes=500)


def backward(dp, step, value=None):
    for name in sorted(dp.params, reverse=step % 2 == 0):
        dp.grads[name][...] = value if value is not None else np.random.default_rng(
            [step, dp.comm.rank, *name.encode()]).standard_normal(SHAPES[name])
        dp.ready(name)


def raised(call, *arguments, **keywords):
    """Return the type and the text of what a call raises; None if it raises nothing."""
    try:
        call(*arguments, **keywords)
    except Exception as exc:
        return type(exc), str(exc)
    return None


ARGUMENTS = [
    (SGD, {"lr": 0.1}, {"lr": 0.2}, "rank 1: SGD has lr of 'w1'=0.2, but on rank 0 it is 0.1"),
    (SGD, {}, {"lr": lambda step: 0.5}, "rank 1: SGD has lr of 'w1'=0.5, but on rank 0 it is 0.00"),
    (SGD, {"momentum": 0.5}, {}, "rank 1: SGD has momentum of 'w1'=0, but on rank 0 it is 0.5"),
    (SGD, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True},
     "rank 1: SGD has nesterov=True, but on rank 0 it is False"),
    (SGD, {}, {"groups": {"w2": {"lr": 1}}}, "SGD has lr of 'w2'=1, but on rank 0 it is 0.001"),
    (SGD, {}, {"max_norm": 1.5}, "rank 1: SGD has max_norm=1.5, but on rank 0 it is None"),
    (SGD, {}, {"sharded": True}, "rank 1: SGD has sharded=True, but on rank 0 it is False"),
    (Adam, {}, {"betas": (0.9, 0.99)}, r"Adam has betas of 'w1'\[1\]=0.99, but on rank 0 it is 0."),
    (LARS, {}, {"no_decay": ["b*"]}, "LARS has weight_decay of 'b1'=0, but on rank 0 it is 0."),
    (LAMB, {"bias_correction": False}, {}, "LAMB has bias_correction=True, but on rank 0 it is F"),
    # One rank's argument is wrong by itself.
    (SGD, {}, {"lr": "x"}, "rank 1: lr='x': expected a finite number of at least 0"),
    (SGD, {}, {"lr": lambda step: -1}, r"rank 1: lr\(0\)=-1: expected a finite number"),
    (SGD, {}, {"lr": lambda step: {}["x"]}, "KeyError: 'x'"),
    (SGD, {}, {"nesterov": True}, "rank 1: nesterov=True without momentum"),
    (SGD, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": "no"}, "rank 1: nesterov='no': expec"),
    (SGD, {}, {"sharded": "no"}, "rank 1: sharded='no': expected True or False"),
    (SGD, {}, {"max_norm": 0}, "rank 1: max_norm=0: expected a finite number above 0"),
    (SGD, {}, {"no_decay": ["c"]}, "rank 1: no_decay has 'c': no parameter has such a name"),
    (SGD, {}, {"groups": {"w*": 3}}, "rank 1: groups.*: expected a mapping"),
    (LAMB, {}, {"bias_correction": 1}, "rank 1: bias_correction=1: expected True or False"),
]


@pytest.mark.parametrize("case", range(len(ARGUMENTS)))
def test_an_argument_that_differs_is_refused_on_all_ranks(case):
    make, usual, other, message = ARGUMENTS[case]

    def program(comm):
        dp = parallel(comm)
        error = raised(make, dp, **(other if comm.rank == 1 else usual))
        assert not dp.gradients.scatters
        # Nothing has changed.
        optimizer = make(dp, **usual)
        backward(dp, 0)
        assert optimizer.step()
        return error

    first, second, third = on_ranks(3, program, TrainingComm)
    assert first == third and first[0] is ConfigError and first[1].startswith("rank 1: ")
    assert re.search(message, first[1]), first
    # The rank whose argument is wrong raises the error itself.
    assert second[1] in first[1] or "KeyError" in first[1]


@pytest.mark.parametrize(("begins", "kind", "text"), [
    (False, ConfigError, "rank 1: SGD(…, sharded=False) updates this model already"),
    (True, GradientError, "rank 1: scatter() during")])
def test_an_optimizer_or_a_step_that_one_rank_has_refuses_slices_on_all(begins, kind, text):
    def program(comm):
        dp = parallel(comm)
        # Each rank makes it, and rank 0 drops it.
        old = [] if begins else [SGD(dp)]
        if comm.rank == 0:
            old.clear()
        elif begins:
            dp.ready("w1")
        return raised(SGD, dp, sharded=True), dp.gradients.scatters

    for (error, message), scatters in on_ranks(2, program, TrainingComm):
        assert error is kind and not scatters and text in message


def with_vector(state, x):
    tensors = {name: dict(its) for name, its in state["tensors"].items()}
    tensors["w2"]["m"] = x
    return {**state, "tensors": tensors}


STATES = {
    "contents": (lambda state: with_vector(state, state["tensors"]["w2"]["m"] + 1),
                 r"rank 1: the state of AdamW has tensors\['w2'\]\['m'\]\[0\]=\S+, "
                 r"but on rank 0 it is \S+; load the same state on every rank"),
    "steps": (lambda state: {**state, "steps": 7},
              "rank 1: the state of AdamW has steps=7, but on rank 0 it is 2"),
    "wrong steps": (lambda state: {**state, "steps": -1}, "rank 1: steps=-1: expected a whole"),
    "dtype": (lambda state: with_vector(state, np.zeros(301)), "rank 1: m of 'w2' is float64"),
    "None": (lambda state: None, "rank 1: the state of AdamW is a NoneType"),
    "nothing": (lambda state: {}, "rank 1: the state of AdamW lacks optimizer, steps, tensors"),
    "no tensors": (lambda state: {**state, "tensors": [1]}, "the state of AdamW is a list"),
    "a tensor of no type": (
        lambda state: {**state, "tensors": {**state["tensors"], "w2": 3}},
        "rank 1: the state of AdamW for 'w2' is a int"),
    "pieces": (lambda state: with_vector(state, Sliced((301,), {(0, 1): np.ones(1, "f4")})),
               "rank 1: (the state of AdamW has|elements .* are missing)"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", STATES)
def test_a_state_that_differs_is_refused_and_changes_nothing(case, sharded):
    change, message = STATES[case]

    def program(comm):
        dp = parallel(comm)
        optimizer = AdamW(dp, lr=0.1, sharded=sharded)
        for step in range(2):
            backward(dp, step)
            optimizer.step()
        first = optimizer.state_dict()
        backward(dp, 2)
        optimizer.step()
        before = optimizer.state_dict()
        error = raised(optimizer.load_state_dict, change(first) if comm.rank == 1 else first)
        after = optimizer.state_dict()
        assert before["steps"] == after["steps"] == 3
        for name, its in before["tensors"].items():
            for vector, x in its.items():
                assert x.tobytes() == after["tensors"][name][vector].tobytes()
        optimizer.load_state_dict(first)
        assert optimizer.steps == 2
        return error

    errors = on_ranks(3, program, TrainingComm)
    for kind, text in (errors[0], errors[2]):
        assert kind is ConfigError and text.startswith("rank 1: ") and re.search(message, text)
    assert errors[1][0] is ConfigError


def test_pieces_of_other_contents_are_refused_where_all_ranks_read_all():
    def program(comm):
        dp = parallel(comm)
        optimizer = AdamW(dp)
        backward(dp, 0)
        optimizer.step()
        state = optimizer.state_dict()
        x = state["tensors"]["w2"]["m"] + (comm.rank == 1)
        return raised(optimizer.load_state_dict, with_vector(
            state, Sliced(x.shape, {(0, 100): x[:100], (100, 301): x[100:]})))

    errors = on_ranks(2, program, TrainingComm)
    assert errors[0] == errors[1] and "the state of AdamW has tensors['w2']['m']" in errors[0][1]


def test_values_that_are_written_are_checked_and_those_of_their_tensor():
    def program(comm):
        dp = parallel(comm)
        optimizer = AdamW(dp, lr=0.1)
        its = optimizer.settings["w1"]
        for name, value, message in (
                ("lr", -1, "lr=-1: expected a finite number of at least 0"),
                ("lr", float("nan"), "lr=nan: expected a finite"), ("lr", "1", "lr='1': expected"),
                ("lr", None, "lr=None"), ("betas", (0.9, 1), r"betas\[1\]=1: expected a number"),
                ("eps", lambda step: 1, "eps=<function"), ("momentum", 0.9, "there is no setting"),
                ("adapts", 3, "there is no setting 'adapts' to be written; expected one of lr")):
            with pytest.raises(ConfigError, match=message):
                its[name] = value
            with pytest.raises(ConfigError, match=message):
                its.update({name: value})
        with pytest.raises(ConfigError, match="'lr' cannot be deleted"):
            del its["lr"]
        with pytest.raises(TypeError):
            optimizer.settings["w1"] = {"lr": 1}
        assert its == {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01,
                       "adapts": True}
        assert repr(its).startswith("{'lr': 0.1, 'betas': (0.9, 0.999)")
        its["lr"] = 0
        backward(dp, 0)
        optimizer.step()
        assert [(dp.params[name] == x).all() for name, x in model().items()] == [True, False, False]

    on_ranks(1, program, TrainingComm)


# Of which tensor each rank writes a rate, and how the call of rank 1 tells it.
DIFFERENCES = {
    "a number": (None, "w1", 0.25, "lr=0.25 momentum=0.9"),
    "one tensor": (None, "b1", 0.25, "lr=0.5 .* or lr=0.25 of"),
    "a function": (None, "w1", lambda step: 0.25, "lr=0.25 momentum=0.9"),
    "another tensor": ("w2", "b1", 0.25, "lr=0.5 .* or lr=0.25 of"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", DIFFERENCES)
def test_settings_that_one_rank_has_changed_are_found_in_the_next_message(case, sharded):
    *tensors, lr, text = DIFFERENCES[case]

    def program(comm):
        dp = parallel(comm)
        optimizer = SGD(dp, lr=0.5, momentum=0.9, sharded=sharded)
        backward(dp, 0)
        optimizer.step()
        if tensors[comm.rank]:
            optimizer.settings[tensors[comm.rank]]["lr"] = lr
        backward(dp, 1)
        if sharded:
            return raised(optimizer.step)
        optimizer.step()
        return raised(backward, dp, 2)

    for kind, message in on_ranks(2, program, TrainingComm):
        assert kind is BufferMismatchError
        assert re.search(f"rank 1 called .*update 1 with {text}", message), message
        assert re.search("rank 0 called .*update 1 with lr=0.5 ", message), message


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_from_before_or_after_momentum_began_is_loaded(sharded):
    def program(comm):
        def resumed(state, params, momentum):
            again = DataParallel({name: x.copy() for name, x in params.items()}, comm,
                                 bucket_bytes=500)
            optimizer = SGD(again, lr=0.1, sharded=sharded)
            optimizer.load_state_dict(state)
            return go_on(again, optimizer, optimizer.steps, momentum)

        def go_on(dp, optimizer, first, momentum):
            for step in range(first, 5):
                for its in optimizer.settings.values():
                    its["momentum"] = momentum
                backward(dp, step)
                optimizer.step()
            return [x.tobytes() for x in dp.params.values()]

        dp = parallel(comm)
        optimizer = SGD(dp, lr=0.1, sharded=sharded)
        saved = []
        for step in range(4):
            if step == 2:
                optimizer.settings["w2"]["momentum"] = 0.9
            saved.append((optimizer.state_dict(), {name: x.copy()
                                                   for name, x in dp.params.items()}))
            backward(dp, step)
            optimizer.step()
        assert ["b" in state["tensors"]["b1"] for state, _ in saved] == [False, False, False, True]
        early, params = saved[1]
        expected = resumed(early, params, 0.9)
        # What it remembers now was not there yet.
        for name, x in params.items():
            dp.params[name][...] = x
        optimizer.load_state_dict(early)
        assert go_on(dp, optimizer, 1, 0.9) == expected
        late, params = saved[3]
        bits = resumed(late, params, 0.9)
        without = {**late, "tensors": {name: {} for name in late["tensors"]}}
        assert resumed(without, params, 0.9) != bits
        one_missing = {**late, "tensors": {**late["tensors"], "b1": {}}}
        assert raised(resumed, one_missing, params, 0.9) == (
            ConfigError, f"rank {comm.rank}: the state of SGD for 'b1' lacks b: pass what "
                         f"state_dict() has returned")

    on_ranks(2, program, TrainingComm)
