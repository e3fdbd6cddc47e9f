"""Queries and configures this host (Linux): network addresses, freed memory, processors."""

import contextlib
import ctypes
import fcntl
import functools
import math
import os
import struct
from collections.abc import Set
from pathlib import Path

from .environment import heap_is_set

# Number of the ioctl that returns an interface's IPv4 address.
_SIOCGIFADDR = 0x8915
# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Thresholds to try in order; glibc before 2.35 accepts at most the second one.
_THRESHOLDS_BYTES = (1 << 30, 32 << 20)


def all_processors() -> Set[int]:
    """Return the numbers of this host's processors."""
    return frozenset(range(os.cpu_count() or 1))


def usable_processors() -> Set[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return all_processors()


def count_cores(processors: Set[int], root: Path = Path("/")) -> int:
    """Return the number of physical cores to which these processors belong."""
    siblings = set()
    for number in processors:
        try:
            siblings.add((root / "sys/devices/system/cpu" / f"cpu{number}"
                          / "topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(number))
    return len(siblings)


def quota(root: Path = Path("/")) -> float:
    """Return the smallest CPU limit of this process's cgroups, in processors."""
    quotas = [math.inf]
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        # Version 2 has one tree without controller names; version 1 has a tree for each controller.
        if not controllers or "cpu" in controllers.split(","):
            folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            # In a container, the path may be the host's path. Then only the root cgroup is visible.
            group = Path(inside.strip("/"))
            quotas += [_cgroup_quota(folder / path) for path in (group, *group.parents)]
    return min(quotas)


def _cgroup_quota(group: Path) -> float:
    """Return the CPU limit of a cgroup of either version, in processors."""
    times = text_of(group / "cpu.max").split() or [
        text_of(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    return int(times[0]) / int(times[1]) if all(map(str.isdigit, times)) else math.inf


def text_of(path: Path) -> str:
    """Return the stripped content of a small system file, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def ipv4_address(interface: str) -> str:
    """Return the IPv4 address of an interface; raise OSError if there is none."""
    import socket
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def ipv4_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of all interfaces except the loopback interface, by name."""
    import socket
    addresses = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            addresses[name] = ipv4_address(name)
    return {name: address for name, address in addresses.items() if not address.startswith("127.")}


def interface_to(address: str) -> str:
    """Return the network interface by which this host reaches an IPv4 address; "" if unknown."""
    import socket
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing; the port does not matter.
        probe.connect((address, 1))
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if ipv4_address(name) == source:
                    return name
    return ""


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB of freed memory; return whether malloc has accepted this.

    A training step allocates and frees all gradients. By default, glibc returns long blocks at
    once, and the system zeroes every page again at the next allocation. In one measurement with a
    convolutional network, zeroing 12,136 pages took 24 ms of a 205 ms step. Nothing changes without
    glibc, or if the user has set malloc's thresholds in environment variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or heap_is_set():
        return False
    # Set both, because glibc stops adapting both when one is set.
    return all([any(mallopt(which, nbytes) == 1 for nbytes in _THRESHOLDS_BYTES)
                for which in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)])
