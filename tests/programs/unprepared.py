"""Sums arrays, without `prepare`, until both ranks use compiled code; run by mpirun."""

import threading
import time
from pathlib import Path

import numpy as np

import mpiring
from mpiring.engine import background

# Calls after which a process compiles.
ENOUGH = 2 * background._OPERATIONS
# With the lowest priority, beside other tests, the process that compiles would take minutes.
assert "os.nice(19)" in background._PROGRAM
background._PROGRAM = background._PROGRAM.replace("os.nice(19)", "os.nice(0)")

comm = mpiring.init()
arrays = [comm.empty(1 << 18, np.float32), np.empty(1 << 18, np.float32), np.empty(8, np.float32)]
answer = np.empty(1, np.int8)


def are_compiled():
    """Return whether the next sums of all arrays will be compiled, after making them."""
    for number, x in enumerate(arrays):
        x[:] = comm.rank + number
        comm.allreduce(x)
        assert (x == 1 + 2 * number).all(), (number, x)
    # Equal arrays have equal calls, in windows and elsewhere.
    calls = [call for call in comm._group.fast_calls.prepared if call.pattern.op == "sum"]
    assert len(calls) == len({array.shape for array in arrays})
    return all(call._by_slices or call.node_call and call.node_call.code for call in calls)


while True:
    answer[0] = are_compiled()
    comm.allreduce(answer, op="min")
    if answer[0]:
        break
    # Then, leave the processors to it. Only the test's limit ends this: on a busy machine, it may
    # get a tenth of a core.
    calls = comm._group.sharing.counter.sequence
    time.sleep(0.005 if calls < ENOUGH else 0.5)
comm.close()
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
children = [task.joinpath("children").read_text() for task in Path("/proc/self/task").iterdir()]
assert not "".join(children).strip(), children
print(f"rank {comm.rank}: compiled")
