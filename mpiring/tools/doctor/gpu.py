"""Judges GPUs, and what lies between them, MPI and the network."""

from collections.abc import Iterator

from ...text import count
from .facts import Gpus, Job, Rank
from .findings import NOTE, OK, WARNING, Finding

TITLE = "GPUs"

# What lets each vendor's library take GPU memory.
_AWARE = {
    "Open MPI": "use an Open MPI and a UCX built with CUDA (the cluster's module); PyPI's is not",
    "MPICH": "use an MPICH built with CUDA (the cluster's module), with MPIR_CVAR_ENABLE_GPU=1; "
             "PyPI's is not",
    "Cray MPICH": "load the module craype-accel-*, and export MPICH_GPU_SUPPORT_ENABLED=1",
    "Intel MPI": "export I_MPI_OFFLOAD=1",
    "MVAPICH": "export MV2_USE_CUDA=1 (MVAPICH 3 and Plus: MVP_USE_CUDA=1)"}
# Where the switch is a variable, and there is no function to ask.
_SWITCHES = {"Cray MPICH": ("MPICH_GPU_SUPPORT_ENABLED",), "Intel MPI": ("I_MPI_OFFLOAD",),
             "MVAPICH": ("MV2_USE_CUDA", "MVP_USE_CUDA")}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def findings(job: Job) -> Iterator[Finding]:
    """Judge each rank's GPUs."""
    for rank in job.ranks:
        if not rank.gpus.kind:
            yield _none(rank)
            continue
        yield _devices(rank, sum(other.node == rank.node for other in job.ranks))
        yield _awareness(rank)
        yield from _use(rank, job)
        yield from _direct(rank)


def _none(rank: Rank) -> Finding:
    if rank.variables.get("MPICH_GPU_SUPPORT_ENABLED", "0") == "1":
        return Finding("GPUs", WARNING, "none, but MPICH_GPU_SUPPORT_ENABLED=1",
                       "export MPICH_GPU_SUPPORT_ENABLED=0", (rank.rank,))
    return Finding("GPUs", OK, "none", "", (rank.rank,))


def _devices(rank: Rank, ranks_here: int) -> Finding:
    gpus = rank.gpus
    visible = next((name for name in _VISIBLE if name in rank.variables), "")
    text = f"{gpus.count} of {gpus.kind}"
    text += f", driver {gpus.driver}" if gpus.driver else ""
    text += f", {visible}={rank.variables[visible]}" if visible else ""
    if ranks_here > gpus.count:
        return Finding("GPUs", WARNING, f"{text}, for {count(ranks_here, 'rank')}",
                       f"start {count(gpus.count, 'rank')} on such a node", (rank.rank,))
    return Finding("GPUs", OK, text, "", (rank.rank,))


def _awareness(rank: Rank) -> Finding:
    vendor, gpus = rank.library.vendor, rank.gpus
    switch = next((name for name in _SWITCHES.get(vendor, ())
                   if rank.variables.get(name, "0") not in ("", "0")), "")
    remedy = _AWARE.get(vendor, "use an MPI library built for these GPUs")
    name = rank.library.name or "MPI"
    if vendor == "Cray MPICH" and switch and not gpus.gtl:
        return Finding("GPU-aware MPI", WARNING, f"{switch}=1, but Cray's GTL library is not "
                       f"loaded: MPI_Init or the first GPU message fails",
                       "LD_PRELOAD the libmpi_gtl_* of your GPUs, or build mpi4py with "
                       "craype-accel-* loaded", (rank.rank,))
    if gpus.aware or switch:
        said = f"{name} says that it takes GPU memory" if gpus.aware else f"{switch} is set"
        return Finding("GPU-aware MPI", OK, said, "", (rank.rank,))
    said = (f"{name} says that it takes no GPU memory" if gpus.aware is False else
            f"nothing shows that {name} takes GPU memory")
    return Finding("GPU-aware MPI", NOTE, f"{said}: data goes through the host's", remedy,
                   (rank.rank,))


