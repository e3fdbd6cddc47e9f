"""Runs a program on a simulated GPU: python on_simulated_gpu.py PROGRAM ARGUMENTS."""

import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import simulated_gpu  # noqa: E402

del sys.argv[0]
with pytest.MonkeyPatch.context() as patches:
    simulated_gpu.installed(patches)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
