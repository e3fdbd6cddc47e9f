"""Compares every collective of torch.distributed with Gloo's, on the same inputs; run by mpirun.

What Gloo lacks, or gets wrong, is compared with what the documentation says. Gloo's tensors lie
on the CPU, ours there or on a GPU; see whereabouts.
"""

import itertools
import os
import sys
import warnings

import torch
import torch.distributed as dist
from whereabouts import CUDA, WHERE

import mpiring.torch  # noqa: F401 (registers the back end)

# Old names are called on purpose, where PyTorch 2.4 has no others.
warnings.simplefilter("ignore", FutureWarning)
warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

dist.init_process_group("mpiring", init_method="mpi://")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
OURS = dist.group.WORLD
Op = dist.ReduceOp
NUMBERS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
           torch.int32, torch.int64, torch.bool]


def filled(shape, dtype=torch.float32, seed=0, rank=RANK):
    """A rank's input: small numbers, whose sums and products are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3 + seed) % 3).to(dtype).reshape(shape)


def strided(shape, dtype=torch.float32):
    """The same, but not contiguous."""
    x = torch.empty((*shape, 2), dtype=dtype)[..., 0]
    return x.copy_(filled(shape, dtype))


def of_all(shape, dtype=torch.float32, seed=0):
    """The inputs of all ranks."""
    return [filled(shape, dtype, seed, rank) for rank in range(SIZE)]


def all_reduce(group, dtype, op, shape=(3, 5)):
    x = filled(shape, dtype)
    dist.all_reduce(x, op, group=group)
    return x


def all_reduce_half_strided(group):
    """Only some ranks have a contiguous tensor, and wait at once."""
    results = []
    for turn in range(4):
        x = strided((3, 5)) if (RANK + turn) % 2 else filled((3, 5))
        work = dist.all_reduce(x, group=group, async_op=(RANK + turn) % 3 == 0)
        if work is not None:
            work.wait()
        results.append(x)
    return results


def all_reduce_strided(group, dtype, op=Op.SUM):
    x, wide = strided((3, 5), dtype), strided((4, 2), dtype).T
    dist.all_reduce(x, op, group=group)
    dist.all_reduce(wide, op, group=group)
    return [x, wide]


def all_reduce_in_turn(group):
    """Equal calls, in each of which the tensor of one rank is not contiguous."""
    xs = [(strided if i % SIZE == RANK else filled)((3, 5)) for i in range(4 * SIZE)]
    works = [dist.all_reduce(x, group=group, async_op=i % 3 == 0) for i, x in enumerate(xs)]
    for work in filter(None, works):
        work.wait()
    return xs


def all_reduce_coalesced(group):
    several, xs = [filled((3,)), filled((2, 2)), filled((0,))], [filled((3,)), filled((2, 2))]
    dist.all_reduce_coalesced(several, group=group)
    with dist.distributed_c10d._coalescing_manager(group):
        for x in xs:
            dist.all_reduce(x, group=group)
    return [*several, *xs]


def all_reduce_sparse(group):
    x = torch.sparse_coo_tensor(
        [[RANK, 2, RANK]], [[1.0, 2], [3, 4], [5, 6]], (SIZE + 3, 2), check_invariants=True)
    dist.all_reduce(x, group=group)
    return x.to_dense()


def reduce(group, dtype, op, root):
    x = filled((3, 5), dtype)
    dist.reduce(x, root, op, group=group)
    return x if RANK == root else []


def broadcast(group, dtype, root, shape=(3, 5)):
    x = filled(shape, dtype)
    dist.broadcast(x, root, group=group)
    return x


def all_gather(group, dtype, shape=(2, 3)):
    xs = [torch.empty(shape, dtype=dtype) for _ in range(SIZE)]
    dist.all_gather(xs, filled(shape, dtype), group=group)
    return xs


def all_gather_strided(group):
    xs = [strided((2, 3)) for _ in range(SIZE)]
    dist.all_gather(xs, filled((3, 2)).T, group=group)
    return xs


def all_gather_into_tensor(group, dtype, shape=(SIZE * 2, 3)):
    x = torch.empty(shape, dtype=dtype)
    dist.all_gather_into_tensor(x, filled((2, 3), dtype), group=group)
    return x


def all_gather_coalesced(group):
    outputs = [[torch.empty(2), torch.empty(3, 1)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [filled((2,)), filled((3, 1), seed=1)], group=group)
    return [x for row in outputs for x in row]


def gather(group, dtype, root):
    xs = [torch.empty(2, 3, dtype=dtype) for _ in range(SIZE)] if RANK == root else None
    dist.gather(filled((2, 3), dtype), xs, root, group=group)
    return xs or []


def scatter(group, dtype, root):
    x = torch.empty(2, 3, dtype=dtype)
    xs = [filled((2, 3), dtype, seed) for seed in range(SIZE)] if RANK == root else None
    dist.scatter(x, xs, root, group=group)
    return x


def reduce_scatter(group, dtype, op):
    x = torch.empty(2, 3, dtype=dtype)
    xs = [filled((2, 3), dtype, seed) for seed in range(SIZE)]
    dist.reduce_scatter(x, xs, op, group=group)
    return [x, *xs]


def reduce_scatter_tensor(group, dtype, op):
    x, rows = torch.empty(2, 3, dtype=dtype), filled((SIZE * 2, 3), dtype)
    dist.reduce_scatter_tensor(x, rows, op, group=group)
    return [x, rows]


def all_to_all_single(group, dtype):
    x = torch.empty(SIZE * 2, 3, dtype=dtype)
    dist.all_to_all_single(x, filled((SIZE * 2, 3), dtype), group=group)
    return x


def reduced_part(group, dtype, op):
    return reduce_scatter_tensor(group, dtype, op)[0]


def all_to_all(group):
    xs = [torch.empty(q + RANK, 2, dtype=torch.int16) for q in range(SIZE)]
    inputs = [filled((RANK + q, 2), torch.int16, seed=q) for q in range(SIZE)]
    dist.all_to_all(xs, inputs, group=group)
    return xs


def coalesced_tensors(group):
    sums, inputs = [torch.empty(2), torch.empty(1, 2)], [filled((SIZE * 2,)), filled((SIZE, 2))]
    with dist.distributed_c10d._coalescing_manager(group):
        for x, y in zip(sums, inputs):
            dist.reduce_scatter_tensor(x, y, group=group)
    copies = [torch.empty(SIZE * 2), torch.empty(SIZE, 2)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for x, y in zip(copies, sums):
            dist.all_gather_into_tensor(x, y, group=group)
    manager.wait()
    return copies


def below(dtype, rank=RANK):
    """A rank's integers, whose sum is no multiple of SIZE, and in 8 bits overflows."""
    x = torch.tensor([[-7, -1, 0, 1, 5, 100]] * SIZE) + (rank == 0)
    return x.to(dtype)


