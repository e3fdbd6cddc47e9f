"""Gathers in which container a process lives, and what it sees there of the ranks beside it."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...launch.environment import CONTAINERS, launched_first
from .facts import Container

_ROOT = Path("/")
# What runtimes put into the file system of a container, those that people start first. enroot
# locks its containers with a file, by which `enroot list` knows them.
_FILES = {
    ".singularity.d": "Apptainer", ".lock": "enroot",
    "var/run/secrets/kubernetes.io": "Kubernetes", "run/.containerenv": "Podman",
    ".dockerenv": "Docker"}
# Names in the path of a control group.
_GROUPS = {"kubepods": "Kubernetes", "libpod": "Podman", "docker": "Docker"}
_IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
# Where tmpfs is mounted that programs find at /dev/shm, the most specific place first.
_PLACES = ("/dev/shm", "/dev", "/")


def container(variables: Mapping[str, str], root: Path = _ROOT) -> Container:
    """Return where this process lives.

    Args:
        variables: From `launch.environment.launch_variables`.
        root: Where the system's files are.
    """
    proc, folder = root / "proc", variables.get("PMIX_SERVER_TMPDIR", "")
    mine = shared_memory(proc / "self")
    return Container(
        kinds=tuple(dict.fromkeys(_kinds(variables, root))),
        image=next((variables[name] for name in _IMAGES if variables.get(name)), ""),
        machine=text_of(proc / "sys/kernel/random/boot_id"), shm=mine,
        processes=_namespace(proc / "self/ns/pid"), users=_namespace(proc / "self/ns/user"),
        own=launched_first(variables, proc),
        apart=sum(found != mine for found in _others(proc) if found and mine),
        missing=folder if folder and not (root / folder.lstrip("/")).exists() else "")


def _kinds(variables: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield the kinds of container whose marks there are, by the order of `_FILES`."""
    group = text_of(root / "proc/self/cgroup")
    found = {kind for name, kind in CONTAINERS.items() if name in variables}
    found |= {kind for name, kind in _FILES.items() if (root / name).exists()}
    found |= {kind for name, kind in _GROUPS.items() if name in group}
    yield from (kind for kind in _FILES.values() if kind in found)
    # Podman's container=podman has been found already, by its file.
    name = variables.get("container", "")
    if name and not found - {""}:
        yield {"podman": "Podman", "docker": "Docker"}.get(name, name)


def shared_memory(process: Path) -> str:
    """Return the file system that a process finds at /dev/shm, or "" where it is hidden.

    Args:
        process: Its folder in /proc; another user's will do.

    Returns:
        Its device, and the folder in it: on one machine, no other has the same.
    """
    mounts = {}
    for line in text_of(process / "mountinfo").splitlines():
        _, _, device, folder, place, *_ = line.split()
        mounts[place] = f"{device} {folder}"    # the last one hides the others
    return next((mounts[place] for place in _PLACES if place in mounts), "")


def _others(proc: Path) -> Iterator[str]:
    """Yield what others of this user's doctors that are seen find at /dev/shm."""
    for path in proc.glob("[0-9]*/cmdline"):
        words = text_of(path).split("\0")
        try:
            is_mine = path.stat().st_uid == os.getuid()
        except OSError:
            continue    # it has ended meanwhile
        # Launchers have these words in their commands, too.
        is_python = Path(words[0]).name.startswith("python")
        if is_mine and is_python and "--examine" not in words and (
                {"mpiring", "doctor"} <= set(words)):
            yield shared_memory(path.parent)


def _namespace(path: Path) -> str:
    """Return the number of a namespace, "" where there are none or they are hidden."""
    try:
        return re.sub(r"\D", "", str(path.readlink()))
    except OSError:
        return ""


def text_of(path: Path) -> str:
    """Return a small file of the system's, stripped, or "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
