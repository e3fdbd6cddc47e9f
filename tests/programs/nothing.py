"""Calls every collective with arrays in which there is nothing; run by mpirun.

On all ranks, on one rank, and with a result that is empty: of NumPy and of PyTorch, in all dtypes.
"""

import os
import sys
import warnings

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import mpiring
import mpiring.horovod as arrays_of_horovod
import mpiring.horovod.torch as hvd
import mpiring.numpy as of_arrays
import mpiring.torch as of_tensors
from mpiring import optim, reducers, resilience
from mpiring.asynchronous import PairAveraging
from mpiring.torch import (
    AsyncDataParallel, DiLoCo, LocalSGD, broadcast_optimizer_state, broadcast_parameters)

warnings.filterwarnings("ignore", "(?s).*(Sparse|zero-element)")
warnings.simplefilter("ignore", FutureWarning)
DTYPES = ("bool", "uint8", "uint64", "int8", "int32", "int64", "float16", "bfloat16", "float32",
          "float64", "complex64", "complex128")
SHAPES = ((0,), (0, 3), (2, 0), (3, 0, 2))
comm = mpiring.init(config=mpiring.Config(tuning=False, tuning_folder=""))
r, p = comm.rank, comm.size


def shapes_for(dtype):
    """Return two of the shapes; each shape is tried with half of the dtypes."""
    number = DTYPES.index(dtype)
    return SHAPES[number % 4], SHAPES[(number + 1) % 4]


def array(shape, dtype, value=1):
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.full(shape, value, numpy_dtype)


def tensor(shape, dtype, value=1):
    return torch.full(shape, value, dtype=getattr(torch, dtype))


def is_like(x, make, dtype, shape, value=None):
    """Check the type, dtype, shape and elements of a result."""
    right = make(shape, dtype, 1 if value is None else value)
    assert type(x) is type(right)
    is_equal(x, right)


def is_equal(x, right):
    assert x.dtype == right.dtype and x.shape == right.shape and (x == right).all(), (x, right)


def fails(call, *words):
    try:
        call()
    except mpiring.ConfigError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"nobody refused {words}")


def started(persistent):
    """Run a persistent operation in the background."""
    persistent.start()
    return persistent.wait()


def collectives_of_the_communicator(make, dtype):
    op = "max" if dtype == "bool" else "sum"
    for shape in shapes_for(dtype):
        x = make(shape, dtype)
        for _ in range(2):
            for result in (
                    comm.allreduce(x, op=op), comm.iallreduce(x, op=op).wait(),
                    comm.allgather(x), comm.broadcast(x, root=p - 1),
                    comm.persistent_allreduce(x, op=op)(), comm.persistent_broadcast(x)(),
                    started(comm.persistent_allgather(x))):
                assert result is x
        is_like(x, make, dtype, shape)
        for chunk in (comm.reduce_scatter(x, op=op), comm.persistent_reduce_scatter(x, op=op)()):
            is_like(chunk, make, dtype, (0,))
    for shape in ((), (1, 1)):
        # The slices of all ranks but the last are empty.
        total = 1 if dtype == "bool" else p
        is_like(comm.allreduce(make(shape, dtype), op=op), make, dtype, shape, total)
        for scatter in (comm.reduce_scatter, comm.reduce_scatter,
                        lambda x, op: started(comm.persistent_reduce_scatter(x, op=op))):
            is_like(scatter(make(shape, dtype), op=op), make, dtype, (int(r == p - 1),), total)
        is_like(comm.allgather(make(shape, dtype, r == p - 1)), make, dtype, shape, 1)
        is_like(comm.broadcast(make(shape, dtype, r == 0)), make, dtype, shape, 1)


