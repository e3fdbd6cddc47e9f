"""Contenders that sum an array over the ranks: mpiring, MPI's own allreduce, and peers."""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import AlgorithmName, ConfigError
from ...provisional import Array, collectives, operations
from ..arguments import UsageError, names
from . import peers
from .world import World

Call = Callable[[], object]
# Begins a call, and returns a function that waits for it.
Start = Callable[[], Call]

NATIVE = "MPI_Allreduce"
# Names of nonblocking calls that differ from those of blocking calls.
NONBLOCKING = {NATIVE: "MPI_Iallreduce"}
COPY = "memory copy"
# On GPUs.
NAIVE, NAIVE_PINNED = "naive", "naive, pinned"
DEVICE_COPY, PINNED_COPIES = "device copy", "pinned copies"
# Baselines of all other contenders.
REFERENCES = (NATIVE, NAIVE)
# Contenders that only show a limit, and the buffers to which it applies.
LIMITS = {COPY: ("empty", "private"), DEVICE_COPY: ("empty",), PINNED_COPIES: ("private",)}
KINDS = ("mpiring", "mpi", "hvd", *peers.NAMES, "nccl")
# Contenders that can sum arrays, by device.
SUMMING = {"cpu": ("mpiring", "mpi", *peers.NAMES), "cuda": ("mpiring", "mpi", "nccl")}
# Methods of training.
ALONE = "compute only"
OURS = "mpiring DataParallel"
GLOO = "Gloo + PyTorch's DDP"
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Shares:
    """How ranks share data in training: there is one copy per "rank", per "node", or per "job"."""

    weights: str = "rank"
    gradients: str = "rank"
    state: str = "rank"

    def bytes_per_parameter(self, optimizer: str, node_ranks: int, ranks: int) -> float:
        """Return the float32 bytes per parameter that all processes of a node hold together.

        The optimizer is "adamw", with two vectors of state, or "sgd", with none.
        """
        copies = {"rank": node_ranks, "node": 1, "job": node_ranks / ranks}
        state = copies[self.state] * (2 if optimizer == "adamw" else 0)
        return _FLOAT_BYTES * (copies[self.weights] + copies[self.gradients] + state)


def completed(start: Start) -> Call:
    """Return a blocking call, which begins the operation and waits for it."""
    return lambda: start()()


@dataclass(frozen=True)
class Contender:
    """A method to sum an array over the ranks in place, or to train on them.

    The functions that take an array raise ConfigError if the contender cannot sum it.

    Attributes:
        blocking: Takes an array, and returns a function that sums it with each call.
        starting: Takes an array, and returns a function that begins to sum it and returns a
            function that waits. None if only blocking calls are measured.
        sums: False for a contender that only shows a limit.
        join: Takes a PyTorch module and a recipe for an optimizer, and returns the model to call
            and the optimizer.
        has_means: Whether each rank has all averaged gradients after a backward pass, so that they
            can be checked.
    """

    name: str
    blocking: Callable[[Array], Call] = lambda x: lambda: None
    starting: Any = None
    sums: bool = True
    join: Any = None
    shares: Shares = Shares()
    has_means: bool = True


def mpiring(world: World, algorithm: AlgorithmName) -> Contender:
    """Return mpiring with one of its algorithms."""
    comm = world.comm
    return Contender(
        f"mpiring {algorithm}",
        lambda x: lambda: comm.allreduce(x, algorithm=algorithm),
        lambda x: lambda: comm.iallreduce(x, algorithm=algorithm).wait)


def mpi(world: World) -> Contender:
    """Return MPI's own allreduce, in place and through mpi4py, which is the baseline."""
    raw, library = world.raw, world.mpi

    def call(x: Array) -> Call:
        refuse_unknown(x.dtype)
        return lambda: raw.Allreduce(library.IN_PLACE, x, op=library.SUM)

    def start(x: Array) -> Start:
        refuse_unknown(x.dtype)
        return lambda: raw.Iallreduce(library.IN_PLACE, x, op=library.SUM).Wait

    return Contender(NATIVE, call, start)


