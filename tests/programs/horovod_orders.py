"""Submits Horovod's operations in another order on each rank, and wrongly; run by mpirun.

Modes: "right" and "first", of which all ranks come to the end; "missing", "silent" and "exit",
which end with errors.
"""

import logging
import random
import shutil
import sys
import tempfile
import threading
import time

import numpy as np
import torch
from torch import nn

import mpiring.horovod.torch as hvd
# In evaluation, no ranks are needed.
hvd.SyncBatchNorm(3).eval()(torch.ones(2, 3))
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SUM = sum(range(1, SIZE + 1))


def refused(error, words, call):
    """Check an error of all ranks, and that they go on."""
    try:
        call()
    except error as exc:
        assert all(word in str(exc) for word in words), exc
    else:
        raise AssertionError(f"nobody refused {words}")
    assert float(hvd.allreduce(torch.tensor(RANK + 1.0), op=hvd.Sum)) == SUM


def another_order_on_each_rank():
    dice = random.Random(RANK)
    names = [f"tensor {i}" for i in range(40)]
    for together in (40, 7, 1):
        # One of them is too long to be fused.
        tensors = {name: torch.full((3_000_000 if i == 5 else 30 * i,), i + RANK + 0.0)
                   for i, name in enumerate(names)}
        handles, left = {}, dice.sample(names, len(names))
        while left:
            for name in left[:together]:
                handles[name] = hvd.allreduce_async_(tensors[name], name=name, op=hvd.Sum)
            left = left[together:]
        for name in dice.sample(names, len(names)):
            hvd.synchronize(handles[name])
        for i, name in enumerate(names):
            assert (tensors[name] == SIZE * i + SUM - SIZE).all(), name


def kinds_and_dtypes_mix():
    order = list(range(6))
    random.Random(RANK).shuffle(order)
    calls = [lambda: hvd.allreduce_async(torch.ones(5), name="a", op=hvd.Sum),
             lambda: hvd.allreduce_async(torch.ones(5, dtype=torch.int64), name="b", op=hvd.Sum),
             lambda: hvd.allgather_async(torch.ones(RANK, 2), name="c"),
             lambda: hvd.broadcast_async(torch.full((4,), RANK + 0.0), 1, name="d"),
             lambda: hvd.reducescatter_async(torch.ones(SIZE), name="e", op=hvd.Sum),
             lambda: hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3).half()], name="f")]
    handles = {number: calls[number]() for number in order}
    a, b, c, d, e, f = (hvd.synchronize(handles[number]) for number in range(6))
    assert (a == SIZE).all() and (b == SIZE).all() and c.shape == (SUM - SIZE, 2)
    assert (d == 1).all() and e.tolist() == [SIZE] and [x.tolist() for x in f] == [[1, 1], [1] * 3]


def one_length_changes():
    """The other array is then at another offset of the fused vector."""
    for n in (3, 8):
        first = hvd.allreduce_async_(torch.ones(n), name="first", op=hvd.Sum)
        second = hvd.allreduce_async(torch.full((4,), 2.0), name="second", op=hvd.Sum)
        assert hvd.synchronize(first).tolist() == [SIZE] * n
        assert hvd.synchronize(second).tolist() == [2 * SIZE] * 4


def operations_advance_while_the_program_computes():
    """Nobody waits; the batch ends by itself."""
    handle = hvd.allreduce_async(torch.ones(10), name="overlapped", op=hvd.Sum)
    done = threading.Event()
    while not (handle.started or done.wait(0.01)) and hvd.global_process_set.comm.threaded:
        pass
    assert (hvd.synchronize(handle) == SIZE).all()


def ranks_join_early():
    for step in range(2 + RANK):
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        assert (total == sum(step < 2 + rank for rank in range(SIZE))).all()
    assert hvd.join() == SIZE - 1
    # Numbers of those without a name begin anew.
    handle, limit_s = hvd.allreduce_async(torch.ones(3), op=hvd.Sum), time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < limit_s, "the others' has another number"
    assert (hvd.synchronize(handle) == SIZE).all()


