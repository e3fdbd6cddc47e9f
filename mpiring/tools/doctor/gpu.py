"""Judges GPUs, and how MPI and the network reach their memory."""

from collections.abc import Iterator

from ...text import count
from .facts import Gpus, Job, Rank
from .findings import NOTE, OK, WARNING, Finding, each_rank

# How to make each vendor's library take GPU memory.
_AWARE = {
    "Open MPI": "use an Open MPI and a UCX built with CUDA (the cluster's module); PyPI's is not",
    "MPICH": "use an MPICH built with CUDA (the cluster's module), with MPIR_CVAR_ENABLE_GPU=1; "
             "PyPI's is not",
    "Cray MPICH": "load the module craype-accel-*, and export MPICH_GPU_SUPPORT_ENABLED=1",
    "Intel MPI": "export I_MPI_OFFLOAD=1",
    "MVAPICH": "export MV2_USE_CUDA=1 (MVAPICH 3 and Plus: MVP_USE_CUDA=1)"}
# Libraries that are switched by a variable, and have no function to ask.
_SWITCHES = {"Cray MPICH": ("MPICH_GPU_SUPPORT_ENABLED",), "Intel MPI": ("I_MPI_OFFLOAD",),
             "MVAPICH": ("MV2_USE_CUDA", "MVP_USE_CUDA")}
# Cray's libraries between MPI and GPUs.
_GTL = {"NVIDIA": "libmpi_gtl_cuda.so", "AMD": "libmpi_gtl_hsa.so"}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def findings(job: Job) -> Iterator[Finding]:
    """Judge each rank's GPUs."""
    return each_rank(job, lambda rank: _rank(rank, job) if rank.gpus.kind else [_none(rank)])


def _rank(rank: Rank, job: Job) -> Iterator[Finding]:
    yield _devices(rank, len(job.nodes()[rank.node]))
    yield _awareness(rank)
    yield from _use(rank, job)
    yield from _direct(rank)


def _none(rank: Rank) -> Finding:
    if rank.variables.get("MPICH_GPU_SUPPORT_ENABLED", "0") == "1":
        return Finding("GPUs", WARNING, "none, but MPICH_GPU_SUPPORT_ENABLED=1",
                       "export MPICH_GPU_SUPPORT_ENABLED=0; in a container, let it see the GPUs: "
                       "apptainer exec --nv (AMD: --rocm), docker run --gpus all")
    return Finding("GPUs", OK, "none")


def _devices(rank: Rank, ranks_here: int) -> Finding:
    gpus = rank.gpus
    visible = next((name for name in _VISIBLE if name in rank.variables), "")
    text = f"{gpus.count} of {gpus.kind}"
    text += f", driver {gpus.driver}" if gpus.driver else ""
    text += f", {visible}={rank.variables[visible]}" if visible else ""
    if ranks_here > gpus.count:
        return Finding("GPUs", WARNING, f"{text}, for {count(ranks_here, 'rank')}",
                       f"start {count(gpus.count, 'rank')} on such a node")
    return Finding("GPUs", OK, text)


def _awareness(rank: Rank) -> Finding:
    vendor, gpus = rank.library.vendor, rank.gpus
    switch = next((name for name in _SWITCHES.get(vendor, ())
                   if rank.variables.get(name, "0") not in ("", "0")), "")
    remedy = _AWARE.get(vendor, "use an MPI library built for these GPUs")
    name = rank.library.name or "MPI"
    if vendor == "Cray MPICH" and switch and not gpus.gtl:
        return Finding("GPU-aware MPI", WARNING, f"{switch}=1, but Cray's GTL library is not "
                       f"loaded: MPI_Init or the first GPU message fails",
                       f"LD_PRELOAD={_GTL[gpus.kind]}, or build mpi4py with craype-accel-* loaded; "
                       f"in a container, bind /opt/cray/pe/mpich, and set LD_PRELOAD inside")
    if gpus.aware or switch:
        return Finding("GPU-aware MPI", OK, f"{name} says that it takes GPU memory"
                       if gpus.aware else f"{switch} is set")
    text = (f"{name} says that it takes no GPU memory" if gpus.aware is False else
            f"nothing shows that {name} takes GPU memory")
    return Finding("GPU-aware MPI", NOTE, f"{text}: data goes through the host's", remedy)


