"""Agrees, over MPI, on the address of the store that torch.distributed needs."""

import contextlib
import functools
import logging
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import register_rendezvous_handler

from ..communicator import Communicator, init, or_world
from ..errors import ConfigError, TransportError
from ..launch.environment import set_variables
from ..launch.host import ipv4_addresses
from .private import rendezvous_handlers

_log = logging.getLogger("mpiring")

_PROBE_S = 1.0


def register() -> None:
    """Make `init_method="mpi://"` known to torch.distributed."""
    register_rendezvous_handler("mpi", rendezvous)


def rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Serve `init_method="mpi://"`: yield a store, and MPI's rank and size.

    The store listens on rank 0's loopback if all ranks are on one node, otherwise on the address at
    which the ranks have reached rank 0. PyTorch's stores serve everybody who can connect. So keys
    get a random prefix, which only the ranks know until somebody lists the keys.

    Also sets the variables of `export_environment`: frameworks that use the default process group
    still read the number of processes from them.

    Args:
        url: "mpi://", followed by rank and world_size if the user gave them.
        timeout: Of the store.

    Raises:
        ConfigError: The user's rank or world_size is not MPI's.
        LaunchError: As mpiring.init.

    Collective: yes. Blocking: yes.
    """
    with init() as comm:
        _refuse_others(url, comm)
        address, port, listener = _meet(comm)
        export_environment(comm)
        rank, size = comm.rank, comm.size
        prefix = comm.broadcast_object(secrets.token_hex(16), root=0)
    if listener is None:
        store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
    else:
        # The store takes over the socket, so that no other program can take the port.
        store = dist.TCPStore(
            address, port, size, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach())
    yield dist.PrefixStore(prefix, store), rank, size
    raise ConfigError("init_method='mpi://' cannot be used again in one call")


def _refuse_others(url: str, comm: Communicator) -> None:
    """Compare the rank and world size in a URL, if there are any, with MPI's."""
    query = dict(part.split("=") for part in url.partition("?")[2].split("&") if part)
    for name, mpi in (("rank", comm.rank), ("world_size", comm.size)):
        if query.get(name, "-1") not in ("-1", str(mpi)):
            raise ConfigError(
                f"{name}={query[name]}, but this is rank {comm.rank} of {comm.size} in MPI; "
                f"leave {name} out: MPI knows it")


def export_environment(comm: Communicator | None = None) -> None:
    """Set the variables for frameworks that insist on `init_method="env://"`.

    MASTER_ADDR and MASTER_PORT (an address of rank 0 that all ranks reach, and a port that was
    free there), RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; and, where PyTorch finds no
    accelerator, ACCELERATE_USE_CPU, without which Hugging Face's Accelerate makes each process a
    world of its own. Rank 0 warns of a default process group of another back end that is made of
    them.

    Args:
        comm: A communicator over all ranks.

    Raises:
        TransportError: A rank reaches none of rank 0's addresses.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    address, port, listener = _meet(comm)
    if listener is not None:
        listener.close()
    set_variables({
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.local_rank), "LOCAL_WORLD_SIZE": str(comm.local_size),
        **({} if torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"})})
    _watch_others()


@functools.cache
def _watch_others() -> None:
    """From now on, warn of a default process group of another back end by `env://`."""
    handler = rendezvous_handlers["env"]

    def rendezvous_by_environment(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        try:
            yield from handler(url, **options)
        finally:
            # init_process_group drops this generator when it returns; only then is the back end
            # known.
            backend = dist.get_backend_config() if dist.is_initialized() else "mpiring"
            if "mpiring" not in backend and dist.get_rank() == 0:
                _log.warning(
                    "the default process group is of %s, not of mpiring: for mpiring, call "
                    "torch.distributed.init_process_group('mpiring', init_method='mpi://') before "
                    "a framework (Trainer, Accelerate, Lightning) makes one, and name no back end "
                    "to it", backend)

    rendezvous_handlers["env"] = rendezvous_by_environment


def _meet(comm: Communicator) -> tuple[str, int, socket.socket | None]:
    """Return an address and port of rank 0 that every rank reaches; on rank 0, also its listener.

    Raises:
        TransportError: A rank reaches none of rank 0's addresses.
    """
    # On free ports of loopback, or of each address of rank 0's host.
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
            reached = comm.allgather_object(
                [address for address in offered if _reaches(address, token)])
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
    """Send a token to every peer that connects; another host at the same address lacks it."""
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