def refuse_unknown(dtype: np.dtype[Any]) -> None:
    """Raise ConfigError if MPI cannot sum a dtype."""
    if not collectives.native.supports(dtype, "sum"):
        raise ConfigError(f"MPI has no {dtype.name}")


def memory_copy() -> Contender:
    """Return the limit on one node: every rank reads and writes each byte once, as a copy does.

    An allreduce cannot move less: it reads and stores every rank's array, 2 n bytes per rank.
    """
    def call(x: Array) -> Call:
        # Written, because unwritten pages would all be the system's page of zeros.
        other = np.ones_like(x)
        return lambda: np.copyto(other, x)

    return Contender(COPY, call, sums=False)


def gloo(world: World, interface: str | None) -> Contender:
    """Return Gloo, whose process group is called without the wrappers of torch.distributed.

    By default, the interface is the loopback on one node. Between nodes, it is the first interface
    with an address.
    """
    interface = interface or peers.interface_for(world)
    group = peers.gloo_group(
        peers.store_of_rank_0(world, interface), world.rank, world.size, interface)

    def start(x: Array) -> Start:
        tensors = [peers.tensor_of(x)]
        return lambda: group.allreduce(tensors).wait

    return Contender("Gloo", lambda x: completed(start(x)), start)


def horovod() -> Contender:
    """Start and return Horovod, which finds the ranks in MPI_COMM_WORLD by itself."""
    import horovod.torch as hvd
    hvd.init()
    numbers = itertools.count()

    def start(x: Array) -> Start:
        # The same name in each call, so that Horovod's cache of responses works as in training.
        tensor, name = peers.tensor_of(x), f"array {next(numbers)}"

        def begin() -> Call:
            try:
                handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            except ValueError as exc:
                raise ConfigError(f"Horovod has no {x.dtype.name}") from exc
            return lambda: hvd.synchronize(handle)
        return begin

    return Contender("Horovod", lambda x: completed(start(x)), start)


def declare_contenders(parser: ArgumentParser) -> None:
    """Declare which contenders take part."""
    parser.add_argument("--contenders", type=names(KINDS), metavar="A,B",
                        help=f"contenders, some of {', '.join(KINDS)} (default: all installed)")
    parser.add_argument("--interface", metavar="NAME", help="network interface for Gloo, as eth0")


def settle_contenders(options: Namespace, kinds: Mapping[str, Sequence[str]],
                      device: str = "cpu") -> None:
    """Refuse contenders that cannot take part; in a job without peers, remove the peers.

    The kinds that can take part are given by device. It raises UsageError for other requested
    kinds.
    """
    known = kinds[device]
    for name in options.contenders or ():
        if name not in known:
            raise UsageError(f"--contenders {name}: here, with --device {device}, "
                             f"expected some of {', '.join(known)}")
    if options.without_peers:
        # Without a request, "hvd" takes part only together with Horovod.
        options.contenders = options.contenders or [name for name in known if name != "hvd"]
        options.contenders = [name for name in options.contenders if name not in peers.NAMES]


def chosen(world: World, kinds: Sequence[str] | None, algorithms: Sequence[str] | None,
           interface: str | None = None) -> list[Contender]:
    """Return the requested contenders; "auto" and MPI's own allreduce are always included.

    By default, these are all installed kinds, and all algorithms of mpiring.

    Raises:
        MissingDependencyError: A requested kind is not installed.
    """
    contenders = [mpi(world), *mpiring_contenders(world, kinds, algorithms)]
    if peers.takes_part("gloo", kinds, world):
        contenders.append(gloo(world, interface))
    if peers.takes_part("horovod", kinds, world):
        contenders.append(horovod())
    return contenders


def mpiring_contenders(world: World, kinds: Sequence[str] | None,
                       algorithms: Sequence[str] | None) -> list[Contender]:
    """Return mpiring with the requested algorithms; see `chosen`."""
    wanted = operations.NAMES if algorithms is None else algorithms
    ours = kinds is None or "mpiring" in kinds
    return [mpiring(world, name) for name in operations.NAMES
            if name == "auto" or ours and name in wanted]
