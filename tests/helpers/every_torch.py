"""Runs the tests of the PyTorch adapters under several versions, in separate environments.

    python tests/helpers/every_torch.py           # the oldest, the one of CI, and the newest
    python tests/helpers/every_torch.py newest    # one of them

It prints a table. The versions are the oldest that setup.cfg allows, 2.13.0, and the newest that
pip finds. PyPI has CUDA builds only. They are installed with all that they depend on, 3 GB to
download and 5 GB on disk each. Tried instead: without the dependencies that the CPU never uses.
But libtorch_cuda.so, which `import torch` loads, links to all of CUDA except cuSOLVER and Triton,
and replacements for these libraries would not be the PyTorch that users install.
"""

import argparse
import re
import sys

import environments
from environments import IN_ONE_JOB, PYTEST
from launching import ROOT

OLDEST = re.search(r"torch>=([\d.]+)", " ".join(environments.requirements("torch")))[1]
VERSIONS = {"oldest": f"torch=={OLDEST}.*", "ci": "torch==2.13.0", "newest": "torch"}
VERSION = "import torch; print(torch.__version__)"
# The back end, DataParallel, and FSDP2; Horovod's names; the optimizers that Sharded is held to.
STARTING_JOBS = ("tests/torch", "tests/horovod", "tests/optim/test_torch.py",
                 "tests/memory/test_tensors.py")
# Sharded, local and asynchronous training.
ON_RANKS = sorted((ROOT / "tests" / "mpi").glob("test_torch_*.py"))


def tested(name, folder):
    """Run the tests under one version; return its row of the table, and whether all passed."""
    python = environments.make(folder, VERSIONS[name], *environments.requirements("mpich"))
    return environments.tested(name, python, VERSION, [
        [python, *PYTEST, *STARTING_JOBS],
        [python.with_name("mpiexec"), "-n", "2", python, *IN_ONE_JOB, *ON_RANKS]])


def main():
    """Make the environments, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*VERSIONS, []], metavar="VERSION",
                        help=f"one of {', '.join(VERSIONS)} (default: each)")
    return environments.tested_each(
        "PyTorch", parser.parse_args().names or [*VERSIONS], tested)


if __name__ == "__main__":
    sys.exit(main())