def names_left_over_advance_while_the_program_computes():
    first = hvd.allreduce_async(torch.ones(2), name="first")
    if RANK:
        hvd.synchronize(first)
        time.sleep(0.05)
    left_over = hvd.allreduce_async(torch.ones(2), name="left over", op=hvd.Sum)
    hvd.synchronize(first)
    done, limit_s = threading.Event(), time.monotonic() + 20
    while not (left_over.started or done.wait(0.01)) and hvd.global_process_set.comm.threaded:
        assert time.monotonic() < limit_s, "the name is not compared again"
    assert (hvd.synchronize(left_over) == SIZE).all()


def a_rank_that_has_joined_supports_reductions_only():
    if RANK:
        refusals = [lambda: hvd.allgather(torch.ones(2)), lambda: hvd.alltoall(torch.ones(SIZE)),
                    lambda: hvd.broadcast(torch.ones(2), 0),
                    lambda: hvd.reducescatter(torch.ones(SIZE)),
                    lambda: hvd.allreduce(torch.ones(2), op=hvd.Min),
                    lambda: hvd.allgather_object(RANK), lambda: hvd.broadcast_object(RANK, 1),
                    lambda: hvd.broadcast_parameters([torch.ones(2)], 1),
                    lambda: hvd.broadcast_optimizer_state(
                        torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1),
                    lambda: hvd.elastic.TorchState().sync(), lambda: hvd.add_process_set([0]),
                    lambda: hvd.start_timeline("timeline.json"),
                    lambda: hvd.SyncBatchNorm(3)(torch.ones(4, 3))]
        for call in refusals:
            try:
                call()
            except hvd.HorovodInternalError as error:
                assert "not supported with Join at this time: rank 0 called join()" in str(error)
            else:
                raise AssertionError("one of the calls is not refused")
        hvd.barrier()
        total, single = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)],
                                              op=hvd.Sum, prescale_factor=2.0)
        assert total.tolist() == 2 * [2 * SIZE - 2.0] and single.tolist() == 3 * [2 * SIZE - 2]
    assert hvd.join() in range(1, SIZE)


def a_joined_rank_keeps_its_gradients():
    p = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), op=hvd.Sum,
                                         backward_passes_per_step=2)
    for step in range(2):
        (p * (RANK + 1)).sum().backward()
        if step == 0 and RANK == 0:
            hvd.join()
            assert p.grad.tolist() == [1, 1, 1] and p.tolist() == [0, 0, 0]
        (p * (RANK + 1)).sum().backward()
        optimizer.step()
        total = 2 * (SUM - (step == 0 and RANK > 0))
        assert p.grad.tolist() == 3 * [total], p.grad
        optimizer.zero_grad()
        if step == 0 and RANK:
            hvd.join()
        elif step == 0:
            break
    hvd.broadcast_parameters([p.data], 1)


def evaluation_needs_no_other_rank():
    if RANK == 0:
        x = torch.arange(12.0).reshape(4, 3)
        for kind in (nn.BatchNorm1d, hvd.SyncBatchNorm):
            norm = kind(3, track_running_stats=False).eval()
            torch.testing.assert_close(norm(x).mean(0), torch.zeros(3))
    hvd.barrier()


def a_timeline_that_cannot_be_written_ends_nothing():
    folder = hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mpiring").addHandler(handler)
    hvd.start_timeline(f"{folder}/timeline.json")
    hvd.barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    hvd.stop_timeline()
    logging.getLogger("mpiring").removeHandler(handler)
    assert len(warnings) == (RANK == 0) and all("cannot write the timeline" in text
                                                for text in warnings), warnings
    assert (hvd.allreduce(torch.ones(2), op=hvd.Sum) == SIZE).all()


