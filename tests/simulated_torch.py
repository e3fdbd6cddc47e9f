"""Lets PyTorch's CPU tensors be taken for tensors on a simulated GPU, in programs and tests.

Their memory is what that GPU reads and writes, late; what PyTorch itself calculates is there at
once. Buckets lie in the simulation's own memory, in which PyTorch calculates through NumPy.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import simulated_gpu
import torch

from mpiring.torch import devices
from mpiring.torch.tensors import tensor_of


def install():
    """Do that from now on, for good; return what stands for the module mpiring.memory.cuda."""
    patch = pytest.MonkeyPatch()
    module = simulated_gpu.installed(patch)
    patch.setattr(devices, "is_on_gpu", lambda x: True)
    patch.setattr(devices, "shared_with", lambda x: tensor_of(x.inside))
    patch.setattr(torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=7))
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return module