def toward_zero(dtype):
    """The sum of them in their dtype, divided as C does, and NCCL."""
    total = sum(below(torch.int64, rank) for rank in range(SIZE)).to(dtype)
    return torch.tensor([int(x / SIZE) for x in total.flatten().tolist()]).to(dtype).view_as(total)


def integer_averages(group, dtype):
    """Each collective that reduces, of rank-dependent integers."""
    x, first, *several = (below(dtype) for _ in range(4))
    wide = torch.stack([below(dtype)] * 2, -1)[..., 0]
    dist.all_reduce(x, Op.AVG, group=group)
    dist.all_reduce(wide, Op.AVG, group=group)
    dist.all_reduce_coalesced(several, Op.AVG, group=group)
    before = first.clone()
    dist.reduce(first, 0, Op.AVG, group=group)
    assert RANK == 0 or torch.equal(first, before), "another rank's was divided"
    parts = [torch.empty(1, 6, dtype=dtype) for _ in range(2)]
    dist.reduce_scatter_tensor(parts[0], below(dtype), Op.AVG, group=group)
    dist.reduce_scatter(parts[1], [*below(dtype).split(1)], Op.AVG, group=group)
    return [x, wide, *several, *([first] if RANK == 0 else []), *parts]


def sparse_integer_average(group):
    x = torch.sparse_coo_tensor([[0, 1]], torch.tensor([-8, 2**60 + 1 + RANK]), (3,),
                                check_invariants=True)
    dist.all_reduce(x, Op.AVG, group=group)
    return x.to_dense()


