"""Holds the schedules to the contract on a real GPU: simulated ranks share it, in one process."""

from dataclasses import replace

import contract
import cupy_or_host
import numpy as np
import pytest
from cluster import run

from mpiring.gpu import cuda
from mpiring.gpu.arrays import vector_of
from mpiring.gpu.device import Device
from mpiring.gpu.interface import DeviceVector
from mpiring.gpu.cuda import Cuda, CudaStream
from mpiring.gpu.vectors import copy_to
from mpiring.operations.exports import Exports
from mpiring.operations.on_device import SLOT_BYTES, TUNING, GpuContext, in_context
from mpiring.simulated.network import SimulatedNetwork

NODES = {"one": [0], "one node": [0] * 4, "nodes of 2": [0, 0, 1, 1], "own nodes": [0, 1, 2]}
# The simulated network looks at events this often, in its own time.
_LOOK_S = 1e-5


def _look(network, rank, event):
    """Look at an event again and again, until it is done."""
    network.later(_LOOK_S, rank, lambda: event.test() or _look(network, rank, event))


class _WatchedStream(CudaStream):
    def record(self):
        event = super().record()
        self._cuda.watch(event)
        return event


class _WatchedCuda(Cuda):
    """A GPU at whose events the simulated network looks.

    What ranks export, others open in the same process, where CUDA would refuse it.
    """

    def __init__(self, network, rank):
        self.watch = lambda event: _look(network, rank, event)
        super().__init__(0)
        if not cupy_or_host.REAL:
            # One thread does the work of all ranks when it queues it: no rank may wait.
            self.unqueued = "the host does work at once"

    def stream(self):
        return _WatchedStream(self)

    def export(self, x):
        return (x.address, *range(1, 8))

    def open(self, handle, nbytes, device):
        return DeviceVector(device, handle[0], nbytes, np.dtype(np.uint8))

    def close(self, x):
        pass


def on_gpu(node_of, program, host_bytes=0):
    """Run a program on all ranks; its schedule returns a CuPy array."""
    network = SimulatedNetwork(len(node_of), node_of=node_of)

    def on_rank(collectives):
        device = Device(_WatchedCuda(network, collectives.rank))
        context = GpuContext(device, Exports(collectives.windows),
                             tuning=replace(TUNING, host_bytes=host_bytes))
        array = yield from in_context(collectives, context, [], lambda gpus: program(gpus, device))
        # Not before all is done: CuPy's stream and the device's know nothing of each other.
        return cuda.cupy().asnumpy(array)

    return run(node_of, on_rank, network=network, slot_bytes=SLOT_BYTES)[0]


def put(cupy, device, x):
    """Return a vector of one rank's device, with the memory of a CuPy array, and that array."""
    array = cupy.asarray(x)
    cupy.cuda.get_current_stream().synchronize()
    return replace(vector_of(array), device=device, ready=None), array


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize("layout", NODES)
def test_allreduce(cupy, algorithm, layout):
    p = len(NODES[layout])
    lengths = [0, 1, p + 1, 5000]
    for op in contract.OPS:
        dtypes = [dtype for dtype in contract.OPS_OF[op] if dtype != "longdouble"]
        for number, dtype in enumerate(dtypes):
            # Each meets one length, to save time: the kernels are tested elsewhere.
            n = lengths[(number + p) % len(lengths)]

            def program(collectives, device):
                x, array = put(cupy, device, contract.contribution(collectives.rank, n, dtype))
                yield from collectives.allreduce(x, op=op, algorithm=algorithm)
                return array

            contract.check_all(
                on_gpu(NODES[layout], program, 4000 if algorithm == "auto" else 0), op)


@pytest.mark.parametrize("layout", ["one node", "nodes of 2"])
def test_allreduce_in_memory_that_is_open_to_the_node(cupy, layout):
    for n, op, dtype in [(1, "sum", "float32"), (5000, "mean", "float16"), (129, "max", "int8"),
                         (300_000, "sum", "float32")]:
        def program(collectives, device):
            x, _ = put(cupy, device, contract.contribution(collectives.rank, n, dtype))
            y = yield from collectives.empty((n,), dtype)
            copy_to(y, x)
            yield from collectives.allreduce(y, op=op)
            return y.device.gpu.array(y, (n,))

        contract.check_all(on_gpu(NODES[layout], program), op)


def test_broadcast(cupy):
    def program(collectives, device):
        x, array = put(cupy, device, np.arange(5000) + 10_000 * collectives.rank)
        yield from collectives.broadcast(x, 2)
        return array

    assert all((x == np.arange(5000) + 20_000).all() for x in on_gpu(NODES["one node"], program))
