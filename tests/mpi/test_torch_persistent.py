"""Tests persistent operations on tensors of PyTorch."""

import pytest
from launching import needed

import mpiring

torch = needed("torch")
pytestmark = pytest.mark.mpi


def test_a_tensor_whose_memory_was_replaced(comm):
    x, total = torch.zeros(5), comm.size * (comm.size - 1) // 2
    operation = comm.persistent_allreduce(x)
    for _ in range(3):
        x.fill_(comm.rank)
        assert operation() is x and (x == total).all()
        x.fill_(comm.rank)
        operation.start()
        assert operation.wait() is x and (x == total).all()
    x.data = torch.ones(5)
    for call in (operation, operation.start):
        with pytest.raises(mpiring.ConfigError, match=f"rank {comm.rank}: the tensor of this"):
            call()
    assert (x == 1).all()
