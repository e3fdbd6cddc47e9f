"""Data-parallel training on plain MPI: collectives, fusion and overlap, in Python.

Start a program with MPI: `mpirun -n 4 python train.py`. There are five entry points:

    mpiring.init                  comm = mpiring.init()
                                  Returns the Communicator of all ranks.
    mpiring.Communicator          comm.allreduce(x, op="mean")
                                  Collectives on arrays and objects; comm.rank, comm.size.
    mpiring.numpy.DataParallel    dp = DataParallel(params)
                                  Averages gradients of NumPy and CuPy models.
    mpiring.torch.DataParallel    model = DataParallel(model)
                                  Averages gradients of PyTorch models.
    the command line              python -m mpiring --help
                                  Checks a launch (doctor), measures speed (bench), reads traces.

Call `help` with one of the first four for details.
"""

from .communicator import Communicator
from .config import Config
from .engine.handle import Handle
from .errors import (
    BufferMismatchError,
    CheckpointError,
    ClosedError,
    ConfigError,
    GradientError,
    LaunchError,
    MissingDependencyError,
    MpiringError,
    ProcessFailedError,
    ReplicaError,
    StallError,
    TransportError,
)
from .names import AlgorithmName, OpName, publish
from .record.statistics import Statistics
from .world import init

__version__ = "0.1.0"

__all__ = [
    "AlgorithmName",
    "BufferMismatchError",
    "CheckpointError",
    "ClosedError",
    "Communicator",
    "Config",
    "ConfigError",
    "GradientError",
    "Handle",
    "LaunchError",
    "MissingDependencyError",
    "MpiringError",
    "OpName",
    "ProcessFailedError",
    "ReplicaError",
    "StallError",
    "Statistics",
    "TransportError",
    "init",
]

publish(__name__)
