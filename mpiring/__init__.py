"""Data-parallel training on plain MPI: collectives, fusion and overlap, in Python."""

from .communicator import Communicator, init
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
from .record.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
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
    "ProcessFailedError",
    "ReplicaError",
    "StallError",
    "Statistics",
    "TransportError",
    "init",
]