def named_operations(make, dtype):
    face = hvd if make is tensor else arrays_of_horovod
    op = hvd.Max if dtype == "bool" else hvd.Sum
    if not dtype.startswith("complex"):
        for shape in shapes_for(dtype):
            x = make(shape, dtype)
            ops = (op, hvd.Min) if dtype == "bool" else (op, hvd.Average, hvd.Min, hvd.Product)
            for each in ops:
                is_like(face.allreduce(x, op=each), make, dtype, shape)
            assert face.allreduce_(x, op=op) is x
            for y in face.grouped_allreduce([x, make((2,), dtype, 0)], op=op):
                assert y.dtype == x.dtype and tuple(y.shape) in (shape, (2,))
            rows = shape[0] // p + (r < shape[0] % p)
            is_like(face.reducescatter(x, op=op), make, dtype, (rows, *shape[1:]))
            for y in face.grouped_reducescatter([x, x], op=op):
                is_like(y, make, dtype, (rows, *shape[1:]))
        # The last rank gets no rows.
        is_like(face.reducescatter(make((p - 1, 2), dtype), op=op), make, dtype,
                (int(r < p - 1), 2), 1 if dtype == "bool" else p)
    for shape in shapes_for(dtype):
        x = make(shape, dtype)
        is_like(face.broadcast(x, 0), make, dtype, shape)
        assert face.broadcast_(x, p - 1) is x
        is_like(face.allgather(x), make, dtype, (p * shape[0], *shape[1:]))
        for y in face.grouped_allgather([x, make((r, 2), dtype)]):
            assert tuple(y.shape) in ((p * shape[0], *shape[1:]), (p * (p - 1) // 2, 2))
        rows, counts = face.alltoall(x, [shape[0], *[0] * (p - 1)])
        is_like(rows, make, dtype, (p * shape[0] * (r == 0), *shape[1:]))
        assert list(counts) == [shape[0] * (r == 0)] * p
    is_like(face.alltoall(make((0, 3), dtype)), make, dtype, (0, 3))
    # Only the first rank has, or gets, anything.
    is_like(face.allgather(make((2 * (r == 0), 3), dtype)), make, dtype, (2, 3))
    rows, counts = face.alltoall(make((2, 3), dtype), [2] + [0] * (p - 1))
    is_like(rows, make, dtype, (2 * p * (r == 0), 3))
    is_like(face.broadcast(make((), dtype, r == 0), 0), make, dtype, (), 1)


def operations_have_gradients():
    for shape in SHAPES:
        for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter,
                     lambda x: hvd.broadcast(x, p - 1),
                     lambda x: hvd.alltoall(x, [len(x), *[0] * (p - 1)])[0],
                     lambda x: hvd.grouped_allreduce([x, torch.ones(2)])[0],
                     lambda x: hvd.grouped_allgather([x])[0],
                     lambda x: hvd.grouped_reducescatter([x, x])[0]):
            x = torch.ones(shape, requires_grad=True)
            call(x).sum().backward()
            is_like(x.grad, tensor, "float32", shape)
    x = torch.ones(2 * (r == 0), 3, requires_grad=True)
    hvd.allgather(x).sum().backward()
    is_like(x.grad, tensor, "float32", x.shape)
    x.grad = None
    hvd.alltoall(x, [0] * (p - 1) + [len(x)])[0].sum().backward()
    is_like(x.grad, tensor, "float32", x.shape)
    x = torch.ones(p - 1, 2, requires_grad=True)
    hvd.reducescatter(x, op=hvd.Sum).sum().backward()
    is_like(x.grad, tensor, "float32", x.shape, p)
    hvd.allreduce(torch.ones(0), op=hvd.Adasum), hvd.allreduce(torch.ones(0, 3), prescale_factor=2)
    hvd.allreduce(torch.ones(0), compression=hvd.Compression.fp16)
    assert hvd.allgather_object(None) == [None] * p and hvd.broadcast_object(b"", 0) == b""


def coo(dtype, rows, shape):
    """Return a sparse tensor with nonzero elements in some rows."""
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64),
                                   tensor((len(rows), *shape[1:]), dtype), shape,
                                   check_invariants=False)


def real(x):
    """Return a copy of a complex tensor as a real one; all_reduce would lose the result."""
    try:
        view = torch.view_as_real(x)
    except NotImplementedError:
        # PyTorch 2.10 has no such views of sparse tensors, and refuses to sum them itself.
        pairs = torch.view_as_real(x.coalesce().values())
        return torch.sparse_coo_tensor(x.coalesce().indices(), pairs, (*x.shape, 2))
    fails(lambda: dist.all_reduce(x), "view", "clone()")
    return view.clone()


def sparse_sums(dtype):
    if dtype in ("bool", "uint64"):
        return
    for shape in ((4,), (4, 2), (4, 0)):
        for rows in ([], [2] if r == 0 else []):
            total = hvd.synchronize(hvd.sparse_allreduce_async(coo(dtype, rows, shape), "s",
                                                               op=hvd.Sum))
            x = coo(dtype, rows, shape)
            if x.is_complex():
                x = real(x)
            dist.all_reduce(x)
            for result in (total, x):
                right = tensor(shape, dtype, 0)
                right[2:3] = len(comm.allgather_object(rows)[0])
                assert result.layout is torch.sparse_coo
                dense = result.to_dense()
                is_equal(torch.view_as_complex(dense) if dense.dim() > len(shape) else dense, right)
    if not dtype.startswith("complex"):
        scalar = tensor((), dtype).to_sparse()
        dist.all_reduce(scalar)
        assert scalar.to_dense() == p


