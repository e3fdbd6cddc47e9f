"""Gathers facts about this process, its node and its container, without MPI."""

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ... import Config, ConfigError
from ...provisional import child_job, launch
from .facts import (
    Container, Gpus, Library, Memory, Mpirun, NetworkDevice, Processors, Rank, Slurm,
    incompatible, vendor_of, version_of)

# Packages that mpiring can use.
_PACKAGES = ("numpy", "mpi4py", "torch", "numba", "xxhash", "ml_dtypes", "matplotlib", "cupy")

_ROOT = Path("/")
# Time limit for commands. Slurm commands hang if the controller is down.
_COMMAND_S = 3.0
# If two MPI libraries are installed in one folder, `mpirun` belongs to one of them, and another
# name may belong to the other one.
_MPIRUNS = ("mpirun", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi")
# Kernel modules for direct transfers between networks and GPUs.
_GPU_MODULES = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")
# Names of MPICH and Open MPI files in /dev/shm, which remain when a job is killed.
_SHM_FILES = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.)[^/\s]*")
# Age of a leftover file in seconds; newer files may not be mapped yet.
_MIN_AGE_S = 60.0
# Device types of Ethernet and InfiniBand (if_arp.h).
_ARPHRD = ("1", "32")
# Files in a container that identify its runtime, the innermost runtime first. /.lock is enroot's
# lock file, which `enroot list` also uses.
_CONTAINER_FILES = {
    ".singularity.d": "Apptainer", ".lock": "enroot",
    "var/run/secrets/kubernetes.io": "Kubernetes", "run/.containerenv": "Podman",
    ".dockerenv": "Docker"}
# Names in the path of a control group.
_CGROUP_NAMES = {"kubepods": "Kubernetes", "libpod": "Podman", "docker": "Docker"}
_IMAGE_VARIABLES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
# Mount points that may contain /dev/shm, the most specific one first.
_SHM_MOUNT_POINTS = ("/dev/shm", "/dev", "/")


def rank(number: int, library: Library) -> Rank:
    """Return the facts about this process; its number is 0 if unknown."""
    variables = launch.launch_variables()
    return Rank(
        rank=number, host=socket.gethostname(), python=platform.python_version(),
        executable=sys.executable, versions=_versions(), library=library,
        start_method=multiprocessing.get_start_method(), variables=variables,
        settings_error=_settings_error(), processors=processors(), memory=memory(),
        devices=tuple(devices()), gpus=gpus(), container=container(variables))


