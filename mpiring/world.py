"""The default communicator, which mpiring's objects use if none is given."""

from .communicator import Communicator
from .config import Config, config_or_default
from .errors import ConfigError
from .launch.start import mpi_world
from .names import INIT, explaining

# The communicator that is used if none is given. A strong reference: a garbage collector would drop
# it at a different time on each rank.
_world: Communicator | None = None


@explaining(INIT)
def init(*, config: Config | None = None) -> Communicator:
    """Start MPI if necessary, and return a new Communicator of all ranks.

    The first communicator that this returns is the default for every argument `comm` in mpiring,
    until it is closed. A program that needs no communicator itself does not have to call `init`:
    the first object that is created without `comm` calls it.

    Args:
        config: Settings; by default the values of the MPIRING_* variables.

    Raises:
        LaunchError: The launcher started several ranks, but this process is alone in its MPI
            world; or this process is a fork of a rank.
        MissingDependencyError: No MPI library is installed.
        ClosedError: MPI is finalized already.

    Collective: yes. Blocking: yes.
    """
    config = config_or_default(config)
    comm = Communicator(mpi_world(allow_singleton=config.allow_singleton), config=config)
    if _world is None or _world.closed:
        make_default(comm)
    return comm


def make_default(comm: Communicator) -> None:
    """Use this communicator from now on if none is given."""
    global _world
    _world = comm


def or_world(comm: Communicator | None) -> Communicator:
    """Return the communicator that an argument stands for.

    If it is None, this is the one that `init` returned first. If there is none, or it is closed,
    call `init`. Raises ConfigError for other arguments, which says how to make a communicator.

    Collective: yes. Blocking: yes.
    """
    if comm is None:
        return init() if _world is None or _world.closed else _world
    refuse_other_than_communicators(comm)
    return comm


def refuse_other_than_communicators(comm: object) -> None:
    """Raise ConfigError unless an argument is a Communicator; the message says how to make one."""
    # Any object with its methods is accepted; an mpi4py communicator does not have them.
    if not hasattr(comm, "allgather_object"):
        raise ConfigError(
            f"comm is a {type(comm).__name__}; pass mpiring.init(), or "
            f"mpiring.Communicator(comm) for a communicator of mpi4py's")
