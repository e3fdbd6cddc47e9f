"""Tries what gpu_aware.py tries, on host memory in the place of a GPU's, well or badly."""

import os
import signal
import sys
import time

import numpy as np

from mpiring.launch import gpu_aware


class Done:
    def test(self):
        return True


class HostDevice:
    """A device whose memory MPI takes in any case."""

    gpu = property(lambda self: self)

    def __init__(self, how):
        self._how = how

    def allocate(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    pinned = allocate

    def to_device(self, x, out):
        if self._how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._how == "hang":
            time.sleep(600)
        out[...] = x
        return Done()

    def to_host(self, x, out):
        out[...] = x
        if self._how == "wrong":
            out[-1] ^= 1
        return Done()


how, limit_s = sys.argv[1:]
gpu_aware.cuda.device = lambda index: HostDevice(how)
gpu_aware._main("0", limit_s)
