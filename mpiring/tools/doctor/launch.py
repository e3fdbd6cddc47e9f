"""Judges how ranks were launched, whether they became one world, and their settings."""

from collections.abc import Iterator

from ...launch.environment import launcher_of, launchers
from ...text import ranks_on_nodes
from . import containers
from .facts import ENDING, STARTING, Failure, Job, Rank, is_foreign
from .findings import NOTE, OK, PROBLEM, WARNING, Finding
from .memory import shm_is_short

_DOCTOR = "python -m mpiring doctor"
# The PMI that each vendor's library needs, as srun names it; MPICH's is pmi2.
_PMI = {"Open MPI": "pmix", "Cray MPICH": "cray_shasta"}
_CHECKPOINTS = "save checkpoints, and start again from the last (slurm/preemptible.sbatch)"
_STRANGERS = "which starts processes that MPI does not know"

_INTERFACES = {
    "Open MPI": "export OMPI_MCA_btl_tcp_if_include=NAME UCX_NET_DEVICES=NAME",
    "MPICH": "mpirun -iface NAME, with UCX_NET_DEVICES=NAME",
    "Intel MPI": "export FI_TCP_IFACE=NAME",
    "Cray MPICH": "export FI_CXI_DEVICE_NAME=NAME"}


def findings(job: Job) -> Iterator[Finding]:
    """Judge the launch."""
    yield _launcher(job)
    if job.failure is not None:
        yield _failed(job, job.failure)
    elif job.size:
        yield _world(job)
    if job.tried_s is not None:
        yield Finding("mpiring", OK, f"an allreduce of 1 MiB is right, and takes "
                                     f"{1e3 * job.tried_s:.2f} ms")
    for error in job.trial_errors:
        yield Finding("mpiring", PROBLEM, error, "see docs/reference/errors.md")
    for warning in job.warnings:
        yield Finding("mpiring", WARNING, warning, "see docs/reference/errors.md")
    if job.printed and job.failure is None:
        yield Finding("what MPI prints", NOTE, "\n".join(job.printed),
                      "mend what it speaks of, where that matters to you")
    yield from _slurm(job)
    yield from _settings(job)


def right_launch(job: Job, command: str = _DOCTOR) -> str:
    """Return the line that launches ranks of the library that mpi4py loads."""
    vendor, size = job.here.library.vendor, job.wanted if job.wanted > 1 else 4
    pmi = _PMI.get(vendor, "pmi2")
    mpirun = f"{job.mpirun.beside or f'the mpirun of {vendor}'} -n {size} {command}"
    if not _uses_srun(job):
        return mpirun
    if job.slurm.mpi_types and not any(kind.startswith(pmi) for kind in job.slurm.mpi_types):
        return (f"this Slurm has no --mpi={pmi}, which {vendor} needs; in a batch script: {mpirun}")
    if _needs_mpirun(job):
        return (f"between nodes, Slurm's PMI garbles what this MPICH sends; in a batch script: "
                f"{mpirun}")
    # Intel's library finds Slurm's PMI by this variable alone.
    library = "I_MPI_PMI_LIBRARY=/path/of/libpmi2.so " if vendor == "Intel MPI" else ""
    return f"{library}srun --mpi={pmi} -n {size} {command}"


def is_mismatched(rank: Rank) -> bool:
    """Return whether a rank's launcher belongs to another MPI library than the rank loads.

    For srun: whether it offers another PMI than the library needs.
    """
    launcher, vendor = launcher_of(rank.variables), rank.library.vendor
    if not vendor:
        return False
    if launcher == "srun":
        return (_pmi_offered(rank) == "PMIx") != (_PMI.get(vendor) == "pmix")
    return is_foreign(launcher, vendor)


def _pmi_offered(rank: Rank) -> str:
    names = {"PMIX_NAMESPACE": "PMIx", "PMI_FD": "PMI", "PMI_PORT": "PMI"}
    return next((pmi for name, pmi in names.items() if name in rank.variables), "no PMI")