def _use(rank: Rank, job: Job) -> Iterator[Finding]:
    """Judge what mpiring itself does with a rank's GPU."""
    gpus, neighbours = rank.gpus, job.nodes()[rank.node]
    if gpus.problem:
        # The problem names its remedy: to install CuPy, its compiler, or a driver.
        yield Finding("mpiring's GPU", NOTE, f"none by CuPy: {gpus.problem}",
                      "do so for CuPy models, and for gradients that a node's ranks share; else "
                      "PyTorch's go through pinned host memory")
        return
    if not gpus.own:
        return
    sharers = sum(other.gpus.own == gpus.own for other in neighbours)
    text = f"{gpus.own}, one of {len(gpus.seen)}" if len(gpus.seen) > 1 else gpus.own
    if sharers > 1:
        yield Finding("mpiring's GPU", NOTE, f"{text}, for {sharers} ranks",
                      "they take turns in computing; start one rank for each GPU, or let each "
                      "see its own (srun --gpus-per-task=1)")
    else:
        yield Finding("mpiring's GPU", OK, text)
    if len(neighbours) > 1 and gpus.unshared:
        yield Finding("GPU memory within a node", NOTE,
                      f"cannot be shared ({gpus.unshared}): data goes through pinned host memory",
                      "containers: give ranks one IPC and PID namespace; Linux only")
    elif len(neighbours) > 1:
        yield Finding("GPU memory within a node", OK,
                      "shared: arrays of comm.empty, and gradients, are summed in place")
    if len(job.nodes()) > 1:
        yield _between_nodes(rank)


def _between_nodes(rank: Rank) -> Finding:
    texts = {
        "yes": "MPIRING_GPU_AWARE=yes: MPI is handed its pointers, untried",
        "no": "MPIRING_GPU_AWARE=no: staged through pinned host memory",
        "auto": "MPI is handed its pointers where a trial at the first use shows that it takes "
                "them; else staged through pinned host memory"}
    setting = rank.variables.get("MPIRING_GPU_AWARE", "auto")
    return Finding("GPU memory between nodes", OK, texts.get(setting, texts["auto"]))


def _direct(rank: Rank) -> Iterator[Finding]:
    """Judge GPUDirect: the network reads GPU memory (peermem), and small copies (gdrcopy)."""
    gpus = rank.gpus
    fast = any(device.is_fast and device.active for device in rank.devices)
    if gpus.kind == "NVIDIA" and fast:
        yield _module(gpus, ("nvidia_peermem", "nv_peer_mem"), "GPUDirect RDMA",
                      "modprobe nvidia_peermem (or a driver with DMA-BUF, Linux 5.12)")
        yield _module(gpus, ("gdrdrv",), "GDRCopy", "install gdrcopy, and modprobe gdrdrv")
    tls = rank.variables.get("UCX_TLS", "")
    if tls and not tls.startswith("^") and not any(
            word in tls for word in ("cuda", "rocm", "gpu", "all")):
        yield Finding("UCX transports", WARNING, f"UCX_TLS={tls} has none for GPUs",
                      f"unset UCX_TLS, or add {'cuda' if gpus.kind == 'NVIDIA' else 'rocm'}")
    elif gpus.transports is not None and not gpus.transports:
        yield Finding("UCX transports", NOTE, "MPI's UCX has no modules for GPUs",
                      _AWARE.get(rank.library.vendor, "use a UCX built for these GPUs"))
    elif gpus.transports:
        yield Finding("UCX transports", OK, ", ".join(gpus.transports))


def _module(gpus: Gpus, modules: tuple[str, ...], name: str, remedy: str) -> Finding:
    for module in modules:
        if module in gpus.modules:
            return Finding(name, OK, f"{module} is loaded")
    return Finding(name, NOTE, f"{modules[0]} is not loaded", remedy)