def _use(rank: Rank, job: Job) -> Iterator[Finding]:
    """Judge what mpiring itself does with a rank's GPU."""
    gpus, here = rank.gpus, (rank.rank,)
    if gpus.problem:
        # The problem tells its own remedy: to install CuPy, its compiler, or a driver.
        yield Finding("mpiring's GPU", NOTE, f"none: {gpus.problem}",
                      "do so for models on GPUs; those on the CPU need none", here)
        return
    if not gpus.own:
        return
    sharers = [other.rank for other in job.ranks
               if other.node == rank.node and other.gpus.own == gpus.own]
    text = f"{gpus.own}, one of {len(gpus.seen)}" if len(gpus.seen) > 1 else gpus.own
    if len(sharers) > 1:
        yield Finding("mpiring's GPU", NOTE, f"{text}, for {len(sharers)} ranks",
                      "they take turns in computing; start one rank for each GPU, or let each "
                      "see its own (srun --gpus-per-task=1)", here)
    else:
        yield Finding("mpiring's GPU", OK, text, "", here)
    neighbours = sum(other.node == rank.node for other in job.ranks)
    if neighbours > 1 and gpus.unshared:
        yield Finding("GPU memory within a node", NOTE,
                      f"cannot be shared ({gpus.unshared}): data goes through pinned host memory",
                      "containers: give ranks one IPC and PID namespace; Linux only", here)
    elif neighbours > 1:
        yield Finding("GPU memory within a node", OK,
                      "shared: arrays of comm.empty, and gradients, are summed in place", "", here)
    if len(job.nodes()) > 1:
        yield _between_nodes(rank)


def _between_nodes(rank: Rank) -> Finding:
    wish, here = rank.variables.get("MPIRING_GPU_AWARE", "auto"), (rank.rank,)
    name = "GPU memory between nodes"
    if wish == "yes":
        return Finding(name, OK, "MPIRING_GPU_AWARE=yes: MPI is handed its pointers, untried", "",
                       here)
    if wish == "no":
        return Finding(name, OK, "MPIRING_GPU_AWARE=no: staged through pinned host memory", "",
                       here)
    return Finding(name, OK, "MPI is handed its pointers where a trial at the first use shows that "
                   "it takes them; else staged through pinned host memory", "", here)


def _direct(rank: Rank) -> Iterator[Finding]:
    """Judge GPUDirect: the network reads GPU memory (peermem), and small copies (gdrcopy)."""
    gpus, here = rank.gpus, (rank.rank,)
    fast = any(device.is_fast and device.active for device in rank.devices)
    if gpus.kind == "NVIDIA" and fast:
        yield _module(gpus, ("nvidia_peermem", "nv_peer_mem"), "GPUDirect RDMA",
                      "modprobe nvidia_peermem (or a driver with DMA-BUF, Linux 5.12)", here)
        yield _module(gpus, ("gdrdrv",), "GDRCopy", "install gdrcopy, and modprobe gdrdrv", here)
    tls = rank.variables.get("UCX_TLS", "")
    if tls and not tls.startswith("^") and not any(
            word in tls for word in ("cuda", "rocm", "gpu", "all")):
        yield Finding("UCX transports", WARNING, f"UCX_TLS={tls} has none for GPUs",
                      f"unset UCX_TLS, or add {'cuda' if gpus.kind == 'NVIDIA' else 'rocm'}", here)
    elif gpus.transports is not None and not gpus.transports:
        yield Finding("UCX transports", NOTE, "MPI's UCX has no modules for GPUs",
                      _AWARE.get(rank.library.vendor, "use a UCX built for these GPUs"), here)
    elif gpus.transports:
        yield Finding("UCX transports", OK, ", ".join(gpus.transports), "", here)


def _module(gpus: Gpus, names: tuple[str, ...], name: str, remedy: str,
            here: tuple[int, ...]) -> Finding:
    loaded = [one for one in names if one in gpus.modules]
    if loaded:
        return Finding(name, OK, f"{loaded[0]} is loaded", "", here)
    return Finding(name, NOTE, f"{names[0]} is not loaded", remedy, here)
