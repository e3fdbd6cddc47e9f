"""Profiles the back end, and holds what is seen to what Gloo's profile shows; run by mpirun."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import mpiring.torch  # noqa: F401 (registers the back end)

warnings.simplefilter("ignore")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("mpiring", init_method="mpi://")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
FILE = f"{sys.argv[1]}/{RANK}.json"


def operations(group):
    """Call what PyTorch's dispatcher records."""
    x, rows, parts = torch.ones(6), torch.ones(SIZE * 3), [torch.ones(3) for _ in range(SIZE)]
    on_root = parts if RANK == 0 else None
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_reduce(torch.eye(3).to_sparse(), group=group)
    dist.all_reduce_coalesced([x, rows], group=group)
    dist.broadcast(x.double(), 0, group=group)
    dist.reduce(x, 0, group=group)
    dist.all_gather(parts, torch.ones(3), group=group)
    dist.all_gather_into_tensor(rows, torch.ones(3), group=group)
    dist.gather(torch.ones(3), on_root, 0, group=group)
    dist.scatter(torch.ones(3), on_root, 0, group=group)
    dist.reduce_scatter(torch.ones(3), parts, group=group)
    dist.reduce_scatter_tensor(torch.ones(3), rows, group=group)
    dist.all_to_all_single(rows, rows.clone(), group=group)
    if RANK == 0:
        dist.send(x, 1, group)
        dist.send(x, 1, group)
    elif RANK == 1:
        dist.recv(x, 0, group)
        dist.recv(x, group=group)
    dist.barrier(group)


def traced(function, *args):
    """Return the events of PyTorch's operations, from the file that tools read."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function(*args)
    profiler.export_chrome_trace(FILE)
    with open(FILE) as trace:
        events = [event for event in json.load(trace)["traceEvents"] if event["ph"] == "X"]
    return sorted((event for event in events if event["name"].startswith(("c10d::", "mpiring:"))),
                  key=lambda event: event["ts"])


def seen(events):
    """Return the names of events, with the shapes and dtypes of their tensors."""
    return [(name, [shape for shape in event["args"].get("Input Dims", ()) if shape],
             {*event["args"].get("Input type", ())} - {"", "Scalar", "ScalarList"})
            for event in events if (name := event["name"]) != "mpiring:wait"]


class Step:
    """A step of DistributedDataParallel with several buckets."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(nn.Linear(30, 30) for _ in range(4))), bucket_cap_mb=0.004)
        # Buckets are built again after the first step.
        for _ in range(2):
            self()

    def __call__(self):
        self.model(torch.ones(2, 30)).sum().backward()


theirs, ours = (traced(operations, group) for group in (GLOO, dist.group.WORLD))
# A barrier of PyTorch's dispatcher has a tensor that only chooses the device.
assert seen(theirs)[:-1] == seen(ours)[:-1], (seen(theirs), seen(ours))
assert theirs[-1]["name"] == ours[-1]["name"] == "c10d::barrier"
first = ours[0]["args"]
assert {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 6, "Out msg nelems": 6,
        "Group size": SIZE, "Process Group Name": dist.group.WORLD.group_name}.items() <= (
            first.items()), first

step = Step()
events = traced(step)
buckets = [event["args"] for event in events if event["name"] == "c10d::allreduce_"]
assert len(buckets) > 1 and sum(event["In msg nelems"] for event in buckets) == 4 * 31 * 30, buckets

observer = ExecutionTraceObserver().register_callback(FILE)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True,
             execution_trace_observer=observer):
    step()
with open(FILE) as trace:
    nodes = [node for node in json.load(trace)["nodes"] if node["name"] == "c10d::allreduce_"]
assert len(nodes) == len(buckets), nodes
assert nodes[0]["inputs"]["values"][1] == dist.group.WORLD.group_name
assert nodes[0]["inputs"]["types"][0] == "GenericList[Tensor(float)]"

dist.destroy_process_group()
print("all is well", flush=True)
