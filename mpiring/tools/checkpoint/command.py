"""The command `mpiring checkpoint`; works without any MPI library."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import CheckpointError, __version__
from ...provisional import checkpoints, count
from .. import table
from ..arguments import not_negative
from ..output import refuse_unwritable
from ..results import command, declare_json, now, write_json
from ..table import Column

_DESCRIPTION = """\
Shows and checks checkpoints, without the job that has written them:

    mpiring checkpoint list FOLDER
    mpiring checkpoint show FOLDER
    mpiring checkpoint verify FOLDER
    mpiring checkpoint consolidate FOLDER OUT.safetensors

`consolidate` writes the newest complete checkpoint to one file, with complete arrays instead of the
slices of each rank. mpiring.resilience.load_file and mpiring.torch.load_file return the saved state
from this file; the package safetensors reads its arrays by name."""
_CHECKPOINTS = (Column("name", -16, title="checkpoint"), Column("step", 8),
                Column("written", -25), Column("ranks", 5), Column("megabytes", 9, 3, "MB"),
                Column("state", -1))
_WIDEST = 60


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the commands and their options."""
    parser.description = _DESCRIPTION
    commands = parser.add_subparsers(required=True)

    def add(name: str, action: Any, text: str, folder: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        added.add_argument("folder", metavar="FOLDER", type=Path, help=folder)
        added.set_defaults(action=action)
        return added

    def add_step(added: argparse.ArgumentParser, default: str) -> None:
        added.add_argument("--step", type=not_negative, metavar="N",
                           help=f"training step of the checkpoint; default: {default}")

    folder = "folder of checkpoints"
    declare_json(add("list", _list, "list the checkpoints in a folder", folder), "the list")
    add_step(add("show", _show, "show the arrays in a checkpoint, or in a file from consolidate",
                 f"{folder}, or file from consolidate"), "the newest that is complete")
    add_step(add("verify", _verify, "compare files with their hashes; status 1 if one is damaged",
                 f"{folder}, or file from consolidate"), "all checkpoints")
    joined = add("consolidate", _consolidate, "write one file with complete arrays", folder)
    joined.add_argument("out", metavar="OUT", type=Path, help="file to write")
    add_step(joined, "the newest that is complete")


def _list(options: argparse.Namespace) -> int:
    if options.json:
        refuse_unwritable(options.json)
    listed = checkpoints.checkpoints(options.folder)
    rows = [{"name": each.path.name, "step": each.step, "written": each.manifest.get("written"),
             "ranks": each.manifest.get("size"), "bytes": each.nbytes if each.manifest else None,
             "state": each.state} for each in listed]
    table.show(({**row, "state": each.state.partition(":")[0],
                 "megabytes": each.nbytes / 1e6 if each.manifest else None}
                for row, each in zip(rows, listed)), _CHECKPOINTS)
    if options.json:
        about = {"date": now(), "command": command(), "mpiring": __version__,
                 "folder": str(options.folder)}
        write_json(options.json, "checkpoints", about, rows)
    if any(each.is_damaged for each in listed):
        print(f"\nmpiring checkpoint verify {options.folder} names what is damaged")
    return 0


def _show(options: argparse.Namespace) -> int:
    if options.folder.is_file():
        _print_arrays([("", *array) for array in checkpoints.arrays_in(options.folder)])
        return 0
    checkpoint = checkpoints.chosen(options.folder, options.step)
    facts = checkpoint.manifest
    print(f"{checkpoint.path.name}: step {facts['step']}, saved by {count(facts['size'], 'rank')}, "
          f"{facts['written']}; {_size(checkpoint)}\n"
          + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()) + "\n")
    _print_arrays(list(checkpoints.arrays_of(checkpoint)))
    if facts["size"] > 1:
        print("\nreplicated: equal on all ranks; sharded: complete arrays, saved in slices by the "
              "ranks;\nown: arrays of rank 0, as an example of all ranks")
    return 0


def _size(checkpoint: checkpoints.Checkpoint) -> str:
    """Return the number and the total length of the files."""
    files = count(len(checkpoint.manifest["files"]), "file")
    return f"{files}, {table.significant(checkpoint.nbytes / 1e6, 3)} MB"


def _print_arrays(arrays: Iterable[tuple[str, str, checkpoints.Stored, int]]) -> None:
    rows = [{"state": state, "array": name, "dtype": leaf.dtype, "bytes": f"{nbytes:,}",
             "shape": " x ".join(map(str, leaf.shape)) or "scalar"}
            for state, name, leaf, nbytes in arrays]
    columns = [Column(key, sign * min(_WIDEST, max([len(key), *(len(row[key]) for row in rows)])))
               for key, sign in (("state", -1), ("array", -1), ("dtype", -1), ("shape", 1),
                                 ("bytes", 1))]
    # A file from consolidate has a single state, without a name.
    columns = columns if any(row["state"] for row in rows) else columns[1:]
    table.show(rows, columns)


def _verify(options: argparse.Namespace) -> int:
    """Print a line for each checkpoint and each damaged file; return 1 if a file is damaged."""
    if options.folder.is_file():
        return _verify_file(options.folder)
    matching = [each for each in checkpoints.checkpoints(options.folder) if each.step is not None
                and options.step in (None, each.step)]
    if not matching:
        checkpoints.chosen(options.folder, options.step)
    is_damaged = False
    for each in matching:
        problems = (list(checkpoints.damaged_files(each)) if each.manifest
                    else [each.state.partition(": ")[2]])
        is_damaged |= bool(problems)
        for problem in problems:
            print(f"{each.path.name}: DAMAGED: {problem}", flush=True)
        if not problems:
            print(f"{each.path.name}: {_size(each)}; all hashes are right; {each.state}",
                  flush=True)
    return int(is_damaged)


def _verify_file(file: Path) -> int:
    try:
        number = sum(1 for _ in checkpoints.arrays_in(file))
    except CheckpointError as error:
        print(f"{file}: DAMAGED: {error}")
        return 1
    print(f"{file}: {count(number, 'array')} in the right places; such a file has no hash")
    return 0


def _consolidate(options: argparse.Namespace) -> int:
    saved, joined = checkpoints.consolidated(options.folder, options.out, options.step)
    print(f"{options.out}: step {saved.step}, {count(joined, 'tensor')} of the slices of "
          f"{count(saved.size, 'rank')}")
    return 0
