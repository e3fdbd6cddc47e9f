"""The command `python -m mpiring`; works without any MPI library."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .tools import output

_DESCRIPTION = """\
Data-parallel training on plain MPI. Write a training script, see README.md, and start it with
`mpirun -n 8 python train.py` or `srun python train.py`."""
# Each command is a folder in tools, whose command.py declares it, and a row.
_COMMANDS = {
    "lab": "a cluster in one machine, with slow links",
    "tune": "measure which algorithm is the fastest here",
    "doctor": "say what is wrong with a launch or a machine, and how to mend it",
    "bench": "measure mpiring beside MPI, Gloo, Horovod",
    "simulate": "predict allreduces on a cluster that is not here",
    "checkpoint": "make one file of a checkpoint that lies in slices",
    "trace": "look at what the ranks of a job did",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        arguments: The words after `python -m mpiring`; by default the process's own.
    """
    return output.run(lambda: parse(sys.argv[1:] if arguments is None else arguments))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `action` does what it says."""
    parser = argparse.ArgumentParser(prog="python -m mpiring", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"mpiring {__version__}")

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(action=show_help)
    commands = parser.add_subparsers(title="commands")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        # The others are not imported: doctor has to run on machines where they cannot be.
        if name in words:
            importlib.import_module(f".tools.{name}.command", __package__).declare(command)
    # Without a launcher, a benchmark starts itself again under mpiexec.
    return parser.parse_args(words, argparse.Namespace(words=["-m", "mpiring", *words]))


if __name__ == "__main__":
    sys.exit(main())