def complex_halves(group, op):
    """What dist.all_reduce does not make real itself."""
    x, y = (torch.complex(filled((SIZE, 2), seed=seed), filled((SIZE, 2), seed=seed + 1))
            .to(torch.complex32) for seed in (0, 1))
    scattered, listed = (torch.empty(1, 2, dtype=torch.complex32) for _ in range(2))
    dist.reduce_scatter_tensor(scattered, x, op, group=group)
    dist.reduce_scatter(listed, [*y.split(1)], op, group=group)
    lone = x[0, 0].clone()
    dist.reduce(lone, 0, op, group=group)
    column = x.T if group is OURS else x.T.contiguous()
    dist.reduce(column, 0, op, group=group)
    return [scattered, listed, *([lone, column] if RANK == 0 else [])]


def all_to_all_single_uneven(group):
    sends, receives = [RANK + q for q in range(SIZE)], [q + RANK for q in range(SIZE)]
    x = torch.empty(sum(receives), 2)
    dist.all_to_all_single(x, filled((sum(sends), 2)), receives, sends, group=group)
    return x


def messages(group):
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    xs = [torch.empty(3), torch.empty(0), torch.empty(2, dtype=torch.int64)]
    works = [dist.irecv(x, left, group=group, tag=tag) for tag, x in enumerate(xs)]
    for tag, x in reversed(list(enumerate(xs))):
        dist.send(filled(x.shape, x.dtype, seed=tag), right, group=group, tag=tag)
    for work in works:
        work.wait()
    return xs


def any_source(group):
    if RANK:
        dist.send(filled((4,)), 0, group=group, tag=7)
        return []
    xs = [torch.empty(4) for _ in range(1, SIZE)]
    sources = [dist.recv(x, group=group, tag=7) for x in xs]
    assert sorted(sources) == list(range(1, SIZE))
    return [x for _, x in sorted(zip(sources, xs), key=lambda pair: pair[0])]


def batched(group):
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    big, small = torch.empty(300_000), torch.empty(2)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, filled((300_000,)), right, group),
            dist.P2POp(dist.irecv, big, left, group),
            dist.P2POp(dist.isend, filled((2,), seed=1), right, group),
            dist.P2POp(dist.irecv, small, left, group)]):
        work.wait()
    return [big, small]


def objects(group):
    everybody, gathered = [None] * SIZE, [None] * SIZE if RANK == 1 else None
    dist.all_gather_object(everybody, {"rank": RANK}, group=group)
    dist.gather_object("x" * RANK, gathered, 1, group=group)
    news = [f"from {RANK}", {1: RANK}]
    dist.broadcast_object_list(news, 0, group=group)
    scattered = [None]
    dist.scatter_object_list(scattered, list(range(SIZE)) if RANK == 0 else None, 0, group=group)
    return repr((everybody, gathered, news, scattered))


EXACT = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
BITS = [Op.BAND, Op.BOR, Op.BXOR]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
LAST = SIZE - 1

# What both must do alike.
CASES = [
    *((all_reduce, *case) for case in itertools.product(NUMBERS, EXACT)),
    *((all_reduce, *case) for case in itertools.product(INTEGERS, BITS)),
    *((all_reduce, torch.float32, Op.SUM, shape) for shape in [(), (0,), (100_003,), (7, 0, 2)]),
    (all_reduce, torch.complex64, Op.SUM),
    (all_reduce_coalesced,), (all_reduce_sparse,),
    *((reduce, *case) for case in itertools.product(NUMBERS, EXACT, {0, LAST})),
    *((reduce, *case) for case in itertools.product(INTEGERS, BITS, {LAST})),
    *((broadcast, *case) for case in itertools.product(NUMBERS, {0, LAST}, [(3, 5), ()])),
    *((all_gather, dtype) for dtype in NUMBERS), (all_gather, torch.float32, ()),
    (all_gather_strided,), (all_gather_coalesced,),
    *((all_gather_into_tensor, dtype) for dtype in NUMBERS),
    *((gather, *case) for case in itertools.product(NUMBERS, {0, LAST})),
    *((scatter, *case) for case in itertools.product(NUMBERS, {0, LAST})),
    *((reduce_scatter, *case) for case in itertools.product(NUMBERS, EXACT)),
    *((reduce_scatter_tensor, *case) for case in itertools.product(NUMBERS, EXACT)),
    *((all_to_all_single, dtype) for dtype in NUMBERS), (all_to_all_single_uneven,),
    (complex_halves, Op.SUM), (messages,), (any_source,), (batched,), (objects,),
]


