"""Runs a training program, in a job's first attempt slowly: tests can come in between.

python slow_attempt.py SECONDS_PER_STEP PROGRAM.py [ARGUMENTS]
"""

import os
import runpy
import sys
import time

from mpiring.resilience import Stopping

step_s = float(sys.argv[1])


def slowly(self, now=Stopping.now):
    time.sleep(step_s)
    return now(self)


if "SLURM_RESTART_COUNT" not in os.environ:
    Stopping.now = slowly
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
