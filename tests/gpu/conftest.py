"""Skips the files *_on_gpu.py where there is no GPU: also in CI, whose machines have none.

All else that concerns GPUs is tested without: the order of what is queued on a simulated GPU, the
kernels on the host, and what CUDA is asked for on a CuPy that writes it down.
"""

from pathlib import Path

import pytest

from mpiring.errors import MissingDependencyError
from mpiring.gpu import cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.is_relative_to(HERE)
            and item.path.stem.endswith("_on_gpu")]
    try:
        cuda.cupy()
        missing = ""
    except MissingDependencyError as error:
        missing = str(error)
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def device():
    """Return the first GPU."""
    return cuda.device(0)


@pytest.fixture
def cupy():
    """Return CuPy."""
    return cuda.cupy()
