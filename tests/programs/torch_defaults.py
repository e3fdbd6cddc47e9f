"""Repeats training and collectives with other defaults of PyTorch: the results are the same.

The default device "meta" holds no values: what is made there without being asked for, is lost. Run
by mpirun, with a folder.
"""

import contextlib
import functools
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import mpiring
import mpiring.horovod.torch as hvd
import mpiring.optim
import mpiring.torch
from mpiring.data import prefetch

warnings.simplefilter("ignore")
FOLDER, CPU = sys.argv[1], torch.device("cpu")
dist.init_process_group("mpiring", init_method="mpi://")
hvd.init()
RANK, SIZE = dist.get_rank(), dist.get_world_size()
comm = mpiring.init()
full = functools.partial(torch.full, dtype=torch.float32, device=CPU)


class Net(nn.Module):
    """Has buffers and, on request, sparse gradients."""

    def __init__(self, sparse=False, norm=nn.BatchNorm1d):
        super().__init__()
        with CPU, default_dtype(torch.float32):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(30, 8, sparse=sparse)
            self.body = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(self.embedding(x))


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def batch(step):
    return (torch.arange(6, device=CPU) * 5 + 7 * step + RANK) % 30


def steps(model, optimizer, clip=None, count=3):
    for step in range(count):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if clip:
            clip(0.05)
        optimizer.step()
    return [x.detach().clone() for x in model.state_dict().values()]


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def wrapped(sparse=False, **settings):
    model = mpiring.torch.DataParallel(Net(sparse), comm, **settings)
    optimizer = SGD(model.parameters(), momentum=0 if sparse else 0.9)
    losses = steps(model, optimizer)
    with model.join():
        for _ in range(1 + RANK):
            model(batch(0)).square().mean().backward()
            model.synchronize()
    mpiring.torch.broadcast_optimizer_state(optimizer, comm)
    mpiring.torch.broadcast_parameters(model.state_dict().values(), comm, root=SIZE - 1)
    model.compare_replicas()
    return [*losses, *model.parameters(), *(
        x for state in optimizer.state.values() for x in state.values() if x is not None)]


def sharded(make, **settings):
    model = mpiring.torch.DataParallel(Net(), comm)
    optimizer = mpiring.torch.Sharded(make, model, **settings)
    steps(model, optimizer, optimizer.clip_grad_norm_)
    with mpiring.torch.Checkpoints(FOLDER, comm, keep=1) as checkpoints:
        checkpoints.save(1, sharded=optimizer.sharded_state_dict(), own={
            "model": model.state_dict()})
    with mpiring.torch.Checkpoints(FOLDER, comm, keep=1) as checkpoints:
        saved = checkpoints.load()
    model.load_state_dict(saved.own["model"])
    optimizer.load_state_dict(saved.sharded)
    optimizer.load_state_dict(optimizer.state_dict())
    return steps(model, optimizer)


def outer(**settings):
    model = Net()
    local = mpiring.torch.DiLoCo(model, comm, every=2, **settings)
    optimizer = SGD(model.parameters())
    for step in range(4):
        steps(model, optimizer, count=1)
        local.step()
    local.load_state_dict(local.state_dict())
    return list(model.parameters())


def asynchronous():
    with mpiring.torch.AsyncDataParallel(Net(), comm, staleness=0, optimizer=functools.partial(
            mpiring.optim.SGD, lr=0.1)) as model:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            model.step()
    return list(model.state_dict().values())


def loaded():
    """Not by a DataLoader: PyTorch's own draws a number on the default device."""
    sampler = mpiring.torch.DistributedSampler(range(24), comm, seed=2)
    return [x.clone() for x in prefetch([full((2,), sample) for sample in sampler], "cpu")]