def collectives_of_the_back_end(dtype):
    dtypes = dict(dtype=getattr(torch, dtype))
    for shape in shapes_for(dtype):
        x = tensor(shape, dtype)
        dist.all_reduce(x)
        dist.reduce(x, p - 1)
        dist.broadcast(x, p - 1)
        dist.all_reduce_coalesced([x, tensor((2,), dtype, 0)])
        dist.barrier()
        all_of_them = [torch.empty(shape, **dtypes) for _ in range(p)]
        dist.all_gather(all_of_them, x)
        dist.gather(x, all_of_them if r == 0 else None)
        dist.scatter(torch.empty(shape, **dtypes), all_of_them if r == 0 else None)
        dist.reduce_scatter(torch.empty(shape, **dtypes), all_of_them)
        dist.all_to_all(all_of_them, [x] * p)
        together = torch.empty((p * shape[0], *shape[1:]), **dtypes)
        dist.all_gather_into_tensor(together, x)
        dist.reduce_scatter_tensor(torch.empty(shape, **dtypes), together)
        dist.all_to_all_single(torch.empty_like(together), together)
        works = [dist.isend(x, (r + 1) % p), dist.irecv(torch.empty(shape, **dtypes), (r - 1) % p)]
        for work in works:
            work.wait()
        is_like(x, tensor, dtype, shape)
        for y in all_of_them:
            is_like(y, tensor, dtype, shape)
    # Everything goes to the first rank.
    rows = torch.empty((2 * p * (r == 0), 3), **dtypes)
    dist.all_to_all_single(rows, tensor((2, 3), dtype), [2 * (r == 0)] * p, [2] + [0] * (p - 1))
    is_like(rows, tensor, dtype, (2 * p * (r == 0), 3))
    parts = [torch.empty((2 * (r == 0), 3), **dtypes) for _ in range(p)]
    dist.all_to_all(parts, [tensor((2 * (rank == 0), 3), dtype) for rank in range(p)])
    for part in parts:
        is_like(part, tensor, dtype, (2 * (r == 0), 3))
    objects = [None] * p
    dist.all_gather_object(objects, [])
    assert objects == [[]] * p


class WithNothing(nn.Module):
    """A module of which one parameter has no elements, and one buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.none = nn.Linear(3, 2), nn.Linear(2, 0)
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x):
        x = self.layer(x)
        return x.sum() + self.none(x).sum() + self.empty.sum()


REDUCERS = [None, reducers.Cast(), reducers.Int8(), reducers.PowerSGD(rank=1),
            reducers.TopK(1.0), reducers.OneBit(), reducers.Adasum()]


def training():
    apart = mpiring.init(config=mpiring.Config(shared_memory=False, tuning=False))
    for reducer in REDUCERS:
        model = of_tensors.DataParallel(WithNothing(), apart, reducer=reducer)
        model(torch.ones(0 if r else 2, 3)).backward()
        if not isinstance(reducer, reducers.Adasum):
            torch.testing.assert_close(model.layer.bias.grad, torch.full((2,), 2 / p), rtol=0.01,
                                       atol=0)
        assert model.none.weight.grad.shape == (0, 2)
        model.compare_replicas()
        broadcast_parameters(model.state_dict().values(), comm)
    sharded = of_tensors.Sharded(torch.optim.AdamW, model, lr=0.1)
    model(torch.ones(2, 3)).backward()
    sharded.step()
    apart.close()
    state = torch.optim.Adam([nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(()))])
    for q in state.param_groups[0]["params"]:
        q.grad = torch.ones_like(q)
    if r == 0:
        state.step()
    broadcast_optimizer_state(state, comm)
    assert len(state.state) == 2
    broadcast_parameters([], comm)
    local = WithNothing()
    for outer in (LocalSGD(local, comm, every=1), DiLoCo(local, comm, every=1)):
        local.layer.weight.data += r
        outer.step()
        outer.synchronize()
    model = AsyncDataParallel(WithNothing(), comm, optimizer=optim.SGD)
    model(torch.ones(2, 3)).backward()
    model.step()
    model.close()


def training_of_arrays():
    arrays = {"none": array((0, 3), "float32"), "some": array((2,), "float32")}
    for sharded in (False, True):
        model = of_arrays.DataParallel(arrays, comm)
        optimizer = optim.AdamW(model, lr=0.1, sharded=sharded)
        for name, grad in model.grads.items():
            grad[...] = r
            model.ready(name)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    with PairAveraging(arrays, comm) as averaging:
        averaging.step()


def saved(folder, make):
    kind = of_tensors.Checkpoints if make is tensor else resilience.Checkpoints
    state = {dtype: [make(shape, dtype) for shape in (*SHAPES, ())] for dtype in DTYPES}
    with kind(os.path.join(folder, make.__name__), comm) as checkpoints:
        checkpoints.save(1, replicated=state, own=state)
        checkpoints.wait()
        loaded = checkpoints.load()
    for dtype in DTYPES:
        for each in loaded.replicated[dtype], loaded.own[dtype]:
            for x, shape in zip(each, (*SHAPES, ()), strict=True):
                is_like(x, make, dtype, shape)


def main(folder):
    dist.init_process_group("mpiring", init_method="mpi://")
    hvd.init()
    for dtype in DTYPES:
        for make in (array, tensor):
            collectives_of_the_communicator(make, dtype)
            named_operations(make, dtype)
        collectives_of_the_back_end(dtype)
        sparse_sums(dtype)
    operations_have_gradients()
    training()
    training_of_arrays()
    for make in (array, tensor):
        saved(folder, make)
    hvd.shutdown()
    dist.destroy_process_group()
    comm.close()
    print("all is well", flush=True)


main(sys.argv[1])
