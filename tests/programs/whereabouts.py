"""Says where the tensors of a program shall lie: on the CPU, or as its last argument says.

With "simulated" the tensors on the CPU are taken for such on a simulated GPU. Their memory is what
that GPU reads and writes, late; what PyTorch itself calculates is there at once. Buckets lie in
the simulation's own memory, in which PyTorch calculates through NumPy. With "cuda" they lie on
this rank's GPU, which several ranks may have.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from mpiring.gpu import arrays
from mpiring.launch.start import load_mpi
from mpiring.memory import compiled
from mpiring.torch import tensors

SIMULATED, CUDA = (sys.argv[-1] == name for name in ("simulated", "cuda"))
ON_GPU = SIMULATED or CUDA
WHERE = torch.device("cpu")


def _simulate():
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import pytest
    import simulated_gpu
    patch = pytest.MonkeyPatch()
    # To compile them takes longer than all that follows; the bits are the same.
    for name in ("loop", "loop_16"):
        patch.setattr(compiled, name, lambda *arguments: None)
    simulated_gpu.installed(patch)
    patch.setattr(arrays, "is_cuda_tensor", lambda x: True)
    patch.setattr(tensors, "shared_with", lambda x: tensors.tensor_of(x.inside))
    patch.setattr(torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=7))
    for name in ("stream", "device"):
        patch.setattr(torch.cuda, name, lambda which: nullcontext())


if SIMULATED:
    _simulate()
elif CUDA:
    _world = load_mpi().COMM_WORLD
    _place = _world.Split_type(load_mpi().COMM_TYPE_SHARED).rank
    WHERE = torch.device("cuda", _place % torch.cuda.device_count())
    torch.cuda.set_device(WHERE)
    # As exact as on the CPU, and the same each time.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