def _versions() -> dict[str, str]:
    """Return the versions of the installed packages, without importing the packages."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(name) is not None:
                # CuPy wheels have other names than the module, so their version is not found.
                versions[name] = "installed"
                versions[name] = importlib.metadata.version(name)
    return versions


def _settings_error() -> str:
    try:
        Config()
    except ConfigError as error:
        return str(error)
    return ""


def processors(root: Path = _ROOT) -> Processors:
    """Return the processors that this process may use."""
    allowed = frozenset(launch.usable_processors())
    return Processors(allowed=allowed, cores=launch.count_cores(allowed, root),
                      online=os.cpu_count() or 1,
                      quota=launch.quota(root), load=os.getloadavg()[0])


def memory(root: Path = _ROOT) -> Memory:
    """Return the limits of this process's memory and files."""
    total = free = None
    with contextlib.suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
        total, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    leftover = _leftover_sizes(root)
    # For example "always [madvise] never".
    chosen = re.search(r"\[(\w+)\]", launch.text_of(
        root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(leftover_files=len(leftover), leftover_bytes=sum(leftover), shm_bytes=total,
                  shm_free_bytes=free, locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
                  open_files=_soft_limit(resource.RLIMIT_NOFILE),
                  huge_pages=chosen[1] if chosen else "")


def _leftover_sizes(root: Path) -> Collection[int]:
    """Return the sizes of this user's MPI files in /dev/shm that no process has mapped.

    Processes of other users cannot map these files.
    """
    sizes = {}
    for path in (root / "dev/shm").glob("*"):
        if _SHM_FILES.fullmatch(path.name):
            with contextlib.suppress(OSError):    # The file was deleted.
                status = path.stat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _MIN_AGE_S:
                    sizes[path.name] = status.st_size
    if sizes:
        for maps in (root / "proc").glob("[0-9]*/maps"):
            for name in _SHM_FILES.finditer(launch.text_of(maps)):
                sizes.pop(name[0], None)
    return sizes.values()


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def devices(root: Path = _ROOT) -> Iterator[NetworkDevice]:
    """Yield the network devices. The TCP interfaces of fast devices are separate devices."""
    for path in sorted((root / "sys/class/net").glob("*")):
        if launch.text_of(path / "type") in _ARPHRD:
            is_virtual = "/devices/virtual/" in str(path.resolve())
            speed = launch.text_of(path / "speed")
            yield NetworkDevice(
                name=path.name, kind="virtual" if is_virtual else "Ethernet",
                # The speed of a virtual device is not real.
                gbit=int(speed) / 1000 if speed.isdigit() and not is_virtual else 0.0,
                active=launch.text_of(path / "operstate") != "down")
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        name = path.parent.parent.name
        yield NetworkDevice(name=name, kind=_rdma_kind(name, launch.text_of(path / "link_layer")),
                            gbit=_first_number(path / "rate"),
                            active="ACTIVE" in launch.text_of(path / "state"))
    for path in sorted((root / "sys/class/cxi").glob("*")):
        yield NetworkDevice(name=path.name, kind="Slingshot",
                            gbit=_first_number(path / "device/properties/speed"))


def _first_number(path: Path) -> float:
    """Return the first number in a file, such as 200 in "200 Gb/sec (4X HDR)", or 0."""
    number = re.search(r"\d[\d.]*", launch.text_of(path))
    return float(number[0]) if number else 0.0


def _rdma_kind(name: str, link_layer: str) -> str:
    """Return the kind of a device with an InfiniBand interface."""
    if name.startswith("hfi1"):
        return "Omni-Path"
    if name.startswith(("efa", "rdmap")):
        return "EFA"
    return "RoCE" if link_layer == "Ethernet" else "InfiniBand"


def gpus(root: Path = _ROOT) -> Gpus:
    """Return the GPUs of the node and their kernel modules, without facts about MPI."""
    modules = tuple(name for name in _GPU_MODULES if (root / "sys/module" / name).exists())
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    if count:
        return Gpus(kind="NVIDIA", count=count, modules=modules,
                    driver=version_of(launch.text_of(root / "proc/driver/nvidia/version")))
    amd = [path for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
           if launch.text_of(path) not in ("", "0")]
    if amd:
        return Gpus(kind="AMD", count=len(amd),
                    driver=launch.text_of(root / "sys/module/amdgpu/version"))
    return Gpus()


def mpirun(library: Library) -> Mpirun:
    """Return the mpirun in PATH and the mpirun that was installed with the MPI library."""
    path = shutil.which("mpirun") or shutil.which("mpiexec") or ""
    homes = list(Path(library.path).resolve().parents)[:3] if library.path else []
    candidates = [file for home in homes for name in _MPIRUNS
                  if (file := shutil.which(name, path=str(home / "bin")))]
    if not candidates and not library.path:
        candidates = list(filter(None, [launch.find_mpiexec()]))
    of_library = next((file for file in candidates if not incompatible(
        vendor_of(_version_text(file)), library.vendor)), "")
    return Mpirun(path=path, text=_version_text(path) if path else "", of_library=of_library)


def _version_text(launcher: str) -> str:
    """Return the version text of a launcher, on one line."""
    return " ".join(output_of([launcher, "--version"]).split())[:200]


def slurm(variables: Iterable[str]) -> Slurm:
    """Return facts from the output of Slurm commands; contact the controller only in a job."""
    if shutil.which("srun") is None:
        return Slurm()
    # srun prints "MPI plugin types are..." and one type per line, on standard error.
    listed = re.findall(r"\b(none|cray_shasta|pmi2|pmix(?:_v\d+)?|openmpi)\b",
                        output_of(["srun", "--mpi=list"]))
    config = output_of(["scontrol", "show", "config"]) if "SLURM_JOB_ID" in variables else ""
    settings = dict(re.findall(r"(KillOnBadExit|MpiDefault)\s*=\s*(\S+)", config))
    return Slurm(installed=True, mpi_types=tuple(dict.fromkeys(listed)),
                 mpi_default=settings.get("MpiDefault", ""),
                 kills={"0": False, "1": True}.get(settings.get("KillOnBadExit", "")))


def output_of(command: list[str]) -> str:
    """Return the output of a command, or "" if it does not start or does not end in time."""
    try:
        ended = child_job.run(command, _COMMAND_S)
    except OSError:
        return ""
    return "" if ended.status is None else "\n".join(ended.lines)


def loaded_libraries() -> list[Path]:
    """Return the shared libraries that this process has loaded."""
    lines = launch.text_of(_ROOT / "proc/self/maps").splitlines()
    names = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return sorted(Path(name) for name in names if name.startswith("/"))


def container(variables: Mapping[str, str], root: Path = _ROOT) -> Container:
    """Return the container of this process, whose variables are those of `launch_variables`."""
    proc, folder = root / "proc", variables.get("PMIX_SERVER_TMPDIR", "")
    shm = shared_memory(proc / "self")
    return Container(
        kinds=tuple(_container_kinds(variables, root)),
        image=next((variables[name] for name in _IMAGE_VARIABLES if variables.get(name)), ""),
        machine=launch.text_of(proc / "sys/kernel/random/boot_id"), shm=shm,
        processes=_namespace(proc / "self/ns/pid"), users=_namespace(proc / "self/ns/user"),
        private=launch.launched_first(variables, proc),
        other_shm=sum(other != shm for other in _other_doctors_shm(proc) if other and shm),
        missing_folder=folder if folder and not (root / folder.lstrip("/")).exists() else "")


def _container_kinds(variables: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield the container runtimes that were detected, in the order of `_CONTAINER_FILES`."""
    group = launch.text_of(root / "proc/self/cgroup")
    kinds = {kind for name, kind in launch.CONTAINERS.items() if kind and name in variables}
    kinds |= {kind for name, kind in _CONTAINER_FILES.items() if (root / name).exists()}
    kinds |= {kind for name, kind in _CGROUP_NAMES.items() if name in group}
    yield from (kind for kind in _CONTAINER_FILES.values() if kind in kinds)
    # This variable names a runtime that may have been yielded already.
    name = variables.get("container", "")
    if name and not kinds:
        yield {"podman": "Podman", "docker": "Docker"}.get(name, name)


def shared_memory(process: Path) -> str:
    """Return the name of a process's file system at /dev/shm, or "" if it is hidden.

    The process, a folder of /proc, may belong to another user. The name has the numbers of the
    device and of the folder in it, and is unique on the machine.
    """
    mounts = {}
    for line in launch.text_of(process / "mountinfo").splitlines():
        _, _, device, folder, place, *_ = line.split()
        mounts[place] = f"{device} {folder}"    # The last mount hides earlier ones.
    return next((mounts[place] for place in _SHM_MOUNT_POINTS if place in mounts), "")


def _other_doctors_shm(proc: Path) -> Iterator[str]:
    """Yield the file system at /dev/shm of each visible doctor process of this user."""
    for path in proc.glob("[0-9]*/cmdline"):
        words = launch.text_of(path).split("\0")
        # The command of a launcher also contains these words.
        is_doctor = (Path(words[0]).name.startswith("python") and "--examine" not in words
                     and {"mpiring", "doctor"} <= set(words))
        with contextlib.suppress(OSError):    # The process has ended.
            if is_doctor and path.stat().st_uid == os.getuid():
                yield shared_memory(path.parent)


def _namespace(path: Path) -> str:
    """Return the number of a namespace, or "" if it is hidden or does not exist."""
    try:
        return re.sub(r"\D", "", str(path.readlink()))
    except OSError:
        return ""
