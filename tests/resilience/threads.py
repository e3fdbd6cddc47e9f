"""Runs a function on several ranks, each a thread of this process, without MPI."""

import copy
import threading

import numpy as np

from mpiring import Config

_DEADLINE_S = 30


def state(step, rank=None):
    """Return a state that tells of which step, and whose, it is."""
    x = np.arange(100.0) + step
    return {"x": x} if rank is None else {"rank": rank, "x": x + 1000 * rank}


class ThreadComm:
    """What checkpoints and stopping need of a Communicator."""

    def __init__(self, rank, size, meeting, desk):
        self.rank, self.size, self.config = rank, size, Config(stall_timeout_s=20.0)
        self._meeting, self._desk = meeting, desk

    def allgather_object(self, obj):
        self._desk[self.rank] = copy.deepcopy(obj)
        self._meeting.wait()
        found = copy.deepcopy(self._desk[:self.size])
        self._meeting.wait()
        return found

    def broadcast_object(self, obj, *, root=0):
        return self.allgather_object(obj)[root]

    def broadcast(self, x, *, root=0):
        x[...] = self.allgather_object(x)[root]
        return x

    def iallreduce(self, x, *, op):
        assert op == "max"
        return Answer(np.max(self.allgather_object(x), axis=0))


class Answer:
    """A handle."""

    def __init__(self, value):
        self._value = value

    def wait(self):
        return self._value


def on_ranks(size, function):
    """Return what `function(comm)` returns on each rank; raise what the first one raises."""
    meeting, desk, results = threading.Barrier(size, timeout=_DEADLINE_S), [None] * size, {}

    def run(rank):
        try:
            results[rank] = function(ThreadComm(rank, size, meeting, desk))
        except BaseException as error:
            results[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in results.values() if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(size)]
