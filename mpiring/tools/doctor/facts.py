"""Holds the facts about ranks, nodes and networks, which are all that the judges read."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...launch.environment import Launcher, launcher_of, launchers

# How libraries and launchers name themselves, special ones first: several contain MPICH.
_VENDORS = {
    "Intel MPI": r"Intel\(R\) MPI", "Cray MPICH": r"CRAY MPICH", "MVAPICH": r"MVAPICH",
    "Open MPI": r"Open MPI|OpenRTE|PRRTE|prterun", "MPICH": r"MPICH|HYDRA"}
# Libraries whose ranks each other's launchers can start: they share a PMI.
_HYDRA = {"MPICH", "Intel MPI", "MVAPICH"}
# The PMI that each vendor's library needs, as srun names it.
_PMI = {"Open MPI": "pmix", "Cray MPICH": "cray_shasta"}

Key = TypeVar("Key", bound=Hashable)

# How MPICH's switches are turned off.
_NO = ("0", "no", "false", "off")


def vendor_of(text: str) -> str:
    """Return the maker of an MPI library or a launcher, by its text on its version; or ""."""
    return next((vendor for vendor, pattern in _VENDORS.items() if re.search(pattern, text)), "")


def version_of(text: str) -> str:
    """Return the first version number in a text, or ""."""
    number = re.search(r"\d+\.\d+[\w.]*", text)
    return number[0].rstrip(".") if number else ""


def incompatible(first: str, second: str) -> bool:
    """Return whether one vendor's launcher cannot start ranks of the other's library.

    False if one of them is not the name of a vendor.
    """
    pair = {first, second}
    return first != second and pair <= _VENDORS.keys() and not pair <= _HYDRA


def first_on(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the first of these variables that is neither empty nor 0, or ""."""
    return next((name for name in names if variables.get(name, "0") not in ("", "0")), "")


