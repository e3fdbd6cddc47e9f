"""Holds the facts about ranks, nodes and networks, from which the findings are derived."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...provisional import launch

# Names of vendors in the version texts of libraries and launchers. MPICH is the last one, because
# other vendors' texts also contain it.
_VENDORS = {
    "Intel MPI": r"Intel\(R\) MPI", "Cray MPICH": r"CRAY MPICH", "MVAPICH": r"MVAPICH",
    "Open MPI": r"Open MPI|OpenRTE|PRRTE|prterun", "MPICH": r"MPICH|HYDRA"}
# Vendors whose launchers can start each other's ranks, because they use the same PMI.
_HYDRA = {"MPICH", "Intel MPI", "MVAPICH"}
# PMI that each vendor's library needs, by srun's name; pmi2 for all others.
_PMI = {"Open MPI": "pmix", "Cray MPICH": "cray_shasta"}

Key = TypeVar("Key", bound=Hashable)

# Values that disable an MPICH setting.
_FALSE = ("0", "no", "false", "off")


def vendor_of(text: str) -> str:
    """Return the vendor of an MPI library or a launcher from its version text, or ""."""
    return next((vendor for vendor, pattern in _VENDORS.items() if re.search(pattern, text)), "")


def version_of(text: str) -> str:
    """Return the first version number in a text, or ""."""
    number = re.search(r"\d+\.\d+[\w.]*", text)
    return number[0].rstrip(".") if number else ""


def incompatible(first: str, second: str) -> bool:
    """Return whether one vendor's launcher cannot start ranks of the other vendor's library.

    Return False if an argument is not the name of a vendor.
    """
    pair = {first, second}
    return first != second and pair <= _VENDORS.keys() and not pair <= _HYDRA


def first_set(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the first of these variables that is neither empty nor 0, or ""."""
    return next((name for name in names if variables.get(name, "0") not in ("", "0")), "")


