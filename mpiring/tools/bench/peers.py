"""Connects ranks with Gloo, and finds the installed packages to compare mpiring with."""

import importlib.util
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ... import ConfigError, MissingDependencyError
from ...provisional import Array, launch, remedies
from .world import World

NAMES = ("gloo", "horovod")

# `mpiring.torch`, which lets tensors share the memory of arrays, needs these packages.
TORCH = ("torch", "ml_dtypes")
_NEEDS = {"gloo": TORCH, "horovod": (*TORCH, "horovod")}
_TIMEOUT = timedelta(seconds=120)


def takes_part(name: str, kinds: Sequence[str] | None, world: World) -> bool:
    """Return whether a peer is measured: one of `kinds`, or any that is installed.

    Raises:
        MissingDependencyError: A requested peer is not installed on all ranks.
    """
    if kinds is None:
        return not world.any_rank(bool(missing(*_NEEDS[name])))
    if name in kinds:
        world.call_on_all(lambda: _refuse_missing(name))
    return name in kinds


def refuse_missing_torch() -> None:
    """Raise MissingDependencyError if a package that `mpiring.torch` needs is not installed."""
    if missing(*TORCH):
        raise MissingDependencyError(f"this needs PyTorch: {remedies.pip_install('[torch]')}")


def _refuse_missing(name: str) -> None:
    absent = missing(*_NEEDS[name])
    if absent:
        raise MissingDependencyError(
            f"the contender {name!r} needs {', '.join(absent)}: install them "
            f"(docs/reference/benchmarks.md), or leave it out with --contenders")


def missing(*packages: str) -> list[str]:
    """Return the packages that cannot be found."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def tensor_of(x: Array) -> Any:
    """Return a tensor in the memory of `x`; raise ConfigError if PyTorch lacks the dtype."""
    from ...provisional import adapter
    try:
        return adapter.tensors.seen_as_tensor(x)
    except TypeError as exc:
        raise ConfigError(f"PyTorch has no {x.dtype.name}") from exc


def interface_for(world: World) -> str:
    """Return the network interface for Gloo, or raise ConfigError if none has an address."""
    if world.comm.num_nodes == 1:
        return "lo"
    for name in launch.ipv4_addresses():
        return name
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    raise ConfigError(f"none of the network interfaces {names} has an IPv4 address; name one with "
                      f"--interface, or leave Gloo out with --contenders")


def store_of_rank_0(world: World, interface: str) -> Any:
    """Return the TCPStore by which the ranks find each other; rank 0 listens on the interface."""
    import torch.distributed as dist
    if world.rank == 0:
        # Port 0: the system picks a free one.
        store = dist.TCPStore(launch.ipv4_address(interface), 0, is_master=True,
                              wait_for_workers=False, timeout=_TIMEOUT)
        world.raw.bcast((store.host, store.port))
        return store
    return dist.TCPStore(*world.raw.bcast(None), is_master=False, timeout=_TIMEOUT)


def gloo_group(store: Any, rank: int, size: int, interface: str) -> Any:
    """Connect all ranks with Gloo, and return the process group."""
    import torch.distributed as dist
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)