@dataclass(frozen=True, kw_only=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        path: Of the MPI library.
        text: How the library names itself, on one line; "" where it could not be loaded.
        standard: Version of MPI that it implements.
        error: Why it could not be loaded.
        pmix: It has loaded PMIx's library, or is one that always has it inside.
    """

    path: str = ""
    text: str = ""
    standard: str = ""
    error: str = ""
    pmix: bool = False

    @property
    def vendor(self) -> str:
        """The maker, or ""."""
        return vendor_of(self.text)

    @property
    def name(self) -> str:
        """The vendor, or what the library says, and the version."""
        return f"{self.vendor or self.text[:40]} {version_of(self.text)}".strip()

    @property
    def pmi(self) -> str:
        """The PMI that it needs, as srun names it."""
        return _PMI.get(self.vendor, "pmi2")


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The processors that a process may use.

    Attributes:
        allowed: Their numbers (sched_getaffinity).
        cores: Number of physical cores; less than `len(allowed)` if cores have several hardware
            threads.
        online: Number of processors of the node.
        quota: Limit of a cgroup, in processors; infinite without one.
        load: Number of processes that wanted a processor, averaged over the last minute.
    """

    allowed: frozenset[int] = frozenset((0,))
    cores: int = 1
    online: int = 1
    quota: float = math.inf
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Limits of a process's memory, in bytes; None where there is no such thing, or no limit.

    Attributes:
        shm_bytes, shm_free_bytes: Of /dev/shm.
        locked_bytes: How much may be locked (ulimit -l).
        open_files: How many may be open (ulimit -n).
        left_files, left_bytes: Of this user's ranks in /dev/shm, which none of them has mapped.
    """

    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    locked_bytes: int | None = None
    open_files: int | None = None
    left_files: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class NetworkDevice:
    """A network device.

    Attributes:
        kind: "Ethernet", "InfiniBand", "RoCE", "Omni-Path", "EFA", "Slingshot" or "virtual".
        gbit: Its speed in Gbit/s; 0 if the system does not know.
        active: It is connected.
    """

    name: str
    kind: str
    gbit: float = 0.0
    active: bool = True

    @property
    def is_fast(self) -> bool:
        """Whether MPI should go past the system's TCP with it."""
        return self.kind not in ("Ethernet", "virtual")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of a node, and the software between them and the network.

    Attributes:
        kind: "NVIDIA", "AMD" or "".
        count: Number of GPUs.
        driver: Its version.
        modules: Kernel modules for GPUDirect that are loaded.
        aware: Answer of the MPI library to the question whether it takes GPU memory; None if it
            has no such question.
        transports: UCX's installed modules for GPUs; None if MPI does not use UCX.
        gtl: Cray's library for GPUs is loaded.
        seen: NVIDIA's GPUs that CuPy sees, by their addresses on the PCI bus.
        address: The address of this rank's GPU.
        problem: Reason why mpiring can use none, or "".
        unshared: Reason why processes cannot open its memory to each other, or "".
    """

    kind: str = ""
    count: int = 0
    driver: str = ""
    modules: tuple[str, ...] = ()
    aware: bool | None = None
    transports: tuple[str, ...] | None = None
    gtl: bool = False
    seen: tuple[str, ...] = ()
    address: str = ""
    problem: str = ""
    unshared: str = ""


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of a process, and the other ranks that are visible in it.

    Attributes:
        kinds: "Apptainer", "enroot", "Kubernetes", "Podman", "Docker", or another name
            that the container has; () outside of containers.
        image: Its name or file, if the runtime tells it.
        machine: Identity of the running system, equal in all its containers; "" if unknown, as for
            the following three.
        shm: The file system at /dev/shm, by a name that is unique on the machine.
        processes, users: Namespaces of processes and users. Processes of other namespaces are
            invisible, or their memory is closed.
        private: The launcher has started this container for this rank alone.
        apart: Number of visible processes of the doctor that have another /dev/shm.
        missing: The folder of the launcher's PMIx, if it is not there inside; otherwise "".
    """

    kinds: tuple[str, ...] = ()
    image: str = ""
    machine: str = ""
    shm: str = ""
    processes: str = ""
    users: str = ""
    private: bool = False
    apart: int = 0
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Facts about a process.

    Attributes:
        rank: In the MPI world, else as the launcher counts; 0 where neither is known.
        host: Its node's name.
        node: Its node's number among those whose ranks share memory.
        python, executable: Version and path.
        versions: Of packages, by name; those that are not installed are missing.
        thread_level: That MPI has given; "" while it is not started.
        start_method: Of Python's multiprocessing.
        variables: From `launch.environment.launch_variables`.
        settings_error: Why `Config()` refuses the variables, or "".
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
        """Connected devices that MPI should use past the system's TCP."""
        return [device for device in self.devices if device.is_fast and device.active]


def grouped(ranks: Sequence[Rank], key: Callable[[Rank], Key]) -> dict[Key, list[Rank]]:
    """Return the ranks that have a fact in common, by this fact."""
    groups: dict[Key, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


def is_closed(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks of a node cannot read each other's memory, though their MPICH will.

    Seen with MPICH 5.0.2: it reads messages of 16 KiB and more there, and fails where that is
    refused between namespaces.
    """
    readers = [rank for rank in ranks if rank.library.vendor == "MPICH"
               and rank.variables.get("MPIR_CVAR_CH4_CMA_ENABLE", "1").lower() not in _NO]
    return any(len({(rank.container.processes, rank.container.users) for rank in neighbors}) > 1
               for neighbors in grouped(readers, lambda rank: rank.node).values())


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A measurement between two ranks.

    Attributes:
        ranks: The two.
        latency_s: Of 8 bytes, one way.
        bytes_per_s: Of large messages, one way.
    """

    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an examination ended before its time.

    Attributes:
        stage: From `STAGES`.
        how: "Bus error (signal 7)", "exit status 16", "no end within 30 s".
        late: It was ended at the deadline.
        printed: Lines that the process printed.
    """

    stage: str
    how: str
    late: bool = False
    printed: Sequence[str] = ()


# The stages of an examination, in their order.
LOADING, STARTING, EXCHANGING, TRYING, MEASURING, ENDING = (
    "loading the MPI library", "MPI_Init", "the first exchange between ranks",
    "an allreduce of mpiring", "measuring", "MPI_Finalize")


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """The mpirun that a user's shell finds.

    Attributes:
        path: Its path, or "".
        text: Text of its version, on one line.
        of_library: The mpirun of the library's own installation, or "".
    """

    path: str = ""
    text: str = ""
    of_library: str = ""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The output of Slurm's commands.

    Attributes:
        installed: If true, there is an srun.
        mpi_types: Types in the list of `srun --mpi=list`.
        mpi_default: Type that srun uses without `--mpi`.
        kills: If true, a rank that fails ends the step (KillOnBadExit); None if unknown.
    """

    installed: bool = False
    mpi_types: tuple[str, ...] = ()
    mpi_default: str = ""
    kills: bool | None = None

    def offers(self, pmi: str) -> bool:
        """Return whether srun has a PMI of this name, or a version of it."""
        return any(kind.startswith(pmi) for kind in self.mpi_types)


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All facts about a job.

    Attributes:
        ranks: Ranks in order; the reporting rank alone if MPI failed before they connected.
        size: Size of the MPI world; 0 if MPI was not started.
        wanted: Number of ranks that the launcher was asked for.
        wanted_by: Variable and launcher that are the source of `wanted`, or "".
        warnings: Warnings of mpiring while it tried an allreduce.
        trial_errors: Errors of that allreduce.
        printed: Output of the MPI library.
        tried_s: Seconds of that allreduce; None if it was not tried.
        pairs: Measurements.
        failure: How the examination ended early, if it did.
    """

    ranks: Sequence[Rank] = (Rank(),)
    size: int = 1
    wanted: int = 1
    wanted_by: str = ""
    warnings: Sequence[str] = ()
    trial_errors: Sequence[str] = ()
    printed: Sequence[str] = ()
    tried_s: float | None = None
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
    def launcher(self) -> Launcher:
        """The launcher of this process; one without a name unless it has started ranks."""
        return launchers(self.variables)[0] if launcher_of(self.variables) else Launcher("", "")

    @property
    def is_torn(self) -> bool:
        """Whether the launcher started several ranks, but each is alone in its world."""
        return self.size == 1 and self.wanted > 1 and launcher_of(self.variables) != ""

    def nodes(self) -> dict[int, list[Rank]]:
        """Return the ranks of each node, by its number."""
        return grouped(self.ranks, lambda rank: rank.node)

    def node_names(self) -> dict[int, str]:
        """Return the nodes' names, with a number if several nodes have the same name."""
        names = {node: ranks[0].host for node, ranks in self.nodes().items()}
        hosts = list(names.values())
        return {node: host if hosts.count(host) == 1 else f"{host} (node {node})"
                for node, host in names.items()}
