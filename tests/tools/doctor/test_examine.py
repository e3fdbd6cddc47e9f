"""Tests what is found of GPUs in a process, on a simulated one."""

import fake_nccl
import simulated_gpu

from mpiring import MissingDependencyError
from mpiring.gpu import cuda, nccl
from mpiring.tools.doctor.examine import with_cupy, with_nccl
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


def test_a_version_of_nccl_is_found(monkeypatch):
    fake_nccl.installed(monkeypatch)
    assert with_nccl(NODE).nccl.startswith("NCCL 2.28.9 (")
    monkeypatch.setattr(nccl, "_candidates", lambda: ["/nowhere/libnccl.so.2"])
    missing = with_nccl(NODE)
    assert not missing.nccl and "pip install nvidia-nccl" in missing.nccl_problem
    assert with_nccl(other := Gpus()) is other
