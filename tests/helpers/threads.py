"""Runs a function on several ranks, each a thread of this process, without MPI."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from mpiring import BufferMismatchError, Communicator, Config
from mpiring.gpu import vectors
from mpiring.gpu.arrays import vector_of
from mpiring.gpu.interface import DeviceVector, await_event
from mpiring.memory.reduction import reduction
from mpiring.record.flight import Flight
from mpiring.record.recorder import Recorder

_DEADLINE_S = 30


class Meeting:
    """Where ranks exchange objects."""

    def __init__(self, size):
        self.size, self.failed = size, False
        self._desks, self._changed = {}, threading.Condition()

    def exchange(self, number, rank, obj):
        """Return the objects that all ranks have passed to the exchange with this number."""
        with self._changed:
            desk = self._desks.setdefault(number, {})
            desk[rank] = copy.deepcopy(obj)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(desk) == self.size or self.failed, _DEADLINE_S)
            if len(desk) < self.size:
                raise Gone
            self._desks.pop(number - 2, None)
            return [copy.deepcopy(desk[sender]) for sender in range(self.size)]

    def leave(self):
        """Release all ranks that wait for this rank, which has failed."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class Gone(Exception):
    """Another rank has failed."""


class ThreadComm:
    """The parts of a Communicator that checkpoints and stopping need."""

    def __init__(self, rank, meeting):
        self.rank, self.size, self.config = rank, meeting.size, Config(stall_timeout_s=20.0)
        self._meeting, self._number = meeting, 0

    def allgather_object(self, obj, *, label=None):
        self._number += 1
        return self._meeting.exchange(self._number, self.rank, obj)

    def broadcast_object(self, obj, *, root=0):
        return self.allgather_object(obj)[root]

    def broadcast(self, x, *, root=0):
        x[...] = self.allgather_object(x)[root]
        return x

    def iallreduce(self, x, *, op):
        assert op == "max"
        answer = np.max(self.allgather_object(x), axis=0)
        return SimpleNamespace(wait=lambda: answer)


class TrainingComm(ThreadComm):
    """The parts of a Communicator that training needs; operations are complete once submitted."""

    threaded, _models, next_model = True, 0, Communicator.next_model

    def __init__(self, rank, meeting):
        super().__init__(rank, meeting)
        self.memory_groups = [tuple(range(self.size))]
        self.recorder = Recorder(rank)
        self.tunable = SimpleNamespace(reducers=set())

    def empty(self, n, dtype, *, device):
        if device == "cpu":
            return np.empty(n, dtype)
        return device.gpu.array(vectors.empty(n, dtype, device), (n,))

    def prepare(self):
        pass

    poke = prepare

    def broadcast(self, x, *, root=0):
        vector = vector_of(x)
        if isinstance(vector, DeviceVector) and vector.ready is not None:
            await_event(vector.ready)
        _write(vector, self.allgather_object(vectors.on_host(vector))[root])

    def allreduce(self, x, *, op="sum"):
        _run(_Collectives(self).allreduce(x.reshape(-1), op=op))
        return x

    def own_device(self, device):
        return device

    def submit(self, call, build, *, device=None, ready=(), stream=None):
        calls = self.allgather_object(str(call))
        for rank, text in enumerate(calls):
            if text != calls[0]:
                raise BufferMismatchError(
                    f"rank {rank} called {text}, but rank 0 called {calls[0]}")
        for event in ready:
            await_event(event)
        _run(build(_Collectives(self)))
        if device is not None:
            await_event(device.event())
        return SimpleNamespace(wait=lambda: None, flight=Flight(call, 0),
                               tells_finite=False)

    def prepared(self, call, pattern=None, build=None, *, device=None, ready=tuple,
                 stream=None, is_agreed=False):
        def start(x, result, call=call):
            return self.submit(call, build or functools.partial(pattern.schedule, x),
                               device=device, ready=ready())

        return SimpleNamespace(call=call, start=start,
                               run=lambda x, call, costs=None: start(x, None, call))

    def run(self, call, build):
        results = []

        def schedule(collectives):
            results.append((yield from build(collectives)))

        self.submit(call, schedule)
        return results[0]


def _run(schedule):
    for _ in schedule:
        pass


class _Collectives:
    """Operations that are schedules without messages."""

    def __init__(self, comm):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm

    def barrier(self):
        yield self._comm.allgather_object(None)

    def allreduce(self, x, op="sum", algorithm="auto"):
        rows = self._comm.allgather_object(vectors.on_host(x))
        combined = rows[0].copy()
        reduction("mean" if op == "mean" else op, x.dtype, len(rows)).combine(rows, combined)
        _write(x, combined)
        yield

    def reduce_scatter(self, x, op, bounds):
        here, total = slice(*bounds[self.rank:self.rank + 2]), vectors.on_host(x)
        yield from self.allreduce(total, op)
        # The slices of other ranks contain junk.
        total[:here.start] = total[here.stop:] = 99
        _write(x, total)

    def allgather_bytes(self, data):
        yield
        return self._comm.allgather_object(data)

    def allgather(self, x, bounds):
        for rank, row in enumerate(self._comm.allgather_object(vectors.on_host(x))):
            here = slice(bounds[rank], bounds[rank + 1])
            _write(x[here], row[here])
        yield


def _write(x, host):
    vectors.copy_to(x, vectors.moved(host, x.device) if isinstance(x, DeviceVector) else host)


def on_ranks(size, function, kind=ThreadComm):
    """Return what `function(comm)` returns on each rank; raise the first error."""
    meeting, results = Meeting(size), {}

    def run(rank):
        try:
            results[rank] = function(kind(rank, meeting))
        except BaseException as error:
            results[rank] = error
            meeting.leave()

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    errors = [results[rank] for rank in range(size) if isinstance(results[rank], BaseException)]
    for error in sorted(errors, key=lambda raised: isinstance(raised, Gone)):
        raise error
    return [results[rank] for rank in range(size)]
