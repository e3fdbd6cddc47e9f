"""Runs a training program; a job's first attempt becomes slow, so that tests can come in between.

python slow_attempt.py SECONDS_PER_STEP PROGRAM.py [ARGUMENTS]
"""

import os
import runpy
import sys
import time

import pytest

from mpiring.resilience import Stopping

FAST_STEPS = 20
step_s, step = float(sys.argv[1]), 0


def slowly(self, now=Stopping.now):
    global step
    step += 1
    time.sleep(step_s if step > FAST_STEPS else 0)
    return now(self)


sys.argv = sys.argv[2:]
# Another program may follow in this process.
with pytest.MonkeyPatch.context() as patches:
    if "SLURM_RESTART_COUNT" not in os.environ:
        patches.setattr(Stopping, "now", slowly)
    runpy.run_path(sys.argv[0], run_name="__main__")
