"""Gives the last rank a longer parameter than the others."""

import numpy as np

import mpiring
from mpiring.numpy import DataParallel

comm = mpiring.init()
odd = comm.rank == comm.size - 1
DataParallel({"w1": np.ones((3, 3), "float32"), "b1": np.ones(3 + odd, "float32")}, comm)
