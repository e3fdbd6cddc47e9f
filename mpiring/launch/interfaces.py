"""Finds the IPv4 addresses of this host's network interfaces (Linux)."""

import contextlib
import fcntl
import socket
import struct

# The ioctl that returns an interface's IPv4 address.
_SIOCGIFADDR = 0x8915


def ipv4_address(interface: str) -> str:
    """Return the address of an interface.

    Raises:
        OSError: There is no such interface, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def ipv4_addresses() -> dict[str, str]:
    """Return the addresses of all interfaces that have one, without the loopback, by name."""
    addresses = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            addresses[name] = ipv4_address(name)
    return {name: address for name, address in addresses.items() if not address.startswith("127.")}
