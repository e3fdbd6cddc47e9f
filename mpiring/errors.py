"""Declares the exceptions of mpiring.

    MpiringError
    ├── ConfigError             an argument, Config field or MPIRING_* variable cannot work
    ├── LaunchError             the launched ranks did not become one MPI world
    ├── BufferMismatchError     ranks disagree on shape, dtype, op, root or order
    ├── GradientError           a gradient was marked ready twice, is missing, or is never finite
    ├── CheckpointError         a checkpoint cannot be written or read, or is of another run
    ├── ReplicaError            parameters or optimizer state differ between ranks
    ├── ClosedError             the communicator is closed, MPI is finalized, or this is a fork
    ├── TransportError          MPI failed, or another rank has exited
    │   ├── StallError          an operation waits for ranks that do not arrive
    │   └── ProcessFailedError  a rank has died, and the others can continue
    └── MissingDependencyError  an optional package is not installed

`except MpiringError` catches all of them.
"""


class MpiringError(Exception):
    """Base class of all errors."""


class ConfigError(MpiringError, ValueError):
    """An argument, a Config field or a variable has a value that cannot work."""


class LaunchError(MpiringError, RuntimeError):
    """Several ranks were launched, but this process is alone in its MPI world, or is a fork."""


class BufferMismatchError(MpiringError, ValueError):
    """Ranks called different collectives, or the same one with different buffers."""


class GradientError(MpiringError, RuntimeError):
    """A gradient is unknown, was marked ready twice or not at all, or is never finite."""


class CheckpointError(MpiringError, RuntimeError):
    """A checkpoint could not be written or read, or belongs to another run."""


class ReplicaError(MpiringError, RuntimeError):
    """Parameters or optimizer state, which must be the same on all ranks, differ."""


class ClosedError(MpiringError, RuntimeError):
    """The communicator was closed or MPI was finalized before this call, or this is a fork."""


class TransportError(MpiringError, RuntimeError):
    """Communication failed: MPI reported an error, or a rank has exited."""


class StallError(TransportError):
    """An operation waited longer than allowed for ranks that did not arrive."""


class ProcessFailedError(TransportError):
    """A rank has died, and MPI lets the others continue; see mpiring.elastic."""


class MissingDependencyError(MpiringError, ImportError):
    """An optional package is not installed; the message has the command for it."""
