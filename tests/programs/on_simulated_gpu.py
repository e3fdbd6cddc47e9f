"""Runs a program on a simulated GPU: python on_simulated_gpu.py PROGRAM ARGUMENTS.

If MPIRING_NCCL is set, the GPU has a library like NCCL.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import fake_nccl  # noqa: E402
import simulated_gpu  # noqa: E402

del sys.argv[0]
# They stay until the process ends, because the GPU may still work while the program ends.
patches = pytest.MonkeyPatch()
device = simulated_gpu.installed(patches)
if "MPIRING_NCCL" in os.environ:
    fake_nccl.installed(patches, device.gpu)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
