"""Runs a program whose time limit, if it has one, comes in the midst of its steps on any machine.

python slow_steps.py PROGRAM ARGUMENTS
"""

import runpy
import sys
import time

from mpiring.resilience import Stopping


def slowly(self, now=Stopping.now):
    time.sleep(0.03)
    return now(self)


if "--time-limit" in sys.argv:
    Stopping.now = slowly
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