def _needs_mpirun(job: Job) -> bool:
    """Return whether srun fails: an MPICH not built with Slurm's PMI is to run on several nodes."""
    library = job.here.library
    return (library.vendor == "MPICH" and "slurm" not in library.text.lower()
            and job.here.variables.get("SLURM_JOB_NUM_NODES", "1") != "1")


def _uses_srun(job: Job) -> bool:
    return launcher_of(job.here.variables) == "srun" or (
        job.slurm.installed and "SLURM_JOB_ID" in job.here.variables)


def _launcher(job: Job) -> Finding:
    launcher, library = launcher_of(job.here.variables), job.here.library
    if not launcher:
        if job.wanted > 1:
            return Finding("launcher", WARNING, f"none, where {job.wanted_by} speaks of "
                           f"{job.wanted} ranks", right_launch(job))
        return Finding("launcher", NOTE, "none: one rank, so nothing is measured between ranks",
                       right_launch(job) if library.text else "get an MPI library first")
    if launcher == "srun" and _needs_mpirun(job) and len(job.nodes()) > 1:
        return Finding("launcher", WARNING, f"srun, with {_pmi_text(job)}: it starts small "
                       f"programs, but those that import much first, such as PyTorch, hang or "
                       f"end in MPI_Init", right_launch(job))
    if launcher == "srun":
        return Finding("launcher", OK, f"srun, with {_pmi_text(job)}")
    first = launchers(job.here.variables)[0]
    if is_mismatched(job.here):
        return Finding("launcher", PROBLEM, f"{first.title} has started ranks that load "
                       f"{library.name}", right_launch(job))
    if job.is_torn and not first.starts:
        return Finding("launcher", PROBLEM, f"{first.title}, {_STRANGERS}", right_launch(job))
    return Finding("launcher", OK, first.title)


def _pmi_text(job: Job) -> str:
    used, asked = _pmi_offered(job.here), job.here.variables.get("SLURM_MPI_TYPE", "")
    return f"{used} by --mpi={asked}" if asked else used


def _world(job: Job) -> Finding:
    """Judge whether the processes became one world."""
    if job.is_torn:
        return Finding(
            "ranks", PROBLEM, f"{job.wanted_by} says that {job.wanted} ranks were asked for, but "
            f"each process is alone in its MPI world: {_cause(job)}", right_launch(job))
    sizes = [len(ranks) for ranks in job.nodes().values()]
    each = (f"{sizes[0]} on each" if len(set(sizes)) == 1 else
            f"{min(sizes)} to {max(sizes)} on each")
    text = ranks_on_nodes(job.size, len(sizes))
    if job.size > 1:
        text += f", {each}"
    if len(set(sizes)) > 1:
        return Finding("ranks", NOTE, text, "give every node as many: the fullest sets the pace")
    return Finding("ranks", OK, text)


def _cause(job: Job) -> str:
    """Return why ranks did not find each other."""
    launcher, library = launcher_of(job.here.variables), job.here.library
    if launcher == "srun":
        pmi = _PMI.get(library.vendor, "pmi2")
        return f"srun offers {_pmi_text(job)}, and {library.name} needs {pmi}"
    if is_mismatched(job.here):
        return f"the launcher is {launcher}'s, the library is {library.name}"
    first = launchers(job.here.variables)[0]
    if not first.starts:
        return f"{first.title} has started them, {_STRANGERS}"
    return "launcher and library do not understand each other"


def _failed(job: Job, failure: Failure) -> Finding:
    """Report a stage of the examination that failed."""
    lines = [f"{failure.how}; it printed:", *failure.printed] if failure.printed else [failure.how]
    verdict = WARNING if failure.stage == ENDING else PROBLEM
    return Finding(failure.stage, verdict, "\n".join(lines), _remedy(job, failure))


