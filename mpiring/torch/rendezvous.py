"""Uses MPI to agree on the address of the store that torch.distributed needs."""

import atexit
import contextlib
import functools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import register_rendezvous_handler
from torch.distributed.constants import default_pg_timeout

from ..communicator import Communicator
from ..config import Config
from ..errors import ConfigError, TransportError
from ..launch.environment import set_default, set_variables
from ..launch.host import interface_to, ipv4_addresses
from ..operations.consistency import same_on_all
from ..world import init, or_world
from .private import rendezvous_handlers
from .process_group import with_timeout

_log = logging.getLogger("mpiring")

_PROBE_S = 1.0
# Time for the threads of Gloo at the end of the program.
_LAST_TENSORS_S = 0.1
# Socket of the exported port.
_reserved: list[socket.socket] = []


def register() -> None:
    """Register `init_method="mpi://"` with torch.distributed."""
    register_rendezvous_handler("mpi", rendezvous)


def rendezvous(url: str, timeout: timedelta = default_pg_timeout,
               **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Implement `init_method="mpi://"`: yield a store, and the rank and size in MPI.

    The store listens on an address of rank 0 that all ranks have reached. If all ranks are on one
    node, it listens on the loopback address. PyTorch stores serve any client that can connect. Keys
    therefore get a random prefix, which only the ranks know, unless a client lists the keys.

    It also sets the variables of `export_environment`. Frameworks that use the default process
    group still read the number of processes from them, Gloo its interface, and NCCL its GPU. The
    URL is "mpi://", followed by rank and world_size if the user gave them. If they are not MPI's,
    all ranks raise ConfigError; LaunchError is raised as by mpiring.init. Collective, blocking.
    """
    with init(config=with_timeout(Config(), timeout)) as comm:
        _check_url(url, comm)
        address, port, listener = _agree_on_address(comm)
        _export(comm, address)
        rank, size = comm.rank, comm.size
        prefix = comm.broadcast_object(secrets.token_hex(16), root=0)
        # All ranks connect before they close the communicator. Otherwise, rank 0 could free its
        # store earlier, for example because the back end is missing, and the others would wait.
        if listener is None:
            store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
        else:
            # The store gets the socket itself, so that no other program can take the port.
            store = dist.TCPStore(
                address, port, size, is_master=True, timeout=timeout, wait_for_workers=False,
                master_listen_fd=listener.detach())
    try:
        yield dist.PrefixStore(prefix, store), rank, size
    finally:
        # The user of another back end has chosen it.
        if "mpiring" in _default_backend():
            _warn_of_other_backends()
        if "gloo" in _default_backend():
            # Once, however often the program opens groups.
            atexit.unregister(_free_last_tensors)
            atexit.register(_free_last_tensors)
    raise ConfigError("init_method='mpi://' cannot be used again in one call")


def _free_last_tensors() -> None:
    """Let the threads of Gloo free the tensors of the last calls.

    For this, each thread needs the interpreter's lock. A thread that requests it while Python ends
    terminates the process (seen with PyTorch 2.13 and Python 3.11, in 1 of 4 programs).
    """
    time.sleep(_LAST_TENSORS_S)


def _check_url(url: str, comm: Communicator) -> None:
    """Raise ConfigError on all ranks if the rank or world size in a URL differs from MPI's."""
    query = dict(parse_qsl(urlsplit(url).query))
    with same_on_all(comm, "init_process_group"):
        for name, mpi in (("rank", comm.rank), ("world_size", comm.size)):
            if query.get(name, "-1") not in ("-1", str(mpi)):
                raise ConfigError(
                    f"{name}={query[name]}, but this is rank {comm.rank} of {comm.size} in MPI; "
                    f"leave {name} out: MPI knows it")


def export_environment(comm: Communicator | None = None) -> None:
    """Set the environment variables that libraries with `init_method="env://"` read.

    The variables are MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
    All ranks reach the address, which belongs to rank 0, and the port was free there. If PyTorch
    finds no accelerator, ACCELERATE_USE_CPU is also set; without it, Hugging Face Accelerate gives
    each process its own world. If GLOO_SOCKET_IFNAME is not set, it becomes the network interface
    by which this rank reaches the address. Otherwise, Gloo would use the address of the host's
    name, which other hosts may not reach. Rank 0 warns if a default process group of another back
    end is created from these variables.

    Args:
        comm: Communicator over all ranks, which is also the default.

    Raises:
        TransportError: A rank reaches none of the addresses of rank 0.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    address, _, listener = _agree_on_address(comm)
    if listener is not None:
        listener.close()
    _export(comm, address)
    _warn_of_other_backends()


def _export(comm: Communicator, address: str) -> None:
    """Set the variables of `export_environment`, given an address of rank 0."""
    port = comm.broadcast_object(_reserve_port(address) if comm.rank == 0 else 0, root=0)
    set_variables({
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.local_rank), "LOCAL_WORLD_SIZE": str(comm.local_size),
        **({} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"})})
    if interface := interface_to(address):
        set_default("GLOO_SOCKET_IFNAME", interface)


def _reserve_port(address: str) -> int:
    """Return a free port of an address, kept from other programs until this program uses it."""
    while _reserved:
        _reserved.pop().close()
    # It does not listen, so PyTorch can.
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    _reserved.append(reservation)
    return int(reservation.getsockname()[1])


def _default_backend() -> str:
    """Return the back ends of the default process group; "" if there is no group."""
    return dist.get_backend_config() if dist.is_initialized() else ""


@functools.cache
def _warn_of_other_backends() -> None:
    """From now on, warn if `env://` creates a default process group of another back end."""
    handler = rendezvous_handlers["env"]

    def rendezvous_by_environment(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        try:
            yield from handler(url, **options)
        finally:
            # The back end is not known before init_process_group returns and drops this generator.
            backend = _default_backend()
            if backend and "mpiring" not in backend and dist.get_rank() == 0:
                _log.warning(
                    "the default process group is of %s, not of mpiring: for mpiring, call "
                    "torch.distributed.init_process_group('mpiring', init_method='mpi://') before "
                    "a framework (Trainer, Accelerate, Lightning) makes one, and name no back end "
                    "to it", backend)

    rendezvous_handlers["env"] = rendezvous_by_environment


def _agree_on_address(comm: Communicator) -> tuple[str, int, socket.socket | None]:
    """Return an address and port of rank 0 that every rank reaches; on rank 0, also the listener.

    Raises TransportError if a rank reaches none of the addresses of rank 0.
    """
    # Listeners use free ports of the loopback address, or of each address of rank 0's host.
    addresses: Iterable[str] = ["127.0.0.1"] if comm.rank == 0 else []
    if comm.rank == 0 and comm.num_nodes > 1:
        addresses = ipv4_addresses().values()
    listeners = [socket.create_server((address, 0), backlog=4096) for address in addresses]
    token = secrets.token_bytes(16)
    offered: list[tuple[str, int]] = [listener.getsockname() for listener in listeners]
    offered, token = comm.broadcast_object((offered, token), root=0)
    if comm.num_nodes == 1:
        everywhere = offered
    else:
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(_answering(listener, token))
            # At once, since each address that is not reached takes a second.
            reaches = stack.enter_context(ThreadPoolExecutor(len(offered) or 1)).map(
                lambda address: _reaches(address, token), offered)
            reached = comm.allgather_object(
                [address for address, is_reached in zip(offered, reaches) if is_reached])
        everywhere = [address for address in offered
                      if all(address in addresses for addresses in reached)]
    chosen = None
    for listener in listeners:
        if listener.getsockname() in everywhere[:1]:
            chosen = listener
        else:
            listener.close()
    if not everywhere:
        lost = next(rank for rank, addresses in enumerate(reached)
                    if not addresses or addresses != offered)
        raise TransportError(
            f"rank {comm.rank}: no address of rank 0 is reached by all ranks: it listens on "
            f"{offered}, and rank {lost} reaches {reached[lost]}; does a firewall close the ports?")
    return *everywhere[0], chosen


@contextlib.contextmanager
def _answering(listener: socket.socket, token: bytes) -> Iterator[None]:
    """Send a token, which identifies rank 0's host, to every peer that connects."""
    done = threading.Event()
    listener.settimeout(0.05)

    def answer() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(token)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        listener.setblocking(True)


def _reaches(address: tuple[str, int], token: bytes) -> bool:
    try:
        with socket.create_connection(address, timeout=_PROBE_S) as connection:
            return connection.recv(len(token), socket.MSG_WAITALL) == token
    except OSError:
        return False
