"""Counts the functions of Python that a call runs."""

import os
import sys

from mpiring import Config

# Whether compiled code runs short calls; see test_real_mpi.
HAS_CODE = bool(Config().tuning_folder) and Config().machine_code
_FAKES = os.path.dirname(os.path.abspath(__file__))


def functions_of(call):
    """Return the number of functions that a call runs, but for those of simulated packages."""
    seen = []
    sys.setprofile(lambda frame, event, _: event == "call" and seen.append(frame.f_code))
    call()
    sys.setprofile(None)
    return sum(not code.co_filename.startswith(_FAKES) for code in seen)


def runs_at_most(comm, limit, call):
    """Make a call until all ranks have run it in few functions; return whether they could.

    A rank that waits for another one runs more.
    """
    for _ in range(50):
        fewest = min(functions_of(call) for _ in range(20))
        if all(comm.allgather_object(fewest <= limit)):
            return True
    return False
