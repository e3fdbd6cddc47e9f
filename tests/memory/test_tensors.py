"""Tests that PyTorch's tensors are seen as vectors, and that PyTorch is imported by nobody else."""

import re
import subprocess
import sys

import pytest
from launching import HANG_S, installed, needed

from mpiring.memory.tensors import array_of, is_tensor


@pytest.mark.parametrize("name", ["bool", "uint8", "int64", "float16", "bfloat16", "float32",
                                  "complex128"])
def test_a_vector_shares_the_memory_of_its_tensor(name):
    torch = needed("torch")
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name), requires_grad=name == "float32")
    vector = array_of(tensor)
    assert vector.shape == (6,) and vector.dtype.name == name
    vector[4] = 1
    assert tensor[1, 1] == 1 and is_tensor(tensor) and not is_tensor(vector)


REDUCED = """
import sys, numpy, mpiring
comm = mpiring.init()
comm.allreduce(numpy.ones(3))
print('torch' in sys.modules)
import torch
for tensor in (torch.ones(4, 4).T[1:], torch.ones(3).to_sparse(), torch.ones(3, device='meta'),
               torch.ones(3).to(torch.float8_e5m2), torch.ones(3, dtype=torch.complex64).conj()):
    try: comm.allreduce(tensor)
    except mpiring.ConfigError as error: print(error)
x = torch.ones(2, 2)
comm.allreduce(x)
print(x.sum().item(), 'mpiring.torch' in sys.modules)
"""


def test_arrays_and_tensors_need_no_adapter():
    """Also that tensors which cannot be reduced are refused, with no harm to those that can."""
    installed("torch")
    done = subprocess.run([sys.executable, "-c", REDUCED], check=True, text=True, timeout=HANG_S,
                          capture_output=True)
    first, *refused, last = done.stdout.splitlines()
    assert (first, last) == ("False", "4.0 False")
    for line, problem in zip(refused, (
            "not contiguous.*x.copy_", "sparse_coo tensor on cpu: expected a dense",
            "on meta: expected one on the CPU", "cannot be reduced",
            "lazy conjugate.*x.copy_"), strict=True):
        assert re.search(problem, line), line