def one_rank_ends_early():
    """The last case: the other ranks learn at once that a rank submits nothing any more."""
    p = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1))
    if RANK == SIZE - 1:
        return
    p.sum().backward()
    for call in (lambda: hvd.allreduce(torch.ones(2), name="one more"), optimizer.step, hvd.join,
                 hvd.barrier, lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1),
                 lambda: hvd.broadcast_parameters([p], 0), lambda: hvd.add_process_set([0]),
                 lambda: hvd.start_timeline("timeline.json"),
                 lambda: hvd.SyncBatchNorm(3)(torch.ones(4, 3))):
        try:
            call()
        except hvd.HorovodInternalError as error:
            assert f"Horovod has been shut down on rank {SIZE - 1}" in str(error), error
        else:
            raise AssertionError("one of the calls is not refused")


def gradients_come_back():
    x = torch.full((2, 2), RANK + 1.0, requires_grad=True)
    (hvd.allgather(x[:RANK + 1]) * (RANK + 1)).sum().backward()
    assert (x.grad[:RANK + 1] == SUM / SIZE).all() and (x.grad[RANK + 1:] == 0).all()
    x.grad = None
    hvd.broadcast(x, 1).sum().backward()
    assert (x.grad == (RANK == 1)).all()
    y = torch.arange(2.0 * SIZE, requires_grad=True)
    (hvd.alltoall(y) * (RANK + 1)).sum().backward()
    assert y.grad.tolist() == np.repeat(np.arange(1.0, SIZE + 1), 2).tolist()
    y.grad = None
    (hvd.reducescatter(y, op=hvd.Sum) * (RANK + 1)).sum().backward()
    assert y.grad.tolist() == (SIZE * np.repeat(np.arange(1.0, SIZE + 1), 2)).tolist()


def operations_in_place_are_noticed():
    """Leaves can be changed, but not what a backward pass needs."""
    weight = torch.ones(3, requires_grad=True)
    for n in (3, 3_000_000):
        x = torch.ones(n)
        for call in (hvd.allreduce_, lambda x: hvd.broadcast_(x, 0),
                     lambda x: hvd.grouped_allreduce_([x])):
            product = (weight[0] * x).sum()
            call(x)
            refused(RuntimeError, ["modified by an inplace operation"], product.backward)
    assert hvd.broadcast_(weight, 0) is weight
    hvd.broadcast_parameters([weight], 0)


