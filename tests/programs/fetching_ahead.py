"""Runs a program whose batches prefetch's thread copies ahead, although they stay on the CPU.

python fetching_ahead.py PROGRAM ARGUMENTS
"""

import runpy
import sys

import torch

from mpiring import data


class Copied:
    """Takes the part of the GPU."""

    def send(self, xs):
        copies = [x.clone() for x in xs]
        return lambda: copies


data._kind_of = lambda leaf: Copied if isinstance(leaf, torch.Tensor) else None
data._carrier = lambda kind, index: kind()
data._index_of = lambda device: 0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
