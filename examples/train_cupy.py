"""Trains the digits network of train_numpy.py on GPUs, with CuPy: the same lines of code.

mpirun -n 4 python examples/train_cupy.py       # a node's GPUs are assigned in turn
mpirun -n 4 python examples/train_cupy.py --dtype float16 --checkpoint run1
"""

import runpy
import sys
from pathlib import Path

sys.argv[1:1] = ["--device", "cuda"]
runpy.run_path(str(Path(__file__).with_name("train_numpy.py")), run_name="__main__")
