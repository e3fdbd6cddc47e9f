"""Says which packages are there, and what those that are missing would bring."""

from collections.abc import Iterator

from .facts import Job
from .findings import NOTE, OK, WARNING, Finding

TITLE = "Packages"

# What each is for, and the line that brings it.
_OPTIONAL = {
    "torch": ("PyTorch models", "pip install 'mpiring[torch]'; without a GPU, PyTorch's CPU build "
                                "first"),
    "numba": ("16-bit sums on a node and codecs, several times as fast",
              "pip install 'mpiring[fast]'"),
    "ml_dtypes": ("bfloat16 in NumPy", "pip install ml_dtypes"),
    "matplotlib": ("plots of benchmarks and traces", "pip install 'mpiring[bench]'"),
    "cupy": ("NumPy models on GPUs", "pip install cupy-cuda12x"),
}


def findings(job: Job) -> Iterator[Finding]:
    """Judge the packages of each rank."""
    numpys = {rank.versions.get("numpy", "") for rank in job.ranks}
    for rank in job.ranks:
        here = (rank.rank,)
        agreed = len(numpys) == 1
        yield Finding("numpy", OK if agreed else WARNING, rank.versions.get("numpy", "missing"),
                      "" if agreed else "install the same version on all nodes", here)
        for name, (purpose, remedy) in _OPTIONAL.items():
            version = rank.versions.get(name)
            if version is not None:
                yield Finding(name, OK, version, "", here)
            elif name != "cupy" or rank.gpus.kind:
                yield Finding(name, NOTE, f"not installed; it is for {purpose}", remedy, here)
