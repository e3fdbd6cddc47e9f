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


class Meeting:
    """Where ranks exchange objects."""

    def __init__(self, size):
        self.size, self.failed = size, False
        self._desks, self._changed = {}, threading.Condition()

    def exchange(self, number, rank, obj):
        """Return what all ranks have brought to the exchange of this number."""
        with self._changed:
            desk = self._desks.setdefault(number, {})
            desk[rank] = copy.deepcopy(obj)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(desk) == self.size or self.failed, _DEADLINE_S)
            if len(desk) < self.size:
                raise Gone
            self._desks.pop(number - 2, None)
            return [copy.deepcopy(desk[one]) for one in range(self.size)]

    def leave(self):
        """Let nobody wait for a rank that has failed."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class Gone(Exception):
    """Another rank has failed."""


class ThreadComm:
    """What checkpoints and stopping need of a Communicator."""

    def __init__(self, rank, meeting):
        self.rank, self.size, self.config = rank, meeting.size, Config(stall_timeout_s=20.0)
        self._meeting, self._number = meeting, 0

    def allgather_object(self, obj):
        self._number += 1
        return self._meeting.exchange(self._number, self.rank, obj)

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
    meeting, results = Meeting(size), {}

    def run(rank):
        try:
            results[rank] = function(ThreadComm(rank, meeting))
        except BaseException as error:
            results[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [results[rank] for rank in range(size) if isinstance(results[rank], BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, Gone)):
        raise error
    return [results[rank] for rank in range(size)]
