"""Tests what is found of GPUs in a process, on a simulated one."""

import simulated_gpu

from mpiring import MissingDependencyError
from mpiring.gpu import cuda
from mpiring.tools.doctor.examine import with_cupy
from mpiring.tools.doctor.facts import Gpus

NODE = Gpus(kind="NVIDIA", count=1, driver="570.1")


def test_what_cupy_sees_is_found(monkeypatch):
    gpu = simulated_gpu.installed(monkeypatch)
    gpu.gpu.shared = None
    gpus = with_cupy(NODE, 3)
    assert gpus.visible == ("0000:0",) and gpus.address == "0000:0" and gpus.driver == "570.1"
    assert gpus.sharing_error == "simulated GPUs share nothing here" and not gpus.problem
    gpu.gpu.shared = simulated_gpu.Threads()
    assert with_cupy(NODE, 0).sharing_error == ""


def test_what_is_missing_is_told(monkeypatch):
    def missing():
        raise MissingDependencyError("a GPU's memory needs\n CuPy")

    monkeypatch.setattr(cuda, "cupy", missing)
    gpus = with_cupy(NODE, 0)
    assert (gpus.problem, gpus.address) == ("a GPU's memory needs CuPy", "")
    assert with_cupy(other := Gpus(kind="AMD", count=1), 0) is other
