"""Says where the tensors of a program shall lie: on the CPU, or as its last argument says.

With "simulated" or "accelerator" the tensors on the CPU are taken for such on a GPU, which reads
and writes their memory late; what PyTorch itself calculates is there at once. The first is a
simulated GPU as CuPy shows one: buckets lie in its own memory, in which PyTorch calculates through
NumPy. The second has PyTorch's streams, which are simulated, and nothing else. With "cuda" they lie
on this rank's GPU, which several ranks may have; with "alone", too, and there is no CuPy.
"""

import atexit
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mpiring.gpu import accelerator, arrays
from mpiring.jit import loops
from mpiring.launch.start import load_mpi
from mpiring.torch import tensors

SIMULATED, ACCELERATOR = (sys.argv[-1] == name for name in ("simulated", "accelerator"))
CUDA = sys.argv[-1] in ("cuda", "alone")
if sys.argv[-1] == "alone":
    sys.modules["cupy"] = None
ON_GPU = SIMULATED or ACCELERATOR or CUDA
WHERE = torch.device("cpu")


patch = pytest.MonkeyPatch()


def without_compiling():
    """To compile loops takes longer than all that follows; the bits are the same."""
    for name in ("loop", "loop_16"):
        patch.setattr(loops, name, lambda *arguments: None)


def _undo():
    patch.undo()
    arrays.device_of.cache_clear()


def _simulate():
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    import simulated_accelerator
    import simulated_gpu
    without_compiling()
    if ACCELERATOR:
        simulated_accelerator.install(patch)
        return
    gpu = simulated_gpu.installed(patch)
    patch.setitem(arrays.OPENERS, "cpu", lambda where: gpu)
    patch.setattr(tensors, "shared_with", lambda x: tensors.tensor_of(x.inside))
    patch.setattr(torch.cpu, "current_stream", lambda where: nullcontext())
    patch.setattr(torch, "Stream", lambda where: nullcontext())
    patch.setattr(accelerator, "in_use", lambda stream: nullcontext())
    patch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())


# After what the program itself registers.
atexit.register(_undo)
if SIMULATED or ACCELERATOR:
    _simulate()
elif CUDA:
    _world = load_mpi().COMM_WORLD
    _place = _world.Split_type(load_mpi().COMM_TYPE_SHARED).rank
    WHERE = torch.device("cuda", _place % torch.cuda.device_count())
    torch.cuda.set_device(WHERE)
    # As exact as on the CPU, and the same each time.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