def scaled_halves(factor):
    """What `complex_halves` returns, of a sum times a factor."""
    x, y = ((factor * sum(torch.complex(*parts) for parts in zip(
        of_all((SIZE, 2), seed=seed), of_all((SIZE, 2), seed=seed + 1)))).to(torch.complex32)
        for seed in (0, 1))
    return [part(x), part(y), *([x[0, 0], x.T] if RANK == 0 else [])]


MEAN = [torch.float32, torch.float64, torch.complex64]
AVERAGED = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]
OTHER = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64]
HALF = dist._make_nccl_premul_sum(0.5)


def part(x):
    return x.chunk(SIZE)[RANK]


def mean(shape, dtype=torch.float32):
    return sum(of_all(shape, dtype)) / SIZE


# What Gloo refuses, or gets wrong (strided tensors), and what it must be.
DOCUMENTED = [
    *((mean((3, 5), dtype), all_reduce, dtype, Op.AVG) for dtype in MEAN),
    (mean((3, 5)) if RANK == LAST else [], reduce, torch.float32, Op.AVG, LAST),
    (part(mean((SIZE * 2, 3))), reduced_part, torch.float32, Op.AVG),
    *(([toward_zero(dtype)] * (5 if RANK == 0 else 4) + [toward_zero(dtype)[:1]] * 2,
       integer_averages, dtype) for dtype in AVERAGED),
    (scaled_halves(1 / SIZE), complex_halves, Op.AVG), (scaled_halves(0.5), complex_halves, HALF),
    (torch.tensor([-8, 2**60 + 1 + (SIZE - 1) // 2, 0]), sparse_integer_average),
    (sum(of_all((3, 5))) / 2, all_reduce, torch.float32, HALF),
    ([sum(of_all((3, 5))) / 2, sum(of_all((4, 2))).T / 2], all_reduce_strided, torch.float32, HALF),
    (sum(of_all((3, 5))) / 2 if RANK == 1 else [], reduce, torch.float32, HALF, 1),
    (part(sum(of_all((SIZE * 2, 3)))) / 2, reduced_part, torch.float32, HALF),
    (sum(of_all((3, 5), torch.int16)), all_reduce, torch.int16, Op.SUM),
    (torch.stack(of_all((3, 5), torch.bool)).sum(0) % 2 == 1, all_reduce, torch.bool, Op.BXOR),
    *(([sum(of_all((3, 5), dtype)), sum(of_all((4, 2), dtype)).T], all_reduce_strided, dtype)
      for dtype in (torch.float32, torch.bfloat16, torch.int64)),
    ([sum(of_all((3, 5)))] * 4 * SIZE, all_reduce_in_turn),
    ([sum(of_all((3, 5)))] * 4, all_reduce_half_strided),
    *((of_all((2, 3), dtype), all_gather, dtype) for dtype in OTHER),
    (of_all((0,)), all_gather, torch.float32, (0,)),
    *((filled((3, 5), dtype, rank=1), broadcast, dtype, 1) for dtype in OTHER),
    *((torch.stack(of_all((2, 3), dtype)), all_gather_into_tensor, dtype, (SIZE, 2, 3))
      for dtype in (torch.float32, torch.float8_e4m3fn)),
    *((of_all((2, 3), dtype) if RANK == 0 else [], gather, dtype, 0) for dtype in OTHER),
    *((filled((2, 3), dtype, RANK, rank=1), scatter, dtype, 1) for dtype in OTHER),
    ([filled((q + RANK, 2), torch.int16, RANK, rank=q) for q in range(SIZE)], all_to_all),
    ([sum(of_all((SIZE * 2,))), sum(of_all((SIZE, 2)))], coalesced_tensors),
]


def empties(*shapes, dtype=torch.float32):
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


# What both must refuse, on every rank.
ERRORS = {
    "all_reduce: one element many times": lambda group: group is GLOO or dist.all_reduce(
        torch.ones(1).expand(4), group=group),
    "all_gather: shape": lambda group: dist.all_gather(
        empties(*[(2,)] * (SIZE - 1), (3,)), torch.empty(2), group=group),
    "all_gather: count": lambda group: dist.all_gather(
        empties(*[(2,)] * (SIZE + 1)), torch.empty(2), group=group),
    "all_gather: dtype": lambda group: dist.all_gather(
        empties(*[(2,)] * SIZE, dtype=torch.int32), torch.empty(2), group=group),
    "all_gather_into_tensor: size": lambda group: dist.all_gather_into_tensor(
        torch.empty(SIZE * 2 + 1), torch.empty(2), group=group),
    "all_gather_into_tensor: dtype": lambda group: dist.all_gather_into_tensor(
        torch.empty(SIZE * 2), torch.empty(2, dtype=torch.float64), group=group),
    "reduce_scatter: shape": lambda group: dist.reduce_scatter(
        torch.empty(3), empties(*[(2,)] * SIZE), group=group),
    "reduce_scatter: count": lambda group: dist.reduce_scatter(
        torch.empty(2), empties(*[(2,)] * (SIZE + 1)), group=group),
    "reduce_scatter_tensor: size": lambda group: dist.reduce_scatter_tensor(
        torch.empty(2), torch.empty(SIZE * 2 + 1), group=group),
    "all_to_all_single: splits": lambda group: dist.all_to_all_single(
        torch.empty(SIZE), torch.empty(SIZE), [1] * SIZE, [2] * SIZE, group=group),
    "all_reduce: bits of floats": lambda group: dist.all_reduce(
        torch.empty(2), Op.BAND, group=group),
    "reduce_scatter_tensor: product of complex32": lambda group: dist.reduce_scatter_tensor(
        torch.empty(2, dtype=torch.complex32), torch.empty(SIZE * 2, dtype=torch.complex32),
        Op.PRODUCT, group=group),
    "all_reduce: mean of bool": lambda group: dist.all_reduce(
        torch.ones(2, dtype=torch.bool), Op.AVG, group=group),
    "all_reduce: float8": lambda group: dist.all_reduce(
        torch.empty(2, dtype=torch.float8_e4m3fn), group=group),
    "all_reduce_coalesced: devices": lambda group: (
        group is GLOO or not CUDA or dist.all_reduce_coalesced(
            [torch.empty(2), torch.empty(2, device="cpu")], group=group)),
    "gather: count": lambda group: dist.gather(
        torch.empty(2), empties((2,)) * (SIZE + 1) if RANK == 0 else empties((2,)), 0,
        group=group),
    "scatter: shape": lambda group: dist.scatter(
        torch.empty(2), empties(*[(3,)] * SIZE) if RANK == 0 else empties((2,)), 0, group=group),
}


def same(ours, theirs):
    if isinstance(ours, str):
        return ours == theirs
    if isinstance(ours, torch.Tensor):
        ours, theirs = [ours], [theirs]
    return len(ours) == len(theirs) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(normal(x).cpu(), normal(y))
        for x, y in zip(ours, theirs))


def by_ours(function, *arguments):
    """Return what a function does with tensors that lie where this job's shall lie."""
    with WHERE:
        return function(OURS, *arguments)


def normal(x):
    # Gloo adds booleans as bytes: 2 is true, too.
    if x.dtype is torch.bool:
        return x.view(torch.uint8) != 0
    return torch.view_as_real(x) if x.dtype is torch.complex32 else x


def described(case):
    return f"rank {RANK}: {case[0].__name__}{case[1:]}"


failures = []
for case in CASES:
    function, *arguments = case
    try:
        theirs = function(GLOO, *arguments)
    except (RuntimeError, ValueError) as error:
        # The table must not compare with nothing.
        failures.append(f"{described(case)}: Gloo itself fails: {error}")
        continue
    ours = by_ours(function, *arguments)
    if not same(ours, theirs):
        failures.append(f"{described(case)}: {ours}, but Gloo says {theirs}")

for expected, function, *arguments in DOCUMENTED:
    ours = by_ours(function, *arguments)
    if not same(ours, expected):
        failures.append(f"{described((function, *arguments))}: {ours}, but must be {expected}")

for name, function in ERRORS.items():
    for group in GLOO, OURS:
        try:
            if (function(group) if group is GLOO else by_ours(function)) is True:
                continue    # It is not known to Gloo that this is wrong.
            failures.append(f"rank {RANK}: {name}: not refused by {group.name()}")
        except (RuntimeError, ValueError):
            pass

if failures:
    print(*failures, sep="\n", file=sys.stderr, flush=True)
    sys.exit(1)
print(f"all is well: {len(CASES)} cases agree with Gloo, {len(DOCUMENTED)} "
      f"with the documentation, {len(ERRORS)} errors are refused", flush=True)
dist.destroy_process_group()
