"""Makes environments that replace some packages of this one, and runs tests in them."""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from pathlib import Path

from launching import ROOT, environment

PYTEST = ("-m", "pytest", "--quiet", "--color=no", "-p", "no:cacheprovider")
IN_ONE_JOB = (*PYTEST, "-p", "pytest_mpi", "--with-mpi", "-m", "mpi")
HANG_S = 3600
TABLE = "{:15} {:34} {:>7} {:>7} {:>7} {:>8}"


def setup_cfg():
    """Return setup.cfg, by section and name."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def requirements(extra):
    """Return the requirements of an extra of setup.cfg; those of mpiring itself for ""."""
    section, name = ("options.extras_require", extra) if extra else ("options", "install_requires")
    return setup_cfg()[section][name].split()


def make(folder, *packages):
    """Make an environment with some packages, and everything else from this environment.

    Args:
        folder: Folder of the environment.
        packages: Requirements, as pip reads them.

    Returns: the path of its Python.
    """
    venv.create(folder)
    python = folder / "bin" / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "others.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if packages:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--prefix",
             folder, *packages], check=True)
    return python


def tested(name, python, version, commands):
    """Run tests in an environment.

    Args:
        name: Name of the environment.
        python: Path of its Python.
        version: Program that prints the version of what is tested.
        commands: Commands that run the tests.

    Returns: the row of the table, and whether all tests passed.
    """
    began, folder = time.monotonic(), python.parents[1]
    variables = environment(
        PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}", VIRTUAL_ENV=str(folder),
        LD_LIBRARY_PATH=str(folder / "lib"))
    # Tests have their own settings.
    variables = {key: text for key, text in variables.items() if not key.startswith("MPIRING_")}
    said = subprocess.run([python, "-c", version], check=True, env=variables, capture_output=True,
                          text=True).stdout
    counts = Counter()
    for command in commands:
        ended = subprocess.run(["timeout", "-k", "10", str(HANG_S), *map(str, command)], cwd=ROOT,
                               env=variables, text=True, errors="replace", stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        outcomes = {outcome: int(number) for number, outcome in re.findall(
            r"(\d+) (passed|failed|error|skipped)", ended.stdout.rpartition("\n=")[2])}
        counts.update(outcomes)
        if ended.returncode:
            # A rank that ends its job does not count.
            counts["failed"] += outcomes.get("error", not outcomes.get("failed"))
            print(f"{name}: {' '.join(map(str, command))} ended with status {ended.returncode}\n"
                  f"{ended.stdout[-20000:]}", flush=True)
    row = (name, " ".join(said.split())[:34], counts["passed"], counts["failed"], counts["skipped"],
           f"{time.monotonic() - began:.0f} s")
    return row, not counts["failed"]


def tested_each(kind, names, test):
    """Test some environments, print the table, and return the exit status.

    Args:
        kind: Title of the first column.
        names: Names of the environments.
        test: Function that returns a row and whether all passed, given a name and a folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, passed = zip(*(test(name, Path(folder) / name) for name in names))
    print(TABLE.format(kind, "version", "passed", "failed", "skipped", "time"))
    for row in rows:
        print(TABLE.format(*row))
    return int(not all(passed))