def _remedy(job: Job, failure: Failure) -> str:
    """Return the remedy for the likeliest cause of a failure."""
    here, text = job.here, " ".join(failure.printed)
    vendor = here.library.vendor
    if not vendor:
        return "ask mpi4py itself: python -c 'from mpi4py import MPI'"
    if failure.stage == STARTING and is_mismatched(here):
        return right_launch(job)
    if launcher_of(here.variables) == "srun" and "UCX_comm_addr_exchange" in text:
        # Seen with MPICH 5.0.2 and Slurm 22.05: UCX's addresses are longer than PMI allows.
        return (f"with one rank per node, export MPIR_CVAR_CH4_NETMOD=ofi, since UCX's addresses "
                f"do not pass through Slurm's PMI; else, in a batch script, "
                f"{job.mpirun.beside or 'mpirun'}")
    if containers.is_private(job):
        return "give the ranks of a node one /dev/shm, as said below"
    if shm_is_short(job):
        return "give /dev/shm more memory, as said below"
    if "GTL" in text:
        return ("export MPICH_GPU_SUPPORT_ENABLED=0, or load the module craype-accel-* and preload "
                "libmpi_gtl_cuda.so")
    if failure.late:
        return (f"if ranks are still starting, --deadline 120; see what other ranks print; if the "
                f"nodes do not reach each other, name the network between them: "
                f"{_INTERFACES.get(vendor, _INTERFACES['MPICH'])}")
    return f"does one rank work? {job.mpirun.beside or 'mpirun'} -n 1 python -m mpiring doctor"


def _slurm(job: Job) -> Iterator[Finding]:
    variables, slurm = job.here.variables, job.slurm
    if not slurm.installed or not slurm.mpi_types and "SLURM_JOB_ID" not in variables:
        return
    vendor = job.here.library.vendor
    pmi = _PMI.get(vendor, "pmi2")
    types = ", ".join(slurm.mpi_types) or "unknown"
    default = f"; without --mpi: {slurm.mpi_default}" if slurm.mpi_default else ""
    if vendor and not any(kind.startswith(pmi) for kind in slurm.mpi_types):
        yield Finding("srun --mpi", WARNING, f"{types}{default}", right_launch(job))
    elif (vendor and slurm.mpi_default and not slurm.mpi_default.startswith(pmi)
          and not _needs_mpirun(job)):
        yield Finding("srun --mpi", NOTE, f"{types}{default}, and {vendor} needs {pmi}",
                      f"srun --mpi={pmi}, or export SLURM_MPI_TYPE={pmi}")
    else:
        yield Finding("srun --mpi", OK, f"{types}{default}")
    if slurm.kills is False:
        yield Finding("srun --kill-on-bad-exit", NOTE, "off by default: when a rank is killed, the "
                      "others wait for it", "srun --kill-on-bad-exit=1")


def _settings(job: Job) -> Iterator[Finding]:
    mine = [" ".join(f"{name}={value}" for name, value in sorted(rank.variables.items())
                     if name.startswith("MPIRING_")) or "none" for rank in job.ranks]
    name = "MPIRING_* variables"
    for rank in job.ranks:
        if rank.settings_error:
            yield Finding(name, PROBLEM, rank.settings_error, "unset or correct it; "
                          "docs/reference/settings.md has them all", (rank.rank,))
    if len(set(mine)) > 1:
        for rank, settings in zip(job.ranks, mine):
            yield Finding(name, PROBLEM, settings, "give all ranks the same, as with mpirun -genv "
                          "(MPICH) or -x (Open MPI)", (rank.rank,))
    elif not any(rank.settings_error for rank in job.ranks):
        yield Finding(name, OK, mine[0])


def survival(job: Job) -> Iterator[Finding]:
    """Judge whether this MPI, as it was launched, lets other ranks go on after a rank's death."""
    library, variables = job.here.library, job.here.variables
    if not library.text:
        return
    value, remedy = f"{library.name} ends the job when a rank dies", _CHECKPOINTS
    if library.vendor == "Open MPI":
        if int(library.name.split()[-1].partition(".")[0] or 0) < 5:
            value += "; since 5.0 the others can go on"
        elif launcher_of(variables) == "srun":
            value = "under srun the job ends when a rank dies"
            remedy += "; or mpirun --with-ft ulfm within the batch script"
        elif variables.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true"):
            yield Finding("survival", OK, "the other ranks can go on (ULFM): mpiring.elastic")
            return
        else:
            value = f"{library.name} can let the other ranks go on, but was not launched so"
            remedy = "mpirun --with-ft ulfm; or " + remedy
    yield Finding("survival", NOTE, value, remedy)
