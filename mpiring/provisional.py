"""Provisional names for the guests of the package, which may change in any minor version.

The guests are `horovod`, `tools`, `simulated`, `asynchronous`, `elastic`, and the studies in
`benchmarks/`. They import only these names and the names that users import. No other part of the
package imports a guest. A name is a class, a function, a module, or a folder. The `__init__` of
such a folder imports the names that it shows.
"""

from typing import TYPE_CHECKING

from . import (
    arguments, buckets, collectives, files, gpu, launch, memory, operations, remedies, transport,
    world)
from .memory.arrays import Array
from .names import later, publish
from .operations.agreement import Call
from .operations.collectives import Collectives
from .operations.consistency import same_on_all
from .record import trace_file
from .text import count, first_few, ranks_text
from .transport.base import Channel, Schedule

if TYPE_CHECKING:
    from . import optim as optimizers, sharding, torch as adapter, training
    from .launch import child_job
    from .reducers import codecs
    from .resilience import contents as checkpoints
    from .transport import survivors

__all__ = [
    "Array", "Call", "Channel", "Collectives", "Schedule", "adapter", "arguments", "buckets",
    "checkpoints", "child_job", "codecs", "collectives", "count", "files", "first_few", "gpu",
    "launch", "memory", "operations", "optimizers", "publish", "ranks_text", "remedies",
    "same_on_all", "sharding", "survivors", "trace_file", "training", "transport", "world"]

# These need PyTorch or MPI, or few guests need them.
__getattr__ = later(
    __name__, adapter="mpiring.torch", checkpoints="mpiring.resilience.contents",
    child_job="mpiring.launch.child_job", codecs="mpiring.reducers.codecs",
    optimizers="mpiring.optim", sharding="mpiring.sharding",
    survivors="mpiring.transport.survivors", training="mpiring.training")
