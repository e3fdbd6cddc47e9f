# Package for Spack: repos/spack_repo/builtin/packages/py_mpiring/package.py of spack-packages, or a
# private repository (spack repo create). Spack builds mpi4py with the MPI library that the
# configuration of the site names.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpiring(PythonPackage):
    """Data-parallel training on plain MPI for PyTorch, NumPy and CuPy: ring allreduce, windows of
    shared memory, fusion buffers, overlap with backward."""

    pypi = "mpiring/mpiring-0.1.0.tar.gz"

    maintainers("mpiring-developers")

    license("Apache-2.0", checked_by="mpiring-developers")

    # The checksum is filled in by `spack checksum py-mpiring` once the release is on PyPI.
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("torch", default=False, description="PyTorch models")
    variant("fast", default=False, description="16-bit sums and codecs at the speed of memory")
    variant("examples", default=False, description="Packages that the examples need")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-numpy@1.24:")

        with when("+torch"):
            depends_on("py-torch@2.10:")
            depends_on("py-ml-dtypes")

        with when("+fast"):
            depends_on("py-numba@0.61:")
            depends_on("py-xxhash@3.0:")

        with when("+examples"):
            depends_on("py-ml-dtypes")
            depends_on("py-scikit-learn")
            depends_on("py-threadpoolctl")
            depends_on("py-tqdm")
