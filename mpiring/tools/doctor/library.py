"""Judges Python, packages, the MPI library, and whether mpirun belongs to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ...launch.environment import launcher_of
from .facts import Job, Library, Rank, related, vendor_of, version_of
from .findings import NOTE, OK, PROBLEM, WARNING, Finding, each_rank

GET_ONE = "load your cluster's MPI module (module avail mpi), or: pip install 'mpiring[mpich]'"

_LEVELS = {"Cray MPICH": "export MPICH_MAX_THREAD_SAFETY=multiple",
           "MVAPICH": "export MV2_ENABLE_AFFINITY=0"}

# Optional packages: what each is for, and how to install it.
_OPTIONAL = {
    "torch": ("PyTorch models", "pip install 'mpiring[torch]'; without a GPU, PyTorch's CPU build "
                                "first"),
    "numba": ("16-bit sums on a node and codecs, several times as fast",
              "pip install 'mpiring[fast]'"),
    "ml_dtypes": ("bfloat16 in NumPy", "pip install ml_dtypes"),
    "matplotlib": ("plots of benchmarks and traces", "pip install 'mpiring[bench]'"),
    "cupy": ("NumPy models on GPUs, and PyTorch's gradients that a node's ranks share",
             "pip install cupy-cuda13x (or cupy-cuda12x)"),
}


def findings(job: Job) -> Iterator[Finding]:
    """Judge what is installed."""
    yield from _same(job, "Python", lambda rank: rank.python, lambda rank: rank.executable)
    if "mpi4py" not in job.here.versions:
        yield Finding("mpi4py", PROBLEM, "not installed", "pip install mpi4py")
    else:
        yield from _same(job, "mpi4py", lambda rank: rank.versions.get("mpi4py", ""))
        yield from _library(job)
    yield _mpirun(job)
    yield from each_rank(job, _thread_level)


def _same(job: Job, name: str, version: Callable[[Rank], str],
          path: Callable[[Rank], str] = lambda rank: "") -> Iterator[Finding]:
    """Report a version, of which all ranks must have the same."""
    agreed = len({version(rank) for rank in job.ranks}) == 1
    return each_rank(job, lambda rank: [Finding(
        name, OK if agreed else WARNING, ", ".join(filter(None, [version(rank), path(rank)])),
        "" if agreed else "start the same environment on all nodes, from a folder that all see")])


def _library(job: Job) -> Iterator[Finding]:
    here = job.here
    if here.library.text:
        yield from _same(job, "MPI library", lambda rank: _described(rank.library),
                         lambda rank: rank.library.path)
        return
    chosen = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if here.variables.get(name)]
    remedy = GET_ONE
    if chosen:
        remedy = f"unset {' '.join(chosen)}, which mpi4py obeys; or {GET_ONE}"
    error = here.library.error.splitlines() or ["unknown"]
    yield Finding("MPI library", PROBLEM, "\n".join(["mpi4py cannot load one", *error]), remedy)


def _described(library: Library) -> str:
    return f"{library.name} (MPI {library.standard})"


def _mpirun(job: Job) -> Finding:
    """Judge whether a shell's mpirun is the library's own."""
    path, library = job.mpirun.path, job.here.library
    vendor = vendor_of(job.mpirun.text)
    name = f"{vendor or 'of unknown make'} {version_of(job.mpirun.text)}".strip()
    shown = f"{path} is {name}"
    if not path:
        return _no_mpirun(job)
    if not library.text:
        return Finding("mpirun", NOTE, f"{shown}; there is no library that it could belong to",
                       GET_ONE)
    own = job.mpirun.beside
    together = any(Path(path).resolve().parents[1] == home for file in filter(
        None, [own, library.path]) for home in list(Path(file).resolve().parents)[1:3])
    remedy = (f"use {own}" if own else
              f"use the mpirun that came with {library.path or library.name}: load its module")
    if vendor and library.vendor and not related(vendor, library.vendor):
        # A job that was launched in another way does not need it.
        works = job.size > 1 or launcher_of(job.here.variables) == "srun"
        if together:
            remedy = (f"{f'use {own}; or ' if own else ''}uninstall {vendor}, whose mpirun has "
                      f"taken the place of {library.vendor}'s, and install {library.vendor} again")
        return Finding("mpirun", WARNING if works else PROBLEM, f"{shown}, but mpi4py loads "
                       f"{library.name}: each rank would be alone, or not start", remedy)
    if own and Path(own).resolve().parent == Path(path).resolve().parent:
        return Finding("mpirun", OK, f"{shown}, of the library's own installation")
    if own:
        return Finding("mpirun", WARNING, f"{shown}, of another installation than "
                       f"{library.path}", remedy)
    return Finding("mpirun", OK if vendor else NOTE,
                   f"{shown}; the library is {library.path or library.name}",
                   "" if vendor else remedy)


def _no_mpirun(job: Job) -> Finding:
    own = job.mpirun.beside
    if own:
        return Finding("mpirun", WARNING, "not in PATH", f"use {own}, or put its folder in PATH")
    if job.slurm.installed:
        return Finding("mpirun", OK, "none; srun does without")
    return Finding("mpirun", WARNING, "there is none", GET_ONE)


def _thread_level(rank: Rank) -> Iterator[Finding]:
    level = rank.thread_level
    if level == "multiple":
        yield Finding("thread level", OK, level)
    elif level:
        remedy = _LEVELS.get(rank.library.vendor,
                             "use an MPI library built with MPI_THREAD_MULTIPLE")
        if rank.variables.get("MPI4PY_RC_THREAD_LEVEL", "multiple") != "multiple":
            remedy = "unset MPI4PY_RC_THREAD_LEVEL"
        yield Finding("thread level", WARNING, f"{level}: operations advance only inside "
                      f"mpiring's calls, so that less is hidden", remedy)


def packages(job: Job) -> Iterator[Finding]:
    """Judge the packages of each rank, and what missing ones are for."""
    agreed = len({rank.versions.get("numpy", "") for rank in job.ranks}) == 1

    def judge(rank: Rank) -> Iterator[Finding]:
        yield Finding("numpy", OK if agreed else WARNING, rank.versions.get("numpy", "missing"),
                      "" if agreed else "install the same version on all nodes")
        for name, (purpose, remedy) in _OPTIONAL.items():
            version = rank.versions.get(name)
            if version is not None:
                yield Finding(name, OK, version)
            elif name != "cupy" or rank.gpus.kind:
                yield Finding(name, NOTE, f"not installed; it is for {purpose}", remedy)

    return each_rank(job, judge)