@dataclass(frozen=True, kw_only=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        text: Version text of the library, on one line; "" if it could not be loaded.
        standard: Version of the MPI standard that the library implements.
        pmix: If true, the library has loaded libpmix or contains PMIx.
    """

    path: str = ""
    text: str = ""
    standard: str = ""
    error: str = ""
    pmix: bool = False

    @property
    def vendor(self) -> str:
        """The vendor, or ""."""
        return vendor_of(self.text)

    @property
    def name(self) -> str:
        """Vendor and version; for an unknown vendor, the beginning of the version text."""
        return f"{self.vendor or self.text[:40]} {version_of(self.text)}".strip()

    @property
    def pmi(self) -> str:
        """The PMI that the library needs, by srun's name."""
        return _PMI.get(self.vendor, "pmi2")


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The processors that a process may use.

    Attributes:
        allowed: Numbers of the processors (sched_getaffinity).
        cores: Number of physical cores; less than `len(allowed)` if cores have several hardware
            threads.
        online: Number of processors of the node.
        quota: Limit of a cgroup, in processors; infinite without a limit.
    """

    allowed: frozenset[int] = frozenset((0,))
    cores: int = 1
    online: int = 1
    quota: float = math.inf
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Limits of the memory and the files of a process.

    Attributes:
        shm_bytes, shm_free_bytes: Size and free space of /dev/shm; None without /dev/shm.
        locked_bytes: Number of bytes that may be locked (ulimit -l); None without a limit.
        open_files: Number of files that may be open (ulimit -n); None without a limit.
        leftover_files, leftover_bytes: Number and size of this user's MPI files in /dev/shm that
            no process uses.
        huge_pages: The kernel's setting for huge pages: "always", "madvise" (only on request),
            "never", or "" if unknown.
    """

    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    locked_bytes: int | None = None
    open_files: int | None = None
    leftover_files: int = 0
    leftover_bytes: int = 0
    huge_pages: str = ""


@dataclass(frozen=True, kw_only=True)
class NetworkDevice:
    """A network device.

    Attributes:
        kind: "Ethernet", "InfiniBand", "RoCE", "Omni-Path", "EFA", "Slingshot" or "virtual".
        gbit: Speed in Gbit/s; 0 if unknown.
    """

    name: str
    kind: str
    gbit: float = 0.0
    active: bool = True

    @property
    def is_fast(self) -> bool:
        """Whether MPI should use the device without TCP."""
        return self.kind not in ("Ethernet", "virtual")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of a node, and the software between them and the network.

    Attributes:
        kind: "NVIDIA", "AMD" or "".
        modules: Loaded kernel modules for GPUDirect.
        aware: Whether the MPI library says that it accepts GPU memory; None if it has no function
            that says so.
        transports: Installed UCX modules for GPUs; None if MPI does not use UCX.
        gtl: If true, Cray's library for GPUs is loaded.
        visible: PCI addresses of the NVIDIA GPUs that CuPy sees.
        address: PCI address of this rank's GPU.
        problem: Reason why mpiring cannot use a GPU, or "".
        nccl: Version of NCCL, and its path; "" if there is none, for the reason `nccl_problem`.
    """

    kind: str = ""
    count: int = 0
    driver: str = ""
    modules: tuple[str, ...] = ()
    aware: bool | None = None
    transports: tuple[str, ...] | None = None
    gtl: bool = False
    visible: tuple[str, ...] = ()
    address: str = ""
    problem: str = ""
    sharing_error: str = ""
    nccl: str = ""
    nccl_problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of a process, and the other ranks that are visible in it.

    Attributes:
        kinds: Container runtimes, the innermost first, such as ("Apptainer",); () outside of
            containers.
        image: Name or file of the image; "" if unknown.
        machine: Boot ID of the machine, equal in all its containers; "" if unknown.
        shm: Name of the file system at /dev/shm, unique on the machine; "" if unknown.
        processes, users: Numbers of the PID and user namespaces; "" if unknown. Processes in other
            PID namespaces are invisible. In other user namespaces, their memory is inaccessible.
        private: If true, the launcher has started this container for one rank.
        other_shm: Number of visible doctor processes that have another /dev/shm.
        missing_folder: Folder of the launcher's PMIx, if the container lacks it; otherwise "".
    """

    kinds: tuple[str, ...] = ()
    image: str = ""
    machine: str = ""
    shm: str = ""
    processes: str = ""
    users: str = ""
    private: bool = False
    other_shm: int = 0
    missing_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Facts about a process.

    Attributes:
        rank: Rank in the MPI world, or in the launcher's variables if MPI failed, or 0.
        node: Number of the node. Ranks of a node share memory.
        versions: Versions of the installed packages, by name.
        thread_level: Thread level that MPI provides; "" if MPI was not started.
        start_method: Start method of Python's multiprocessing.
        variables: Result of `launch.environment.launch_variables`.
        settings_error: Reason why `Config()` rejects the variables, or "".
    """

    rank: int = 0
    host: str = "localhost"
    node: int = 0
    python: str = ""
    executable: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    library: Library = Library()
    thread_level: str = ""
    start_method: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    settings_error: str = ""
    processors: Processors = Processors()
    memory: Memory = Memory()
    devices: Sequence[NetworkDevice] = ()
    gpus: Gpus = Gpus()
    container: Container = Container()

    @property
    def fast_devices(self) -> list[NetworkDevice]:
        """Connected devices that MPI should use without TCP."""
        return [device for device in self.devices if device.is_fast and device.active]


def grouped(ranks: Sequence[Rank], key: Callable[[Rank], Key]) -> dict[Key, list[Rank]]:
    """Return groups of ranks with the same key, by key."""
    groups: dict[Key, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


def cma_fails(ranks: Sequence[Rank]) -> bool:
    """Return whether MPICH will fail to read memory of another rank on the same node.

    MPICH 5.0.2 reads messages of 16 KiB and more from the memory of the sender (cross-memory
    attach). It fails if the ranks are in different namespaces.
    """
    readers = [rank for rank in ranks if rank.library.vendor == "MPICH"
               and rank.variables.get("MPIR_CVAR_CH4_CMA_ENABLE", "1").lower() not in _FALSE]
    return any(len({(rank.container.processes, rank.container.users) for rank in neighbors}) > 1
               for neighbors in grouped(readers, lambda rank: rank.node).values())


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The seconds of 8-byte messages between two ranks, and bandwidth of large ones, one way."""

    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of an examination.

    Attributes:
        stage: LOADING, STARTING, EXCHANGING, TRYING, MEASURING or ENDING.
        reason: Text such as "Bus error (signal 7)", "exit status 16", "no end within 30 s".
        timed_out: If true, the process was killed at the deadline.
    """

    stage: str
    reason: str
    timed_out: bool = False
    printed: Sequence[str] = ()


# Stages of an examination, in order.
LOADING, STARTING, EXCHANGING, TRYING, MEASURING, ENDING = (
    "loading the MPI library", "MPI_Init", "the first exchange between ranks",
    "an allreduce of mpiring", "measuring", "MPI_Finalize")


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """The mpirun in PATH, and its version text on one line.

    The path `of_library` is that of the mpirun that was installed with the MPI library. Unknown
    paths are "".
    """

    path: str = ""
    text: str = ""
    of_library: str = ""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The output of Slurm's commands.

    Attributes:
        mpi_types: Types that `srun --mpi=list` prints.
        mpi_default: Type that srun uses without `--mpi`.
        kills: If true, a failed rank ends the step (KillOnBadExit); None if unknown.
    """

    installed: bool = False
    mpi_types: tuple[str, ...] = ()
    mpi_default: str = ""
    kills: bool | None = None

    def offers(self, pmi: str) -> bool:
        """Return whether srun supports a PMI, in any version."""
        return any(kind.startswith(pmi) for kind in self.mpi_types)


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All facts about a job.

    Attributes:
        ranks: Ranks in order; only the reporting rank if MPI failed before the ranks connected.
        size: Size of the MPI world; 0 if MPI was not started.
        wanted: Number of ranks that the launcher was asked for.
        wanted_by: Variable and launcher that are the source of `wanted`, or "".
        warnings: Warnings that mpiring logged during a test allreduce.
        trial_errors: Errors of the test allreduce.
        printed: Last lines that the MPI library printed.
        allreduce_s: Time of the test allreduce in seconds; None if it was not run.
    """

    ranks: Sequence[Rank] = (Rank(),)
    size: int = 1
    wanted: int = 1
    wanted_by: str = ""
    warnings: Sequence[str] = ()
    trial_errors: Sequence[str] = ()
    printed: Sequence[str] = ()
    allreduce_s: float | None = None
    pairs: Sequence[Pair] = ()
    failure: Failure | None = None
    mpirun: Mpirun = Mpirun()
    slurm: Slurm = Slurm()

    @property
    def reporter(self) -> Rank:
        """The reporting rank."""
        return self.ranks[0]

    @property
    def library(self) -> Library:
        """The MPI library of the reporting rank."""
        return self.reporter.library

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables of the reporting rank."""
        return self.reporter.variables

    @property
    def launcher(self) -> launch.Launcher:
        """The launcher of the ranks; its name is "" if no launcher has started them."""
        name = launch.launcher_of(self.variables)
        return next((launcher for launcher in launch.launchers(self.variables)
                     if launcher.name == name), launch.Launcher("", ""))

    @property
    def is_split(self) -> bool:
        """Whether the launcher started several ranks, but each has a separate MPI world."""
        return self.size == 1 and self.wanted > 1 and self.launcher.name != ""

    def nodes(self) -> dict[int, list[Rank]]:
        """Return the ranks of each node, by node number."""
        return grouped(self.ranks, lambda rank: rank.node)

    def node_names(self) -> dict[int, str]:
        """Return the names of the nodes; if several have the same name, add their numbers."""
        names = {node: ranks[0].host for node, ranks in self.nodes().items()}
        hosts = list(names.values())
        return {node: host if hosts.count(host) == 1 else f"{host} (node {node})"
                for node, host in names.items()}
