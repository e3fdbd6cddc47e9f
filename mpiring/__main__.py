"""The command `mpiring`, also `python -m mpiring`; works without any MPI library."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .tools import output
from .tools.arguments import Parser

_SCRIPT = "mpiring"
_DESCRIPTION = """\
Data-parallel training on plain MPI. Write a training script, see README.md, and start it with
`mpirun -n 8 python train.py` or `srun python train.py`."""
# Each command has a row here, and a folder in tools whose command.py declares it. They are in the
# order in which a user needs them.
_COMMANDS = {
    "doctor": "find what is wrong with a launch or a machine, and how to fix it",
    "checkpoint": "list, show, verify and consolidate checkpoints",
    "trace": "show how the ranks of a job spent their time",
    "tune": "measure which algorithm is the fastest on these ranks",
    "simulate": "predict allreduces and training steps on other clusters",
    "bench": "compare mpiring with MPI, Gloo and Horovod",
    "lab": "simulate a cluster with slow links on one machine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        arguments: Words after the command's name; by default those of this process.
    """
    return output.run(lambda: parse(sys.argv[1:] if arguments is None else arguments))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; their `action` runs the command."""
    is_script = Path(sys.argv[0]).name == _SCRIPT
    parser = Parser(prog=_SCRIPT if is_script else "python -m mpiring", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"mpiring {__version__}")

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(action=show_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        # Other commands are not imported: doctor must run on machines where their imports fail.
        if name in words:
            importlib.import_module(f".tools.{name}.command", __package__).declare(command)
    # Without a launcher, a benchmark starts itself again under mpiexec.
    return parser.parse_args(words, argparse.Namespace(words=["-m", "mpiring", *words]))


if __name__ == "__main__":
    sys.exit(main())
