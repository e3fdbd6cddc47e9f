"""Tests which interface leads to an address, and that freed memory is used without new pages."""

import ctypes
import subprocess
import sys

import pytest

from mpiring.launch.host import interface_to, ipv4_addresses

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")

# Pages that are taken anew where 64 MiB are allocated in four blocks, freed, and allocated again.
_COUNT = """
import resource
from mpiring.launch.host import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (16 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(), keep_freed_memory())
print([faults() for _ in range(3)][-1] * resource.getpagesize())
"""


def counted(**variables):
    """Return what `keep_freed_memory` says twice, and the bytes of new pages."""
    output = subprocess.run([sys.executable, "-c", _COUNT], env=variables, timeout=60, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    return output[0], int(output[1])


def test_the_interface_to_an_address():
    assert interface_to("127.0.0.1") == "lo" and interface_to("256.0.0.1") == ""
    for address in ipv4_addresses().values():
        assert ipv4_addresses()[interface_to(address)] == address


@needs_glibc
def test_freed_memory_is_kept():
    said, new_bytes = counted(PYTHONPATH=":".join(sys.path))
    assert said == "True True" and new_bytes < 8 << 20


@needs_glibc
@pytest.mark.parametrize("variables", [
    {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"MALLOC_MMAP_THRESHOLD_": "131072"},
    {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}])
def test_what_the_user_has_set_holds(variables):
    said, new_bytes = counted(PYTHONPATH=":".join(sys.path), **variables)
    assert said == "False False" and new_bytes > 8 << 20
