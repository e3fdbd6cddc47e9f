"""Reads, writes and draws results; files also describe the machine and the software."""

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import ConfigError, __version__
from ..provisional import files, launch, memory
from .entries import OBJECT, Field, listed, problem_of, text
from .output import Target, opened, refuse_unwritable
from .picture import refuse_undrawable
from .plot import DRAWINGS, Drawing, draw
from .table import Environment, Row

_PACKAGES = ("mpi4py", "numpy", "numba", "torch", "horovod", "ml_dtypes", "cupy-cuda13x",
             "cupy-cuda12x")
_CONTENT = {"benchmark": text(), "environment": OBJECT, "rows": listed(OBJECT)}
_FILE_HELP = "file for {}, or - for standard output"
# Limits of a file of results; its deepest entries are variables and places of ranks.
_MAX_BYTES, _LEVELS = 1 << 28, 8
# Linux scheduling policies by number.
_POLICIES = {0: "SCHED_OTHER", 1: "SCHED_FIFO", 2: "SCHED_RR", 3: "SCHED_BATCH", 5: "SCHED_IDLE"}

# Fields of an environment, and of a row.
Fields = tuple[Mapping[str, Field], Mapping[str, Field]]


def declare_files(parser: argparse.ArgumentParser, content: str) -> None:
    """Declare the options for output files, whose content the help texts tell."""
    declare_json(parser, content)
    parser.add_argument("--csv", metavar="FILE", help=_FILE_HELP.format(content))
    parser.add_argument("--plot", metavar="FILE.png",
                        help="file for a picture of the results (needs matplotlib)")


def declare_json(parser: argparse.ArgumentParser, content: str) -> None:
    """Declare the option for a file of JSON; see `declare_files`."""
    parser.add_argument("--json", metavar="FILE", help=_FILE_HELP.format(content))


def check_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything is measured.

    Raises:
        ConfigError: A folder is missing or read-only, the format of the picture is unknown, or two
            files are the same.
        MissingDependencyError: The picture needs matplotlib, which is not installed.
    """
    paths = [path for path in (options.json, options.csv, options.plot) if path]
    for path in paths:
        refuse_unwritable(path)
        if paths.count(path) > 1:
            raise ConfigError(f"{path}: one file cannot take both; give two names")
    if options.plot:
        refuse_undrawable(options.plot)


def write_files(name: str, about: Environment, rows: Sequence[Row], options: argparse.Namespace,
                drawings: Mapping[str, Drawing] = DRAWINGS) -> None:
    """Write the files that the options ask for."""
    if options.json:
        write_json(options.json, name, about, rows)
    if options.csv:
        write_csv(options.csv, about, rows)
    if options.plot:
        draw(options.plot, name, about, rows, drawings)


def now() -> str:
    """Return the date and the time, with the time zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def command() -> str:
    """Return the command line of this process, without the folder of the script `mpiring`."""
    first, *words = sys.orig_argv[1:] or [""]
    if Path(first).name == "mpiring":
        return shlex.join(["mpiring", *words])
    return shlex.join(["python", *sys.orig_argv[1:]])


def machine() -> Environment:
    """Return the part of the environment that does not need MPI."""
    versions = {name: _version(name) for name in _PACKAGES}
    lab = launch.lab_options()
    return {
        "date": now(),
        "command": command(),
        **({} if lab is None else {"lab": lab}),
        "mpiring": __version__,
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "scheduling": _scheduling(),
        "variables": launch.relevant_variables(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """Return the processor's name (Linux), or its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _scheduling() -> str | None:
    """Return the scheduling policy of this process, with its priority or niceness (Linux)."""
    if not hasattr(os, "sched_getscheduler"):
        return None
    priority = os.sched_getparam(0).sched_priority
    name = _POLICIES.get(os.sched_getscheduler(0), "unknown")
    return f"{name} {priority}" if priority else f"{name}, nice {os.nice(0)}"


def write_json(path: Target, benchmark: str, about: Environment, rows: Sequence[Row]) -> None:
    """Write rows and environment; NaN is written as null."""
    content = {"benchmark": benchmark, "environment": about,
               "rows": [memory.mapped(row, _finite) for row in rows]}
    with opened(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def read_json(path: str, fields: Mapping[str, Fields] | None = None,
              ) -> tuple[str, Environment, list[Row]]:
    """Return the benchmark, the environment and the rows in a file from `write_json`.

    The path may be "-" for standard input. The `fields` are those that the environment and each row
    must have, by benchmark; None accepts any benchmark and any fields.

    Raises:
        ConfigError: The file cannot be read, or is not from `write_json` for these benchmarks.
    """
    try:
        content = files.parsed(_input().encode() if path == "-"
                               else files.read(Path(path), _MAX_BYTES), _LEVELS)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path}: no file that --json has written ({exc})") from exc
    _refuse(path, "", content, _CONTENT)
    benchmark, about = content["benchmark"], content["environment"]
    if fields is not None and benchmark not in fields:
        raise ConfigError(f"{path}: it has results of {benchmark!r:.80}: expected those of "
                          f"{', '.join(fields)}")
    rows = memory.mapped(content["rows"], lambda x: float("nan") if x is None else x)
    about_fields, row_fields = ({}, {}) if fields is None else fields[benchmark]
    _refuse(path, "environment: ", about, about_fields)
    for number, row in enumerate(rows, 1):
        _refuse(path, f"row {number}: ", row, row_fields)
    return benchmark, about, rows


def _input() -> str:
    """Return what standard input has; "" if it is closed."""
    return "" if sys.stdin is None else sys.stdin.read(_MAX_BYTES)


def _refuse(path: str, place: str, entry: Any, fields: Mapping[str, Field]) -> None:
    """Raise ConfigError if an entry of a file lacks a field, or a field has another value."""
    if problem := problem_of(entry, fields):
        raise ConfigError(f"{path}: no file that --json has written, or it was edited: {place}"
                          f"{problem}")


def draw_json(path: str, picture: str, drawings: Mapping[str, Drawing] = DRAWINGS) -> None:
    """Write a picture of a file from `write_json`; raise the errors of `read_json` and `draw`."""
    draw(picture, *read_json(path, {name: (drawing.about, drawing.fields)
                                    for name, drawing in drawings.items()}), drawings)


def write_csv(path: Target, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the environment as lines that begin with #, then the rows below a header."""
    with opened(path) as file:
        for key, value in about.items():
            text = value if isinstance(value, str) else json.dumps(value)
            file.write(f"# {key}: {text}\n")
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows({key: "" if _finite(value) is None else value
                          for key, value in row.items()} for row in rows)


def _finite(value: Any) -> Any:
    """Replace NaN, which JSON lacks, with None."""
    return None if isinstance(value, float) and value != value else value
