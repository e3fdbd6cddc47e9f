"""Is the command `python -m mpiring`; works without any MPI library."""

import argparse
from collections.abc import Sequence

from . import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says.

    Args:
        arguments: The words after `python -m mpiring`; by default the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mpiring",
        description="Data-parallel training on plain MPI. Write a training script, see README.md, "
                    "and start it with `mpirun -n 8 python train.py` or `srun python train.py`.")
    parser.add_argument("--version", action="version", version=f"mpiring {__version__}")
    parser.parse_args(arguments)
    parser.print_help()


if __name__ == "__main__":
    main()
