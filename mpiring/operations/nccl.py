"""Decides whether a communicator uses NCCL, and opens it, on all ranks or on none."""

import functools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import MpiringError
from ..gpu.device import Device
from ..gpu.nccl import Nccl, nccl_library
from ..text import first_few
from ..transport.base import Schedule
from .collectives import Collectives

_log = logging.getLogger("mpiring")

# Seconds after which ranks do without NCCL, whose network may not connect them.
_CREATION_S = 120.0
ONE_RANK = "there is only one rank"
OWN_MEMORY = ("the ranks see each other's GPU memory, in which mpiring combines vectors without "
              "NCCL; MPIRING_NCCL=yes uses NCCL")


class Opened(NamedTuple):
    """A communicator of NCCL, or None and the reason.

    If `alarms`, the GPUs of all ranks can tell whether results are finite.
    """

    nccl: Nccl | None
    problem: str
    alarms: bool = False


def opened(collectives: Collectives, device: Device, setting: str, *,
           needed: bool) -> Schedule[Opened]:
    """Open NCCL on all ranks, or on none.

    Args:
        setting: The setting `nccl`.
        needed: If false, "auto" is "no".
    """
    if collectives.size == 1:
        return Opened(None, ONE_RANK)
    if setting == "no":
        return Opened(None, "MPIRING_NCCL=no")
    if setting == "auto" and not needed:
        return Opened(None, OWN_MEMORY)
    answers = yield from _texts(collectives, json.dumps(_facts(device)))
    facts = [json.loads(text) for text in answers]
    problem, nccl = _problem(facts, setting), None
    if not problem:
        nccl, problem = yield from _created(collectives, device)
    _log_use(collectives.rank, problem or f"uses {nccl}")
    return Opened(nccl, problem, all(fact.get("alarms") for fact in facts))


def _texts(collectives: Collectives, text: str) -> Schedule[list[str]]:
    gathered = yield from collectives.allgather_bytes(np.frombuffer(text.encode(), np.uint8))
    return [bytes(each).decode() for each in gathered]


def _facts(device: Device) -> dict[str, str]:
    """Return the GPU of this rank, and the version of its library, or why it cannot be used."""
    if not device.gpu.address:
        return {"problem": f"{device} is no GPU of CUDA or HIP"}
    try:
        library = nccl_library()
    except MpiringError as error:
        return {"problem": str(error)}
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        host = os.uname().nodename
    return {"gpu": f"{host.strip()} {device.gpu.address}", "version": library.version,
            "path": library.path, "alarms": "" if device.gpu.unqueued else "yes"}


def _problem(facts: Sequence[dict[str, str]], setting: str) -> str:
    """Return why these ranks cannot use NCCL together; "" if they can."""
    for rank, fact in enumerate(facts):
        if "problem" in fact:
            return f"rank {rank} cannot use NCCL: {fact['problem']}"
    for rank, fact in enumerate(facts):
        if fact["version"] != facts[0]["version"]:
            return (f"rank 0 has NCCL {facts[0]['version']} ({facts[0]['path']}), and rank {rank} "
                    f"has {fact['version']} ({fact['path']}): install one version on all nodes")
    gpu, ranks = Counter(fact["gpu"] for fact in facts).most_common(1)[0]
    # New versions may accept that if their user asks for it.
    if ranks > 1 and setting == "auto":
        return f"{ranks} ranks share the GPU {gpu.rpartition(' ')[2]}: NCCL needs one for each rank"
    return ""


def _created(collectives: Collectives, device: Device) -> Schedule[tuple[Nccl | None, str]]:
    """Create a communicator on all ranks; if that fails on a rank, return None and the reason."""
    # Rank 0 may fail alone, which the others must know before they wait for it.
    content = b""
    if collectives.rank == 0:
        try:
            content = b"+" + nccl_library().new_identity()
        except MpiringError as error:
            content = f"rank 0: {error}".encode()
    received = yield from collectives.broadcast_bytes(np.frombuffer(content, np.uint8), 0)
    content = bytes(received)
    if not content.startswith(b"+"):
        return None, content.decode()
    # NCCL does not advance MPI, so all ranks must have the identity before one of them waits.
    yield from collectives.barrier()
    creation = _Creation(collectives, device, content[1:])
    yield (creation,)
    answers = yield from _texts(collectives, creation.problem)
    # The first problem may only be that another rank has one.
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(answers) if problem]
    if problems:
        # Those that have a communicator do not wait for the others.
        if creation.nccl is not None:
            creation.nccl.abort()
        return None, first_few(problems, 4)
    return creation.nccl, ""


class _Creation:
    """A request that is complete when a thread has created the communicator, or has a problem.

    Meanwhile, this rank answers others, which report if a rank never comes.
    """

    def __init__(self, collectives: Collectives, device: Device, identity: bytes) -> None:
        self.nccl: Nccl | None = None
        self.problem = ""
        self._end_s = time.monotonic() + _CREATION_S
        self._thread = threading.Thread(
            target=self._create, args=(device, collectives.rank, collectives.size, identity),
            daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return "the creation of a communicator by NCCL"

    def _create(self, *arguments: Any) -> None:
        try:
            self.nccl = Nccl(nccl_library(), *arguments)
        except BaseException as error:
            self.problem = str(error) or repr(error)

    def test(self) -> bool:
        if self._thread.is_alive() and time.monotonic() > self._end_s:
            self.problem = (f"ncclCommInitRank has not returned in {_CREATION_S:g} s; "
                            f"NCCL_DEBUG=INFO shows the network that it uses")
        return bool(self.problem) or not self._thread.is_alive()


@functools.cache
def _log_use(rank: int, text: str) -> None:
    """Log once, on one rank, whether NCCL is used."""
    if rank == 0:
        _log.info("NCCL for vectors on GPUs: %s", text)
