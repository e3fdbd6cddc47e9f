"""Calls every function of Horovod's interface, on NumPy arrays and tensors; on 3 ranks or more."""

import importlib
import json
import sys

import numpy as np
import torch

import mpiring.horovod
import mpiring.horovod.torch

FOLDER = sys.argv[1]
assert not mpiring.horovod.is_initialized()
PAIR = mpiring.horovod.ProcessSet([0, 1])
mpiring.horovod.init(process_sets=[PAIR])
mpiring.horovod.init()
RANK, SIZE = mpiring.horovod.rank(), mpiring.horovod.size()
SUM = sum(range(1, SIZE + 1))


def equal(x, y):
    x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    assert x.shape == np.shape(y) and np.allclose(x, y, rtol=1e-6), (x, y)
    return True


def of_both(hvd, array):
    """Return a call for every name that both packages have, as pairs of result and truth."""
    ones, rows = array(np.full((2, 3), RANK + 1.0)), array(np.full((RANK + 1, 2), float(RANK)))
    gathered = np.repeat(np.arange(SIZE), range(1, SIZE + 1))[:, None] * np.ones(2)
    many = array(np.full((2 * SIZE + 1, 2), RANK + 1.0))
    own_rows = np.full((2 + (RANK == 0), 2), float(SUM))
    total, mean = np.full((2, 3), float(SUM)), np.full((2, 3), SUM / SIZE)
    sync = hvd.synchronize

    def new():
        return array(np.full((2, 3), RANK + 1.0))

    def in_place(call, *args, **kwargs):
        x = new()
        result = call(x, *args, **kwargs)
        result = result if not hasattr(result, "matcher") else sync(result)
        return result is x and equal(x, total)

    def grouped_in_place(call):
        xs = [new(), new()]
        results = call(xs, op=hvd.Sum)
        results = results if isinstance(results, list) else sync(results)
        return all(equal(x, total) and x is y for x, y in zip(xs, results))

    def polled():
        handle = hvd.allreduce_async(ones)
        while not hvd.poll(handle):
            pass
        return equal(sync(handle), mean)

    def broadcast_in_place(call):
        x = new()
        result = call(x, 1)
        result = result if not hasattr(result, "matcher") else sync(result)
        return result is x and equal(x, np.full((2, 3), 2.0))

    def parameters():
        x = new()
        hvd.broadcast_parameters({"x": x}, 0)
        return equal(x, np.ones((2, 3)))

    def process_set():
        last = hvd.add_process_set([SIZE - 1])
        assert last.size() == 1 and last.included() == (RANK == SIZE - 1)
        if last.included():
            assert last.rank() == 0 and equal(hvd.allreduce(ones, process_set=last), ones)
        assert hvd.remove_process_set(last) and not hvd.remove_process_set(last)
        return True

    def timeline():
        path = f"{FOLDER}/{hvd.__name__}.json"
        hvd.start_timeline(path, mark_cycles=True)
        hvd.allreduce(ones, name="on the line")
        hvd.stop_timeline()
        hvd.barrier()
        text = open(path).read() if RANK == 0 else "[]"
        named = [event for event in json.loads(text)
                 if event.get("args", {}).get("tensor") == "allreduce.on the line"]
        return RANK > 0 or ({event["name"] for event in named} == {
            "NEGOTIATE_ALLREDUCE", "ALLREDUCE"} and "CYCLE_START" in text)

    def begins_anew():
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init(process_sets="dynamic")
        hvd.add_process_set(PAIR)
        return hvd.is_initialized() and equal(hvd.allreduce(ones), mean)

    splits = [rank + 1 for rank in range(SIZE)]
    to_send = array(np.repeat(np.arange(SIZE), splits) + 10.0 * RANK)
    arrived = np.repeat(10.0 * np.arange(SIZE), RANK + 1) + RANK

    def alltoall():
        received, counts = hvd.alltoall(to_send, splits)
        even = hvd.alltoall(array(np.arange(2.0 * SIZE)))
        return (equal(received, arrived) and list(counts) == [RANK + 1] * SIZE
                and equal(even, np.tile([2.0 * RANK, 2 * RANK + 1], SIZE)))

    return {
        "Adasum": lambda: equal(hvd.allreduce(array(np.ones(5)), op=hvd.Adasum), np.ones(5)),
        "Average": lambda: equal(hvd.allreduce(array(np.full(3, 7 * (RANK + 1))), op=hvd.Average),
                                 np.full(3, 7 * SUM // SIZE)),
        "Compression": lambda: equal(hvd.allreduce(ones, compression=hvd.Compression.fp16), mean),
        "HorovodInternalError": lambda: issubclass(hvd.HorovodInternalError, RuntimeError),
        "Max": lambda: equal(hvd.allreduce(ones, op=hvd.Max), np.full((2, 3), float(SIZE))),
        "Min": lambda: equal(hvd.allreduce(ones, op=hvd.Min), np.ones((2, 3))),
        "Product": lambda: equal(hvd.allreduce(ones, op=hvd.Product),
                                 np.full((2, 3), np.prod(np.arange(1.0, SIZE + 1)))),
        "ProcessSet": lambda: PAIR.process_set_id == 1 and PAIR.included() == (RANK < 2),
        "Sum": lambda: equal(hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5,
                                           postscale_factor=4.0), 2 * total),
        "add_process_set": process_set, "remove_process_set": process_set,
        "allgather": lambda: equal(hvd.allgather(rows), gathered),
        "allgather_async": lambda: equal(sync(hvd.allgather_async(rows)), gathered),
        "allgather_object": lambda: hvd.allgather_object(RANK) == list(range(SIZE)),
        "allreduce": lambda: equal(hvd.allreduce(ones), mean),
        "allreduce_": lambda: in_place(hvd.allreduce_, op=hvd.Sum),
        "allreduce_async": lambda: equal(sync(hvd.allreduce_async(ones)), mean),
        "allreduce_async_": lambda: in_place(hvd.allreduce_async_, op=hvd.Sum),
        "alltoall": alltoall,
        "alltoall_async": lambda: equal(sync(hvd.alltoall_async(to_send, splits))[0], arrived),
        "barrier": lambda: hvd.barrier() is None,
        "broadcast": lambda: equal(hvd.broadcast(ones, 1), np.full((2, 3), 2.0)),
        "broadcast_": lambda: broadcast_in_place(hvd.broadcast_),
        "broadcast_async": lambda: equal(sync(hvd.broadcast_async(ones, 1)), np.full((2, 3), 2.0)),
        "broadcast_async_": lambda: broadcast_in_place(hvd.broadcast_async_),
        "broadcast_object": lambda: hvd.broadcast_object({"rank": RANK}, 1) == {"rank": 1},
        "broadcast_object_fn": lambda: hvd.broadcast_object_fn(1)(RANK) == 1,
        "broadcast_parameters": parameters,
        "ccl_built": lambda: hvd.ccl_built() is False,
        "cross_rank": lambda: hvd.cross_rank() == 0, "cross_size": lambda: hvd.cross_size() == 1,
        "cuda_built": lambda: isinstance(hvd.cuda_built(), bool),
        "ddl_built": lambda: hvd.ddl_built() is False,
        "global_process_set": lambda: hvd.global_process_set.size() == SIZE,
        "gloo_built": lambda: hvd.gloo_built() is False,
        "gloo_enabled": lambda: hvd.gloo_enabled() is False,
        "grouped_allgather": lambda: all(map(equal, hvd.grouped_allgather([rows, rows]),
                                             [gathered, gathered])),
        "grouped_allgather_async": lambda: all(map(
            equal, sync(hvd.grouped_allgather_async([rows, rows])), [gathered, gathered])),
        "grouped_allreduce": lambda: all(map(
            equal, hvd.grouped_allreduce([ones, rows[:1] * 0]), [mean, np.zeros((1, 2))])),
        "grouped_allreduce_": lambda: grouped_in_place(hvd.grouped_allreduce_),
        "grouped_allreduce_async": lambda: all(map(
            equal, sync(hvd.grouped_allreduce_async([ones, ones])), [mean, mean])),
        "grouped_allreduce_async_": lambda: grouped_in_place(hvd.grouped_allreduce_async_),
        "grouped_reducescatter": lambda: all(map(
            equal, hvd.grouped_reducescatter([many, many], op=hvd.Sum), [own_rows, own_rows])),
        "grouped_reducescatter_async": lambda: equal(
            sync(hvd.grouped_reducescatter_async([many]))[0], own_rows / SIZE),
        "is_homogeneous": lambda: hvd.is_homogeneous() is True,
        "join": lambda: hvd.join() in range(SIZE),
        "local_rank": lambda: hvd.local_rank() == RANK,
        "local_size": lambda: hvd.local_size() == SIZE,
        "mpi_built": lambda: hvd.mpi_built() is True,
        "mpi_enabled": lambda: hvd.mpi_enabled() is True,
        "mpi_threads_supported": lambda: hvd.mpi_threads_supported() in (True, False),
        "nccl_built": lambda: hvd.nccl_built() == 0,
        "poll": polled, "synchronize": polled,
        "rank": lambda: hvd.rank() == RANK, "size": lambda: hvd.size() == SIZE,
        "reducescatter": lambda: equal(hvd.reducescatter(many, op=hvd.Sum), own_rows),
        "reducescatter_async": lambda: equal(sync(hvd.reducescatter_async(many)), own_rows / SIZE),
        "rocm_built": lambda: hvd.rocm_built() is False,
        "start_timeline": timeline, "stop_timeline": lambda: hvd.stop_timeline() is None,
        # Last.
        "init": begins_anew, "is_initialized": hvd.is_initialized, "shutdown": begins_anew,
    }


def of_tensors(hvd):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
    plain = torch.optim.Adam(model.parameters(), lr=0.1 * (RANK + 1))

    def trains():
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        weights = hvd.allgather_object(model[0].weight.tolist())
        return weights == SIZE * weights[:1] and optimizer.param_groups[0]["lr"] == 0.1

    def sparse():
        x = torch.eye(3).to_sparse() * (RANK + 1)
        return equal(hvd.sparse_allreduce_async(x, "eye", hvd.Sum)().to_dense(), np.eye(3) * SUM)

    def elastic():
        @hvd.elastic.run
        def train(state):
            state.count += 1
            state.commit()
            return state.count

        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        sampler.record_batch(0, 1)
        sampler.reset()
        state = hvd.elastic.TorchState(model, plain, sampler=sampler, count=RANK)
        return train(state) == 1 and list(sampler)[:1] == [SIZE + RANK]

    return {"DistributedOptimizer": trains, "SyncBatchNorm": trains,
            "broadcast_optimizer_state": trains, "sparse_allreduce_async": sparse,
            "elastic": elastic}


for hvd, calls in (
        (mpiring.horovod, of_both(mpiring.horovod, np.array)),
        (mpiring.horovod.torch, of_tensors(mpiring.horovod.torch) | of_both(
            mpiring.horovod.torch, torch.tensor))):
    assert set(calls) == set(hvd.__all__), set(calls) ^ set(hvd.__all__)
    for name, call in calls.items():
        assert call() is True, (hvd.__name__, name)
# Horovod's modules, which programs also import.
for name, names in {
        "torch.mpi_ops": mpiring.horovod.torch.__all__, "torch.compression": ["Compression"],
        "torch.functions": ["allgather_object", "broadcast_object", "broadcast_parameters",
                            "broadcast_optimizer_state"],
        "torch.optimizer": ["DistributedOptimizer"], "torch.sync_batch_norm": ["SyncBatchNorm"],
        "common.exceptions": ["HorovodInternalError"],
        "common.process_sets": ["ProcessSet", "add_process_set", "global_process_set",
                                "remove_process_set"]}.items():
    module = importlib.import_module(f"mpiring.horovod.{name}")
    for each in names:
        assert getattr(module, each) is getattr(mpiring.horovod.torch, each), (name, each)
interrupt = importlib.import_module("mpiring.horovod.common.exceptions").HostsUpdatedInterrupt
assert interrupt is mpiring.horovod.torch.elastic.HostsUpdatedInterrupt
plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
assert [*mpiring.horovod.torch.DistributedOptimizer(plain)._parameter_names.values()] == [
    "allreduce.noname.0.0", "allreduce.noname.0.1"]
mpiring.horovod.shutdown()
print("all is well", flush=True)
