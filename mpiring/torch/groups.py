"""Opens the MPI group behind a process group: the default group, and groups of its ranks."""

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed.constants import default_pg_timeout

from ..config import Config
from ..engine.group import Group
from ..errors import ConfigError, StallError
from ..launch.start import mpi_world, refusal
from ..transport.base import NO_BYTES

# Below all tags of users.
_TAG = -1


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
    _gather(options.store, len(ranks), options.timeout)
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


def _gather(store: Any, size: int, timeout: timedelta) -> None:
    """Return when all members have called."""
    if store.add("arrived", 1) == size:
        store.set("all here", "yes")
    store.wait(["all here"], timeout)


def monitored_barrier(group: Group, timeout_s: float | None, *, wait_all_ranks: bool) -> None:
    """Return when every rank has called; on rank 0 an error names the ranks that have not.

    Every rank reports to rank 0, which answers when all have.

    Args:
        group: The ranks.
        timeout_s: How long they wait; by default, the group's timeout.
        wait_all_ranks: Name all ranks that are missing, not only the first.

    Raises:
        StallError: A rank has not called in time.

    Collective: yes. Blocking: yes.
    """
    messages, limit = group.messages(), timeout_s or group.config.stall_timeout_s
    deadline = time.monotonic() + limit if limit else None
    if group.rank:
        messages.isend(NO_BYTES, 0, _TAG)
        messages.irecv(np.empty(0, np.uint8), 0, _TAG).wait(limit or None)
        return
    reports = {rank: messages.irecv(np.empty(0, np.uint8), rank, _TAG)
               for rank in range(1, group.size)}
    missing = []
    for rank, report in reports.items():
        try:
            report.wait(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        except StallError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        raise StallError(f"rank 0: Timed out after {limit:g} s in monitored_barrier, which was not "
                         f"called by rank {', '.join(map(str, missing))}")
    for rank in reports:
        messages.isend(NO_BYTES, rank, _TAG)
