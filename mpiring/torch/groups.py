"""Opens the MPI group behind a process group: the default group, and groups of its ranks."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from ..config import Config
from ..engine.group import Group
from ..errors import ConfigError
from ..launch.start import mpi_world, refusal


def open_group(options: Any, default: Group | None) -> Group:
    """Return the MPI ranks of a new process group.

    Args:
        options: Of torch.distributed: store, rank, size, timeout, and the group's ranks.
        default: The group of all ranks; None where this will be it.

    Raises:
        ConfigError: Rank and size differ from MPI's.
        LaunchError: The group has several ranks, but this process is alone in MPI.

    Collective: yes, among the members. Blocking: yes.
    """
    ranks: Sequence[int] = options.global_ranks_in_group
    if not ranks:
        return _open_default(options)
    if default is None:
        raise ConfigError("a group with the back end 'mpiring' needs a default group with it; "
                          "call init_process_group('mpiring')")
    # MPI has no timeout: begin when all members are here.
    store = options.store
    if store.add("arrived", 1) == len(ranks):
        store.set("all here", "yes")
    store.wait(["all here"], options.timeout)
    tag = zlib.crc32(str(options.group_id).encode())
    return default.subgroup(ranks, tag, _settings(default.config, options.timeout))


def _open_default(options: Any) -> Group:
    config = Config()
    world = mpi_world(allow_singleton=config.allow_singleton)
    given, real = (options.group_rank, options.group_size), (world.rank, world.size)
    if world.size == 1 < options.group_size and not config.allow_singleton:
        raise refusal(options.group_size, f"torch.distributed has a world_size of "
                      f"{options.group_size}, but this process is alone in its MPI world")
    if given != real:
        raise ConfigError(
            f"torch.distributed calls this rank {given[0]} of {given[1]}, but in MPI it is rank "
            f"{real[0]} of {real[1]}; use init_method='mpi://', which asks MPI, or unset RANK and "
            f"WORLD_SIZE, or set them by mpiring.torch.export_environment")
    return Group(world, _settings(config, options.timeout))


def _settings(config: Config, timeout: timedelta) -> Config:
    """Return the settings with the user's timeout, if there is one."""
    if timeout == default_pg_timeout:
        return config
    return replace(config, stall_timeout_s=timeout.total_seconds())
