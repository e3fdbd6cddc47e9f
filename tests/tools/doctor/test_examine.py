"""Tests what is found of GPUs in a process, on a simulated one."""

import simulated_gpu

from mpiring import MissingDependencyError
from mpiring.gpu import cuda
from mpiring.tools.doctor.examine import usable
from mpiring.tools.doctor.facts import Gpus

NODE = Gpus(kind="NVIDIA", count=1, driver="570.1")


def test_what_cupy_sees_is_found(monkeypatch):
    gpu = simulated_gpu.installed(monkeypatch)
    found = usable(NODE, 3)
    assert found.seen == ("0000:0",) and found.address == "0000:0" and found.driver == "570.1"
    assert found.unshared == "simulated GPUs share nothing here" and not found.problem
    gpu.gpu.shared = []
    assert usable(NODE, 0).unshared == ""


def test_what_is_missing_is_told(monkeypatch):
    def missing():
        raise MissingDependencyError("a GPU's memory needs\n CuPy")

    monkeypatch.setattr(cuda, "cupy", missing)
    assert usable(NODE, 0).problem == "a GPU's memory needs CuPy" and usable(NODE, 0).address == ""
    assert usable(other := Gpus(kind="AMD", count=1), 0) is other
