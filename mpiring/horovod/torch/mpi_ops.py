"""All names of `mpiring.horovod.torch`, for programs that import `horovod.torch.mpi_ops`."""

from . import *  # noqa: F401, F403
from . import __all__ as __all__  # noqa: F401