def gradients_have_gradients():
    x = torch.full((2 * SIZE,), RANK + 2.0, requires_grad=True)
    for call, weight in ((lambda x: hvd.allreduce(x, op=hvd.Sum), SIZE), (hvd.alltoall, 1)):
        # The sum over ranks of y³ / 3, whose first derivative is differentiated.
        y = call(x)
        (dx,) = torch.autograd.grad((y ** 3 / 3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        torch.testing.assert_close(ddx, 2 * weight ** 2 * y.detach() if weight > 1 else 2 * x)
    batch = torch.randn(4, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(hvd.SyncBatchNorm(3)(batch).square().sum(), batch,
                                create_graph=True)
    refused(RuntimeError, ["twice"], dx.sum().backward)


def wrong_use_is_refused():
    first, mismatch = RANK == 0, (hvd.HorovodInternalError, RuntimeError)
    both = ["Ranks 0 and", "'{}'", "submit the same on every rank"]

    def differ(name, words, call):
        refused(mismatch, [words, *[each.format(name) for each in both]], call)

    differ("allreduce.shapes", "allreduce tensor shapes: One rank sent a tensor of shape [3]",
           lambda: hvd.allreduce(torch.ones(3 if first else 4), name="shapes"))
    differ("allreduce.dtypes", "Mismatched data types: One rank had type float32",
           lambda: hvd.allreduce(torch.ones(3) if first else torch.ones(3).int(), name="dtypes"))
    differ("allreduce.ops", "reduction operation",
           lambda: hvd.allreduce(torch.ones(3), name="ops", op=hvd.Sum if first else hvd.Max))
    differ("allreduce.factors", "prescale and/or postscale factors",
           lambda: hvd.allreduce(torch.ones(3), name="factors", prescale_factor=1.0 + RANK))
    differ("broadcast.roots", "broadcast root ranks: One rank specified root rank 0",
           lambda: hvd.broadcast(torch.ones(3), 0 if first else 1, name="roots"))
    differ("allgather.rows", "allgather tensor shapes",
           lambda: hvd.allgather(torch.ones(3, 3 if first else 4), name="rows"))
    refused(mismatch, ["called 'broadcast_object.noname.", "called 'allgather_object.noname."],
            lambda: hvd.broadcast_object(1) if first else hvd.allgather_object(1))
    p = nn.Parameter(torch.ones(1))
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1), [(name, p)])
                  for name in ("some", "other")]
    refused(mismatch, ["called 'step.some", "called 'step.other", "parameters of the same names"],
            optimizers[not first].synchronize)
    refused(mismatch, ["rank-zero tensor", "reshape(1)"], lambda: hvd.allgather(torch.tensor(1.0)))
    refused(ValueError, [f"rank {RANK}: alltoall of 5 rows"],
            lambda: hvd.alltoall(torch.ones(5), splits=[1] * SIZE))
    refused(ValueError, ["root_rank=9"], lambda: hvd.broadcast(torch.ones(3), 9))
    refused(ValueError, ["op=17", "hvd.Average"], lambda: hvd.allreduce(torch.ones(3), op=17))
    refused(ValueError, ["a list: expected a torch.Tensor"], lambda: hvd.allreduce([1.0]))
    refused(ValueError, ["sparse", "sparse_allreduce_async"],
            lambda: hvd.allreduce(torch.eye(2).to_sparse()))
    refused(ValueError, ["invalid params"], lambda: hvd.broadcast_parameters(3, 0))
    refused(ValueError, [f"rank {RANK}: odd is on meta"],
            lambda: hvd.broadcast_parameters({"odd": torch.ones(2, device="meta")}, 0))
    refused(ValueError, ["duplicate process set", "global_process_set"],
            lambda: hvd.add_process_set(range(SIZE)))
    refused(ValueError, ["0 to"], lambda: hvd.add_process_set([0, 99]))
    refused(ValueError, ["on rank 0 it is"], lambda: hvd.add_process_set([RANK]))
    twice = hvd.allreduce_async(torch.ones(3), name="twice")
    refused(ValueError, [f"rank {RANK}", "same name as another tensor", "'allreduce.twice'"],
            lambda: hvd.allreduce_async(torch.ones(3), name="twice"))
    hvd.synchronize(twice)
    outside = hvd.add_process_set([0])
    if RANK:
        refused_here = "Process is not part of provided process set"
        try:
            hvd.allreduce(torch.ones(1), process_set=outside)
        except ValueError as error:
            assert refused_here in str(error)
    hvd.remove_process_set(outside)
    for x in (torch.ones(4, 1), torch.ones(4, 3, dtype=torch.int64)):
        refused(ValueError, ["floating input of 3 channels"], lambda: hvd.SyncBatchNorm(3)(x))


def batches_are_normalized_together():
    for shape in ((3 + RANK, 4), (0 if RANK == 1 else 2, 4, 5, 5)):
        torch.manual_seed(3)
        of_ranks = [torch.randn(3 + rank if len(shape) == 2 else 2 * (rank != 1), *shape[1:],
                                dtype=torch.float64) for rank in range(SIZE)]
        for momentum in (0.1, None):
            kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
            alone, shared = (norm(4, momentum=momentum).double()
                             for norm in (kind, hvd.SyncBatchNorm))
            shared.weight.data.copy_(torch.arange(1.0, 5.0))
            alone.load_state_dict(shared.state_dict())
            x = torch.cat(of_ranks).requires_grad_()
            own = of_ranks[RANK].clone().requires_grad_()
            start = sum(map(len, of_ranks[:RANK]))
            for _ in range(2):
                right, result = alone(x), shared(own)
            # The sum of squares hardly depends on x: a wrong factor would not show.
            right.pow(3).sum().backward()
            result.pow(3).sum().backward()
            rows = slice(start, start + len(own))
            torch.testing.assert_close(result, right[rows])
            torch.testing.assert_close(own.grad, x.grad[rows])
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                torch.testing.assert_close(getattr(shared, name), getattr(alone, name))
            for p, q in zip(shared.parameters(), alone.parameters()):
                torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad)
            shared.bias = None
            shared(own).sum().backward()


