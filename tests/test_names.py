"""Tests names: those of ops and algorithms as types, those of other libraries, and of classes."""

import importlib
import inspect
import pickle
import re
from typing import get_args

import pytest
from interface import MODULES

import mpiring
from mpiring import names
from mpiring.memory.reduction import OPS
from mpiring.numpy import DataParallel, DiLoCo, LocalSGD
from mpiring.operations.algorithms import TABLE
from mpiring.optim.outer import Outer


def test_types_have_all_names():
    assert {*get_args(mpiring.OpName)} == {*OPS, *names.OP_ALIASES}
    assert {*names.OP_ALIASES.values()} <= {*OPS}
    assert get_args(mpiring.AlgorithmName) == ("auto", *(row.name for row in TABLE))


@pytest.mark.parametrize("name", names.COMMUNICATOR)
def test_attributes_of_other_communicators_are_explained(name):
    comm = object.__new__(mpiring.Communicator)
    with pytest.raises(AttributeError, match=f"a Communicator has no {name}; use ") as caught:
        getattr(comm, name)
    advice = str(caught.value).partition("; use ")[2]
    known = {*dir(mpiring.Communicator), "rank", "size", "node_rank", "num_nodes"}
    assert name not in known
    assert re.match(r"\w+", advice)[0] in known or advice.startswith("mpi4py")


def test_other_attributes_are_unknown_as_ever():
    with pytest.raises(AttributeError, match="a Communicator has no alreduce$"):
        object.__new__(mpiring.Communicator).alreduce


@pytest.mark.parametrize(("function", "keyword", "advice"), [
    (DataParallel, "bucket_cap_mb", "use bucket_bytes"),
    (DataParallel, "timeout", "MPIRING_STALL_TIMEOUT_S=600"),
    (DataParallel, "device_ids", "leave it out"),
    (DataParallel, "find_unused_parameters", "a gradient that is zero"),
    (DataParallel, "buckets_bytes", "did you mean bucket_bytes?"),
    (DiLoCo, "should_quantize", "use reducer"),
    (LocalSGD, "fragment_sync_delay", "did you mean "),
    (mpiring.Config, "stall_timeout", "did you mean stall_timeout_s?"),
    (mpiring.Config, "timeout", "use stall_timeout_s"),
    (mpiring.init, "backend", "the MPI that launched the ranks"),
    (mpiring.Communicator, "world_size", "MPI knows it"),
])
def test_unknown_keywords_are_explained(function, keyword, advice):
    with pytest.raises(TypeError, match=re.escape(f"{function.__name__}() has no argument "
                                                  f"'{keyword}'; ")) as caught:
        function(**{keyword: 3})
    assert advice in str(caught.value)


def test_names_of_torchft_are_accepted(monkeypatch):
    given = []
    monkeypatch.setattr(Outer, "__init__", lambda *arguments: given.append(arguments[-1]))
    DiLoCo({}, sync_every=8, fragment_sync_delay=2, fragment_update_alpha=0.25)
    LocalSGD({}, sync_every=4)
    assert [(its.every, its.delay, its.alpha) for its in given] == [(8, 2, 0.25), (4, 0, 0.0)]
    with pytest.raises(TypeError, match=r"DiLoCo\(\) was given every and sync_every, which mean"):
        DiLoCo({}, every=8, sync_every=8)


def test_no_advice_is_about_an_argument_that_there_is():
    for function, hints in ((DiLoCo, names.LOCAL_TRAINING), (mpiring.init, names.INIT),
                            (DataParallel, names.DATA_PARALLEL), (mpiring.Config, names.CONFIG)):
        known = inspect.signature(function).parameters
        assert not known.keys() & hints.keys()
        assert function is not DiLoCo or {*names.TORCHFT_SYNONYMS.values()} <= known.keys()


@pytest.mark.parametrize("package", MODULES)
def test_classes_say_where_users_import_them(package):
    if "torch" in package:
        pytest.importorskip("torch")
    exported = importlib.import_module(package)
    for item in (getattr(exported, name) for name in exported.__all__):
        if isinstance(item, type):
            assert item.__module__ in MODULES, item
            assert pickle.loads(pickle.dumps(item)) is item


def test_help_shows_the_entry_points():
    entries = re.findall(r"^ *(mpiring\.\S+|the command line)  ", mpiring.__doc__, re.MULTILINE)
    assert len(entries) == 5
    for entry in (entry for entry in entries if "torch" not in entry and "line" not in entry):
        module, _, name = entry.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_statistics_read_as_a_sentence():
    seen = mpiring.Statistics(12, 3 << 20, 0.02, 0.005, 12 << 20)
    assert str(seen) == ("12 operations in 20.0 ms, 75% of it hidden behind computation; waited "
                         "5.0 ms, sent 3.0 MiB, which would be 12.0 MiB without compression")
    assert str(mpiring.Statistics()) == "no operations"
    coded = mpiring.Statistics(1, 1000, 2.5, 2.5, 1000, encode_s=3e-5, wire_s=2.0, decode_s=0.2)
    assert str(coded) == ("1 operation in 2.50 s, 0% of it hidden behind computation; waited "
                          "2.50 s, sent 1000 B; compressing took 30.0 µs, decompressing 200.0 ms, "
                          "sending 2.00 s")
    assert repr(seen).startswith("Statistics(operations=12, bytes_sent=3145728, ")
