"""The command `python -m mpiring checkpoint`; works without any MPI library."""

import argparse
from pathlib import Path

from ...memory.pytrees import leaves
from ...sharding.sliced import Sliced
from ...resilience.consolidated import consolidate
from ...text import count

_DESCRIPTION = """\
Looks after checkpoints, without the job that has written them. `consolidate` makes one file of the
newest complete checkpoint, with whole arrays instead of the slices of its ranks:

    python -m mpiring checkpoint consolidate FOLDER OUT.safetensors

mpiring.resilience.load_file and mpiring.torch.load_file return the state that was saved; the
package safetensors reads the arrays by name."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `checkpoint consolidate`."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("consolidate", help="make one file, with whole arrays")
    command.add_argument("folder", metavar="FOLDER", type=Path, help="of checkpoints")
    command.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    command.add_argument("--step", type=int, metavar="N",
                         help="which checkpoint; default: the newest that is complete")
    command.set_defaults(action=_consolidate)


def _consolidate(options: argparse.Namespace) -> int:
    saved = consolidate(options.folder, options.out, options.step)
    joined = sum(isinstance(leaf, Sliced) for _, leaf in leaves(saved.sharded))
    print(f"{options.out}: step {saved.step}, {count(joined, 'tensor')} of the slices of "
          f"{count(saved.size, 'rank')}")
    return 0
