"""Tests collectives on short tensors of a GPU that PyTorch alone uses."""

import functools
import gc

import counting
import pytest
from launching import needed
from mpi4py import MPI

import mpiring
from mpiring.gpu import arrays
from mpiring.memory.tensors import array_of

torch = needed("torch")
pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

if MPI.COMM_WORLD.size == 1:
    pytest.skip(reason="there is no other rank", allow_module_level=True)

DTYPES = (torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.complex64)


@pytest.fixture(autouse=True, scope="module")
def _accelerator():
    """Create tensors on a GPU; or let tensors on the CPU count as such if there is none."""
    import simulated_accelerator
    from mpiring.gpu import accelerator
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            # GPUs that PyTorch alone can use.
            patch.setitem(arrays.OPENERS, "cuda", arrays.OPENERS["xpu"])
            torch.set_default_device("cuda")
        else:
            simulated_accelerator.install(patch)
        patch.setattr(accelerator, "_devices", {})
        patch.setattr(arrays, "device_of", functools.cache(arrays.device_of.__wrapped__))
        yield
        torch.set_default_device(None)
        # What simulated pinned memory needs when it is freed is gone after this.
        arrays.device_of.cache_clear()
        accelerator._devices.clear()
        gc.collect()


@pytest.fixture(scope="module")
def comm(_accelerator):
    """A communicator that is closed before its GPU."""
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config()) as communicator:
        yield communicator


def calls_of(comm, op):
    return [functools.partial(comm.allreduce, op=op), functools.partial(comm.reduce_scatter, op=op),
            comm.allgather, functools.partial(comm.broadcast, root=comm.size - 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (40_000,)])
def test_results_have_the_bits_of_the_host(comm, dtype, shape):
    x = torch.ones(shape).mul(comm.rank + 1).to(dtype)
    for call in calls_of(comm, "max" if dtype is torch.bool else "sum"):
        want = call(array_of(x.cpu()).copy())
        for _ in range(3):
            y = x.clone()
            got = call(y)
            assert type(got) is torch.Tensor and (got is y or got.ndim == 1)
            assert array_of(got.cpu()).tobytes() == want.tobytes()


def test_each_rank_may_start_the_call_or_wait_in_it(comm):
    total = sum(range(comm.size))
    y = torch.empty(7)
    operation = comm.persistent_allreduce(y)
    for turn in range(4):
        x = torch.full((7,), float(comm.rank))
        y.fill_(comm.rank)
        if (turn + comm.rank) % 2:
            comm.allreduce(x)
            operation()
        else:
            assert comm.iallreduce(x).wait() is x
            operation.start()
            operation.wait()
        assert (x == total).all() and (y == total).all()
    y.data = torch.ones(8)
    for call in (operation, operation.start):
        with pytest.raises(mpiring.ConfigError, match=f"rank {comm.rank}: the tensor of this"):
            call()


def test_autograd_knows_of_the_write(comm):
    x = torch.ones(5, requires_grad=True)
    for _ in range(3):
        with pytest.raises(mpiring.ConfigError, match="requires a gradient"):
            comm.allreduce(x)
        with torch.no_grad():
            before = x._version
            assert comm.allreduce(x) is x and x._version > before and x.is_leaf
    with torch.inference_mode():
        y = torch.ones(5)
        comm.allreduce(y)
    for _ in range(2):
        comm.allreduce(y)
    assert (y == comm.size ** 3).all()
    with pytest.raises(mpiring.ConfigError, match="not contiguous"):
        comm.allreduce(torch.ones(5, 10)[:, ::2])


@pytest.mark.skipif(not counting.HAS_CODE, reason="without compiled code, ranks poll in Python")
def test_a_short_call_is_a_few_functions(comm):
    comm.prepare()
    x = torch.ones(1000)
    assert counting.runs_at_most(comm, 90, lambda: comm.allreduce(x))
