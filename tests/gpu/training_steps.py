"""Measures training steps of a transformer on a GPU, and what the host does during one step.

    mpiexec -n 2 python tests/gpu/training_steps.py --json steps.json --trace step.json.gz
    mpiexec -n 2 python tests/gpu/training_steps.py --graph --json graph.json

With `--graph`, it tries once to capture a step with queued operations in a CUDA graph. Without a
GPU, `--device cpu` runs the same program.
"""

import argparse
import functools
import gc
import gzip
import json
import os
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import mpiring
from mpiring.tools.bench.torch_training import RECIPES, batch_of, loss, model_of, width_for
from mpiring.torch import DataParallel, device_for, share_cores

WARM_UP, STEPS, BATCH = 4, 14, 64
ALONE, OURS, DDP = "compute only", "DataParallel", "DDP over the back end"
# Calls by which a host waits for a GPU, or polls it. In a profile, the runtime's begin with `cuda`,
# and the driver's with `cu`.
WAITS = ("EventQuery", "EventSynchronize", "StreamQuery", "StreamSynchronize", "DeviceSynchronize",
         "CtxSynchronize")


def host_waits(trace):
    """Return how often each call waits or polls in a profile of one step; None without CUDA calls.

    Only calls between the first gradient and the end of the optimizer's step count, on all threads.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    began = min(event["ts"] for event in events
                if event["name"] == "torch::autograd::AccumulateGrad")
    ended = max(event["ts"] + event["dur"] for event in events
                if event["name"].startswith("Optimizer.step"))
    calls = [event["name"] for event in events if began <= event["ts"] < ended
             and event.get("cat") in ("cuda_runtime", "cuda_driver")]
    waits = (name for name in calls if name.partition("_")[0].endswith(WAITS))
    return dict(Counter(waits)) if calls else None


def wrapped(method, module, comm):
    """Return the model to call."""
    if method == OURS:
        return DataParallel(module, comm)
    if method == DDP:
        return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return module


class Steps:
    """Training steps by one method."""

    def __init__(self, comm, options, method, **settings):
        self.comm, self._device = comm, device(comm, options)
        width = width_for("transformer", options.parameters)
        self.module = model_of("transformer", width).to(self._device)
        self.model = wrapped(method, self.module, comm)
        self.batch = [part.to(self._device) for part in
                      batch_of("transformer", options.batch, 1 + comm.rank)]
        self._optimizer = RECIPES["adamw"](self.module.parameters(), **settings)
        self._autocast = functools.partial(
            torch.autocast, self._device.type, torch.bfloat16, enabled=options.bf16)

    def step(self):
        """Take one step."""
        self._optimizer.zero_grad()
        with self._autocast():
            value = loss(self.model, *self.batch)
        value.backward()
        self._optimizer.step()

    def finish(self):
        """Wait for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self):
        """Return the time of one step on this rank, which begins with all ranks."""
        self.finish()
        self.comm.barrier()
        began = time.perf_counter()
        self.step()
        self.finish()
        return time.perf_counter() - began

    def median_ms(self):
        """Return the median of some steps, of the slower rank."""
        for _ in range(WARM_UP):
            self.step()
        median = torch.tensor([statistics.median(self.seconds() for _ in range(STEPS))])
        return 1e3 * float(self.comm.allreduce(median, op="max"))

    def waits(self, path):
        """Return `host_waits` of one step, whose profile rank 0 writes to a file."""
        # The profiler's own start takes long in its first step.
        for _ in range(2):
            self.comm.barrier()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                self.step()
                self.finish()
        if self.comm.rank:
            return None
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            return host_waits(json.load(file))


def device(comm, options):
    """Return the device of the options."""
    return device_for(comm) if options.device == "cuda" else torch.device(options.device)


def measure(comm, options, write):
    """Measure all methods; after each, rank 0 writes the rows so far."""
    rows = []
    for method in options.methods.split(","):
        steps = Steps(comm, options, method)
        row = {"method": method, "precision": "bf16" if options.bf16 else "fp32",
               "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
               "median_ms": steps.median_ms()}
        rows.append(row)
        row["over_compute"] = row["median_ms"] / rows[0]["median_ms"]
        write(rows)
        if method == OURS and options.trace:
            row["host_waits"] = steps.waits(options.trace)
            write(rows)
        # Frees the model before the next one is created.
        del steps
        gc.collect()


def capture(comm, options, write):
    """Try to capture a step in a CUDA graph; the row says whether it did, and replays right."""
    row = {"graph": "not captured"}
    try:
        steps = Steps(comm, options, OURS, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                steps.step()
        torch.cuda.current_stream().wait_stream(side)
        steps.finish()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            steps.step()
        row["graph"] = "captured"
        write([row])
        for _ in range(WARM_UP):
            comm.barrier()
            graph.replay()
            steps.finish()
        weights = float(sum(part.double().sum() for part in steps.module.parameters()))
        row["ranks_agree"] = len(set(comm.allgather_object(weights))) == 1
    except Exception as error:
        row["error"] = repr(error)
    write([row])
    # A stream whose capture failed cannot be used again, and other ranks may wait for this one.
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--trace", type=Path, metavar="FILE.json.gz")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default=",".join((ALONE, OURS, DDP)))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--connections", help="value of CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--batch", type=int, default=BATCH)
    options = parser.parse_args()
    if options.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = options.connections
    warnings.simplefilter("ignore")

    def write(rows):
        if comm.rank == 0:
            print(rows[-1], flush=True)
            if options.json:
                options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    with mpiring.init() as comm:
        share_cores(comm)
        if options.graph:
            capture(comm, options, write)
        dist.init_process_group("mpiring", init_method="mpi://")
        measure(comm, options, write)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