def collectives():
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[RANK, 2]], device=CPU), full((2, 3), 1.5), (SIZE + 3, 3), device=CPU,
        check_invariants=False)
    integers = torch.arange(5, device=CPU) - 3 * RANK
    single, strided, short = full((SIZE,), RANK), full((4, 2), RANK).T, full((2,), 0)
    chunks = [full((2,), 0) for _ in range(SIZE)]
    dist.all_reduce(sparse)
    dist.all_reduce(integers, dist.ReduceOp.AVG)
    dist.all_reduce(strided)
    dist.all_gather(chunks, full((2,), RANK))
    dist.reduce_scatter(short, [full((2,), RANK) for _ in range(SIZE)])
    dist.all_to_all_single(full((SIZE,), 0), single)
    dist.barrier()
    return [sparse.to_dense(), integers, strided, short, *chunks]


def objects():
    """PyTorch makes the tensors itself, of a kind that has no default device."""
    everybody, news, scattered = [None] * SIZE, [{"from": RANK}], [None]
    dist.all_gather_object(everybody, {"rank": RANK, "x": full((2,), RANK)})
    dist.broadcast_object_list(news, SIZE - 1)
    dist.scatter_object_list(scattered, [*range(SIZE)] if RANK == 0 else None, 0)
    again = comm.allgather_object(full((3,), RANK))
    return [*again, *(x["x"] for x in everybody), full((2,), news[0]["from"]),
            full((1,), scattered[0])]


def ddp():
    model = nn.parallel.DistributedDataParallel(Net())
    return steps(model, SGD(model.parameters()))


def horovod(sparse=False):
    model = Net(sparse, norm=hvd.SyncBatchNorm)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), momentum=0 if sparse else 0.9), model.named_parameters())
    losses = steps(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rows = full((RANK + 1, 2), RANK)
    shared, counts = hvd.alltoall(full((SIZE, 2), RANK), torch.ones(
        SIZE, dtype=torch.int64, device=CPU))
    return [*losses, hvd.allgather(rows), shared, counts, hvd.reducescatter(full((SIZE, 2), RANK)),
            *hvd.grouped_allreduce([full((2,), RANK), full((3, 2), RANK)]),
            full((1,), hvd.broadcast_object(RANK, root_rank=SIZE - 1))]


PIECES = {
    "DataParallel": wrapped,
    "sparse": functools.partial(wrapped, sparse=True),
    "unused parameters": functools.partial(wrapped, find_unused_parameters=True),
    "deferred": functools.partial(wrapped, defer_wait=True),
    "Sharded SGD": functools.partial(sharded, torch.optim.SGD, lr=0.1, momentum=0.9),
    # PyTorch's other forms count steps in a tensor on the default device.
    "Sharded AdamW": functools.partial(sharded, torch.optim.AdamW, lr=0.1, fused=True),
    "Sharded mpiring AdamW": functools.partial(sharded, mpiring.optim.AdamW, lr=0.1),
    "DiLoCo": outer, "fragments": functools.partial(outer, fragments=2, delay=1, sharded=True),
    "AsyncDataParallel": asynchronous, "loader": loaded, "collectives": collectives,
    "objects": objects, "DistributedDataParallel": ddp,
    "Horovod": horovod, "Horovod sparse": functools.partial(horovod, sparse=True),
}
DEFAULTS = {"meta": lambda: torch.device("meta"),
            "float64": lambda: default_dtype(torch.float64),
            "bfloat16": lambda: default_dtype(torch.bfloat16)}

failures = []
for name, piece in PIECES.items():
    expected = [x.detach().clone() for x in piece()]
    for default, enter in DEFAULTS.items():
        with enter():
            results = piece()
        if not all(x.device == CPU and x.dtype == y.dtype and torch.equal(x, y)
                   for x, y in zip(results, expected, strict=True)):
            failures.append(f"rank {RANK}: {name} with the default {default}: {results}, but "
                            f"without {expected}")
assert not failures, "\n".join(failures)
comm.close()
hvd.shutdown()
dist.destroy_process_group()
print("all is well", flush=True)
