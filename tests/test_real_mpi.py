"""Runs tests/mpi under mpiexec, once per number of ranks; 3 catches what powers of two hide."""

import pytest
from launching import HANG_S, ROOT, installed, launch

pytestmark = pytest.mark.launch

PYTEST = ("-m", "pytest", "-p", "pytest_mpi", "--with-mpi", "-m", "mpi",
          "--quiet", "--tb=short", "--color=no", "-p", "no:cacheprovider")
FILES = sorted(str(path) for path in (ROOT / "tests" / "mpi").glob("test_*.py"))
# They load PyTorch on each rank, and train for long.
WITH_TORCH = [path for path in FILES if "/test_torch_" in path]
# Their operations run in the memory of a node, without MPI.
ON_GPUS = [path for path in FILES if path.endswith(
    ("/test_queued.py", "/test_short_gpu.py", "/test_nccl.py"))]
OTHERS = [path for path in FILES if path not in (*WITH_TORCH, *ON_GPUS)]

# For them it matters who advances operations; others compare values, or what NumPy has computed.
ADVANCING = [f"tests/mpi/test_{name}.py" for name in (
    "averager", "checkpoints", "communicator", "large", "local_training", "messages", "nonfinite",
    "numpy_adapter", "on_device", "pair_averaging", "parameter_server", "persistent", "rounds")]


def passes(ranks, *files, **variables):
    # No plugin but the one named: of others each rank would import Hypothesis, for nothing.
    ended = launch(ranks, *PYTEST, *files, timeout_s=2 * HANG_S, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
                   **variables)
    assert ended.status == 0, ended.output[-20000:]
    assert " passed" in ended.output, ended.output


@pytest.mark.parametrize(("ranks", "files"), [
    pytest.param(1, OTHERS + ON_GPUS, marks=pytest.mark.any_mpi), (3, OTHERS),
    pytest.param(3, ON_GPUS, marks=pytest.mark.any_mpi)])
def test_real_mpi(ranks, files, machine_code):
    passes(ranks, *files, MPIRING_TUNING_FOLDER=str(machine_code))


@pytest.mark.parametrize(("ranks", "selected"), [
    pytest.param(2, (), marks=pytest.mark.any_mpi),
    # Also under Open MPI: what differs by the number of ranks, and by the MPI, costs little.
    (3, ("-k", "training_is_that or goes_on_anywhere"))])
def test_with_pytorch(ranks, selected):
    installed("torch")
    passes(ranks, *WITH_TORCH, *selected)


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks", [2])
def test_without_thread_multiple(ranks):
    """Where MPI offers less, operations advance inside mpiring's calls only."""
    passes(ranks, *ADVANCING, MPI4PY_RC_THREAD_LEVEL="funneled")
