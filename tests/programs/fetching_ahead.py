"""Runs a program whose batches prefetch's thread copies ahead, although they stay on the CPU.

python fetching_ahead.py PROGRAM ARGUMENTS

With a time limit, steps take so long that it comes in the midst of them on any machine.
"""

import runpy
import sys
import time

import torch

from mpiring import data
from mpiring.resilience import Stopping


class Copied:
    """Takes the part of the GPU."""

    def send(self, xs):
        copies = [x.clone() for x in xs]
        return lambda: copies


def slowly(self, now=Stopping.now):
    time.sleep(0.03)
    return now(self)


if "--time-limit" in sys.argv:
    Stopping.now = slowly
data._kind_of = lambda leaf: Copied if isinstance(leaf, torch.Tensor) else None
data._carrier = lambda kind, index: kind()
data._index_of = lambda device: 0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