def only_rank_1_has_state():
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop,
                 torch.optim.SparseAdam):
        module = nn.Embedding(4, 3, sparse=kind is torch.optim.SparseAdam)
        optimizer = kind(module.parameters(), lr=0.1 * (RANK + 1))

        def step():
            module(torch.arange(RANK + 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        if RANK == 1:
            step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        states = hvd.allgather_object(optimizer.state_dict())
        assert str(states) == str(SIZE * states[1:2]) and states[0]["param_groups"][0]["lr"] == 0.2
        step()


def a_scheduler_stays_that_of_its_optimizer():
    module = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0 + RANK))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + RANK)
    state = hvd.elastic.TorchState(module, optimizer, scheduler=scheduler, count=RANK)
    state.sync()
    scheduler.last_epoch = state.count = 9
    state.restore()
    assert state.scheduler is scheduler and scheduler.optimizer is optimizer
    assert (scheduler.last_epoch, scheduler.step_size, state.count) == (0, 1, 0)
    assert optimizer.param_groups[0]["lr"] == 1.0


if sys.argv[1] == "missing":
    began = time.monotonic()
    try:
        # Rank 1 submits something else, and never this.
        hvd.allreduce(torch.ones(3), name="wanted" if RANK != 1 else "other")
    except hvd.HorovodInternalError as error:
        print(f"after {time.monotonic() - began:.0f} s: {error}", flush=True)
        raise
if sys.argv[1] == "first":
    handle = hvd.allreduce_async(torch.ones(3), name="first")
    # One rank waits at once, for another one whose thread begins the comparison.
    while RANK == 0 and not handle.started:
        time.sleep(0.01)
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]
    hvd.shutdown()
    print("all is well", flush=True)
    sys.exit()
if sys.argv[1] == "exit":
    # A process set without rank 0; nobody calls shutdown.
    last = hvd.add_process_set([SIZE - 1])
    hvd.allreduce(torch.ones(2))
    if RANK == 0 and sys.argv[2:] == ["early"]:
        sys.exit()
    if last.included():
        hvd.allreduce(torch.ones(2), process_set=last)
    if sys.argv[2:] == ["early"]:
        hvd.allreduce(torch.ones(2), name="one more")
    print("all is well", flush=True)
    sys.exit()
if sys.argv[1] == "silent":
    if RANK == 1:
        time.sleep(30)
    hvd.allreduce(torch.ones(3), name="wanted")
for case in (another_order_on_each_rank, kinds_and_dtypes_mix, one_length_changes,
             operations_advance_while_the_program_computes,
             names_left_over_advance_while_the_program_computes, ranks_join_early,
             a_rank_that_has_joined_supports_reductions_only, a_joined_rank_keeps_its_gradients,
             gradients_come_back, gradients_have_gradients, operations_in_place_are_noticed,
             wrong_use_is_refused,
             evaluation_needs_no_other_rank, a_timeline_that_cannot_be_written_ends_nothing,
             batches_are_normalized_together, only_rank_1_has_state,
             a_scheduler_stays_that_of_its_optimizer, one_rank_ends_early):
    case()
    if RANK == 0:
        print(f"holds: {case.__name__}", flush=True)
hvd.shutdown()
print("all is well", flush=True)
