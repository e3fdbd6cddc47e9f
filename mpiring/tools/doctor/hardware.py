"""Judges processors, memory, networks and GPUs, with a table of conditions for each property."""

import math
import operator
import statistics
from collections.abc import Sequence

from ...provisional import count
from ..units import span
from .facts import JobFacts, NetworkDevice, Pair, Rank, first_set
from .report import NOTE, OK, PROBLEM, WARNING, Finding, Rows, check, location

_MIB = 1 << 20

# Variables that set the number of BLAS threads, in order of priority: OpenBLAS, MKL, and OpenMP,
# which OpenBLAS, MKL and PyTorch obey.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
# Minimum number of threads, as a share of the processors; with fewer, too many processors are idle.
_MIN_THREADS = 0.5
# Load average, as a share of the processors, above which a node is busy. The doctor itself runs
# for a short time and adds little to the average of a minute.
_BUSY_LOAD = 0.5

# Bytes of /dev/shm that each rank of a node needs at its start. With less, MPICH 5.0.2 dies of a
# signal (measured). Open MPI 5.0.11 requires this much free memory.
_SHM_BYTES = {"MPICH": 5.3 * _MIB, "Open MPI": 16 * _MIB}
_DEFAULT_SHM_BYTES = 16 * _MIB
# PyTorch data loaders need more, because they pass batches through /dev/shm. Docker's default is
# 64 MiB.
_SMALL_SHM_BYTES = 256 * _MIB
_MIN_OPEN_FILES = 1024
# Command for sh and bash, in lines that are not wrapped, because a command may end at a line's end.
# It checks again that the files are unused, because jobs may have started.
REMOVE_LEFTOVERS = (
    "for f in /dev/shm/mpich_shm_* \\\n/dev/shm/sm_segment.* /dev/shm/vader_segment.*; do\n"
    "[ -O $f ] && ! grep -qsF $f /proc/[0-9]*/maps && rm $f; done")
# Without these variables, a fork may copy pages to which the network device writes.
_FORK_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")

# On a node, messages with a longer latency or less bandwidth do not go through shared memory.
_NODE_LATENCY_S, _NODE_BYTES_PER_S = 20e-6, 1e9
# With a longer latency, messages between nodes do not use the fast network.
_FAST_LATENCY_S = 30e-6
# Minimum bandwidth between nodes, as a share of the device's speed and of the median.
_MIN_OF_SPEED, _MIN_OF_MEDIAN = 0.5, 0.6
# Variables that select transports, with their slow values; beginnings of the fast values.
_TRANSPORT_VARIABLES = {"UCX_TLS": ("tcp",), "FI_PROVIDER": ("tcp", "sockets"),
                        "OMPI_MCA_btl": ("tcp",)}
_FAST_TRANSPORTS = ("rc", "dc", "ud", "ib", "all", "verbs", "cxi", "psm", "efa")

# Remedies by vendor for a library that does not accept GPU memory.
_AWARE_REMEDIES = {
    "Open MPI": "use an Open MPI and a UCX built with CUDA (the cluster's module); PyPI's is not",
    "MPICH": "use an MPICH built with CUDA (the cluster's module), with MPIR_CVAR_ENABLE_GPU=1; "
             "PyPI's is not",
    "Cray MPICH": "load the module craype-accel-*, and export MPICH_GPU_SUPPORT_ENABLED=1",
    "Intel MPI": "export I_MPI_OFFLOAD=1",
    "MVAPICH": "export MV2_USE_CUDA=1 (MVAPICH 3 and Plus: MVP_USE_CUDA=1)"}
# Variables that enable GPU support in libraries without a function that reports it.
_SWITCHES = {"Cray MPICH": ("MPICH_GPU_SUPPORT_ENABLED",), "Intel MPI": ("I_MPI_OFFLOAD",),
             "MVAPICH": ("MV2_USE_CUDA", "MVP_USE_CUDA")}
# Kernel modules for network access to GPU memory, and for copies of short messages.
_GPU_DIRECT = (
    ("GPUDirect RDMA", ("nvidia_peermem", "nv_peer_mem"),
     "modprobe nvidia_peermem (or a driver with DMA-BUF, Linux 5.12)"),
    ("GDRCopy", ("gdrdrv",), "install gdrcopy, and modprobe gdrdrv"))
# Cray's libraries for GPU support in MPI.
_GTL = {"NVIDIA": "libmpi_gtl_cuda.so", "AMD": "libmpi_gtl_hsa.so"}
_VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# PyTorch's variable for huge pages of large tensors.
_HUGE_TENSORS = "THP_MEM_ALLOC_ENABLE"
_STAGED = "staged through pinned host memory"
_GPU_AWARE = {
    "yes": "MPIRING_GPU_AWARE=yes: MPI gets its pointers without a test",
    "no": f"MPIRING_GPU_AWARE=no: {_STAGED}",
    "auto": f"MPI is handed its pointers where a trial at the first use shows that it takes them; "
            f"else {_STAGED}"}


def _available(ranks: Sequence[Rank]) -> tuple[int, float]:
    """Return the number of processors that a node's ranks may use, and their CPU limit."""
    allowed = len(frozenset[int]().union(*(rank.processors.allowed for rank in ranks)))
    return allowed, min(allowed, *(rank.processors.quota for rank in ranks))


def _is_busy(ranks: Sequence[Rank]) -> bool:
    """Return whether the load average of a node exceeds half of its processors."""
    return max(rank.processors.load for rank in ranks) > _BUSY_LOAD * ranks[0].processors.online


def processors(job: JobFacts, *ranks: Rank) -> Rows:
    """Judge whether each rank of a node has separate processors."""
    first, online = ranks[0].processors, ranks[0].processors.online
    sets = [rank.processors.allowed for rank in ranks]
    allowed, limit = _available(ranks)
    is_full, is_same = len(ranks) > limit, len(set(sets)) == 1
    each, is_free = span([len(numbers) for numbers in sets]), is_same and len(sets[0]) == online
    text = f"{count(len(ranks), 'rank')} on {allowed} of {count(online, 'processor')}"
    text += f", of which a cgroup grants {limit:g}" if limit < allowed else ""
    yield check("processors", [
        (is_full, WARNING, f"{text}: oversubscribed; ranks wait for each other's turns",
         f"start at most {count(max(1, math.floor(limit)), 'rank')} on such a node, or ask for "
         f"more processors (srun --cpus-per-task, docker --cpus)"),
        (len(ranks) == 1 and first.cores < len(first.allowed), OK, f"{text} ({first.cores} cores)"),
    ], text)
    yield check("binding", [
        (sum(map(len, sets)) == allowed, OK, f"each rank has {each} of its own"),
        (is_free and is_full, OK, f"none: each rank may use all {online}"),
        (is_free, NOTE, f"none: each rank may use all {online}", "mpirun -bind-to core (MPICH), "
         "--bind-to core (Open MPI), srun --cpu-bind=cores"),
        (is_same and len(ranks) <= len(sets[0]), OK, f"all ranks share the same {each}"),
        (True, WARNING, f"all ranks are bound to the same {each} of {online}" if is_same else
         "some ranks share processors, while others have their own",
         "mpirun --bind-to none, srun --cpu-bind=cores; and check OMPI_MCA_*, I_MPI_PIN* or "
         "SLURM_CPU_BIND* variables")])
    yield _threads(ranks, limit)
    if _is_busy(ranks):
        yield Finding("other programs", NOTE, f"load {first.load:.1f} on "
                      f"{count(online, 'processor')} in the last minute",
                      "reserve the node: srun --exclusive")


def _threads(ranks: Sequence[Rank], limit: float) -> Finding | None:
    """Judge the number of threads of NumPy's BLAS; PyTorch uses the same number."""
    each, settings = zip(*map(_threads_of, ranks))
    total = sum(each)
    remedy = f"export OMP_NUM_THREADS={max(1, math.floor(limit / len(ranks)))}"
    text = (f"{span(each)} per rank in NumPy's BLAS ({settings[0] or 'nothing is set'}): {total} "
            f"on {count(int(limit), 'processor')}")
    if not settings[0] and "torch" in ranks[0].versions:
        text += "; PyTorch's are shared out by mpiring.torch"
    return check("threads", [
        (total > max(limit, len(ranks)), WARNING, text, remedy),
        (total < _MIN_THREADS * limit, NOTE, text,
         f"{remedy}, if the model's compute is in NumPy or PyTorch on CPUs")], text)


def _threads_of(rank: Rank) -> tuple[int, str]:
    """Return how many threads a rank's BLAS uses, and the variable that sets their number.

    Without such a variable, BLAS uses one thread per processor.
    """
    for name in _THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list, whose first number is for the outermost level.
        text = rank.variables.get(name, "")
        first = text.partition(",")[0]
        if first.isdigit() and int(first):
            return int(first), f"{name}={text}"
    return len(rank.processors.allowed), ""


def slurm_share(job: JobFacts, rank: Rank) -> Rows:
    """Judge whether a rank has the requested processors.

    Since Slurm 22.05, srun ignores the `--cpus-per-task` of the batch script.
    """
    wanted = rank.variables.get("SLURM_CPUS_PER_TASK", "")
    allowed = len(rank.processors.allowed)
    if wanted.isdigit() and allowed < int(wanted):
        yield Finding(
            "--cpus-per-task", WARNING, f"{wanted} were asked for, but the rank may use {allowed}",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the batch script, or give srun "
            "--cpus-per-task, too")


def shm_is_short(job: JobFacts) -> bool:
    """Return whether the /dev/shm of a node is too small for MPI."""
    return any(_shm_needed(job, ranks)[1] > ranks[0].memory.shm_bytes
               for ranks in job.nodes().values() if ranks[0].memory.shm_bytes is not None)


def _shm_needed(job: JobFacts, ranks: Sequence[Rank]) -> tuple[int, float]:
    """Return the number of ranks of a node, and the bytes of /dev/shm that MPI needs for them.

    If MPI failed, the number of ranks comes from the launcher. The memory of mpiring is not
    included.
    """
    number = len(ranks) if job.size > 1 or job.failure is None else max(job.wanted, 1)
    return number, number * _SHM_BYTES.get(ranks[0].library.vendor, _DEFAULT_SHM_BYTES)


def _size_text(nbytes: float) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:.0f} KiB"


def shared_memory(job: JobFacts, *ranks: Rank) -> Rows:
    """Judge the /dev/shm of a node, and files of dead jobs in it.

    MPICH file names contain the number of the job. If Slurm reuses the number, the new job may
    fail because of the old files.
    """
    memory, vendor = ranks[0].memory, ranks[0].library.vendor
    number, needed = _shm_needed(job, ranks)
    total, free = memory.shm_bytes or 0, memory.shm_free_bytes or 0
    text = f"{_size_text(total)}, {_size_text(free)} free"
    wants = f"{vendor or 'MPI'} takes {_size_text(needed)} for {count(number, 'rank')}"
    remedy = ("mount -o remount,size=2G /dev/shm as root; in a container: docker run "
              "--shm-size=2g; in a pod: an emptyDir of medium Memory (packaging/mpijob.yaml)")
    yield check("/dev/shm", [
        (memory.shm_bytes is None, WARNING, "there is none", "mount -t tmpfs tmpfs /dev/shm"),
        (total < needed, WARNING if vendor == "Open MPI" else PROBLEM,
         f"{text}, too small: {wants}", remedy),
        # After the start of MPI, the needed memory is no longer free.
        (free < needed and not ranks[0].thread_level, PROBLEM, f"{text}, too full: {wants}",
         "delete what dead jobs have left there (ls -l /dev/shm), or enlarge it"),
        (total < _SMALL_SHM_BYTES, NOTE,
         f"{text}: enough for MPI, little for PyTorch's data loaders", remedy)], f"{text}; {wants}")
    if memory.leftover_files:
        yield Finding("dead jobs", NOTE, f"{count(memory.leftover_files, 'file')} of MPI in "
                      f"/dev/shm that no process uses, {_size_text(memory.leftover_bytes)}",
                      REMOVE_LEFTOVERS)


def limits(job: JobFacts, rank: Rank) -> Rows:
    """Judge the resource limits of a rank, and whether forks can corrupt its network memory."""
    locked, files, method = rank.memory.locked_bytes, rank.memory.open_files, rank.start_method
    if locked is not None and rank.fast_devices:
        yield Finding("ulimit -l", WARNING, f"only {_size_text(locked)} may be locked, which fast "
                      "networks need without limit", "memlock unlimited in /etc/security/"
                      "limits.conf, and LimitMEMLOCK=infinity for slurmd")
    if files is not None and files < _MIN_OPEN_FILES:
        yield Finding("ulimit -n", NOTE, f"only {files} files may be open, and every shared array "
                      f"is one", f"ulimit -n {_MIN_OPEN_FILES}")
    if (rank.memory.huge_pages == "madvise" and "torch" in rank.versions
            and rank.variables.get(_HUGE_TENSORS) != "1"):
        yield Finding("huge pages", NOTE, "PyTorch does not request them for its tensors, so "
                      "copies between the ranks of a node take longer", f"export {_HUGE_TENSORS}=1")
    text, forks = f"Python starts processes by {method}", method == "fork"
    unsafe = [device.name for device in rank.fast_devices if device.kind != "Slingshot"]
    is_safe = first_set(rank.variables, _FORK_VARIABLES)
    yield check("fork", [
        (forks and unsafe and not is_safe, WARNING, f"{text}, with {', '.join(unsafe)}: a "
         f"forked data loader can crash, or corrupt messages", "multiprocessing.set_start_method("
         "'forkserver') before mpiring.init(), or export RDMAV_FORK_SAFE=1"),
        (forks and not unsafe, OK, f"{text}, with no device that forks can break")], text)


def _device_text(device: NetworkDevice) -> str:
    speed = f"{device.gbit:g} Gbit/s" if device.gbit else "speed unknown"
    return f"{device.name} ({device.kind}, {speed})"


def devices(job: JobFacts, rank: Rank) -> Rows:
    """Judge the network devices of a rank, and the variables that select devices."""
    variables, fast = rank.variables, rank.fast_devices
    active = sorted((device for device in rank.devices if device.active),
                    key=lambda device: device.kind == "virtual")
    down = [device.name for device in rank.devices if device.is_fast and not device.active]
    text = ", ".join(map(_device_text, active)) or "none"
    yield check("devices", [
        (down, WARNING, f"{text}; down: {', '.join(down)}",
         "ask the administrators: ibstat shows the state of each port")], text)
    for name, slow in _TRANSPORT_VARIABLES.items() if fast else ():
        words = variables.get(name, "").split(",")
        if set(words) & set(slow) and not any(
                word.startswith(_FAST_TRANSPORTS) for word in words):
            yield Finding("variables", WARNING, f"{name}={variables[name]} keeps MPI from using "
                          f"{_device_text(fast[0])}", f"unset {name}")
    chosen = variables.get("UCX_NET_DEVICES", "")
    names = {device.name for device in rank.devices} | {"all", "lo", ""}
    missing = [word for word in chosen.split(",") if word.partition(":")[0] not in names]
    if missing and not chosen.startswith("^"):
        yield Finding("variables", WARNING, f"UCX_NET_DEVICES={chosen}, but {', '.join(missing)} "
                      f"is not on this node", "unset UCX_NET_DEVICES")
    if (any(device.kind == "Slingshot" for device in fast)
            and rank.library.vendor not in ("", "Cray MPICH")):
        yield Finding("variables", WARNING, f"{rank.library.name} may not know Slingshot", "load "
                      "the cluster's own MPI module (cray-mpich), and build mpi4py with it")


def _slowest(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the longest latency and the lowest bandwidth."""
    return max(pair.latency_s for pair in pairs), min(pair.bytes_per_s for pair in pairs)


def links(job: JobFacts, *_: Rank) -> Rows:
    """Judge the measured links within and between nodes."""
    within = [pair for pair in job.pairs if len({job.ranks[rank].node for rank in pair.ranks}) == 1]
    between = [pair for pair in job.pairs if pair not in within]
    if within:
        yield _within_a_node(job, within)
    if between:
        yield _between_nodes(job, between)
    median = statistics.median(pair.bytes_per_s for pair in between) if len(between) > 2 else 0.0
    for pair in between:
        if pair.bytes_per_s < _MIN_OF_MEDIAN * median:
            yield Finding("slow link", WARNING, f"{location(pair.ranks, job)}: "
                          f"{8e-9 * pair.bytes_per_s:.2f} Gbit/s, where the median is "
                          f"{8e-9 * median:.2f}",
                          "leave out the node whose links are all slow: srun --exclude")


def _within_a_node(job: JobFacts, pairs: Sequence[Pair]) -> Finding | None:
    latency_s, rate = _slowest(pairs)
    text = f"{1e6 * latency_s:.1f} us, {rate / 1e9:.2f} GB/s"
    text += " (the slowest node)" if len(pairs) > 1 else ""
    return check("within a node", [
        (latency_s <= _NODE_LATENCY_S and rate >= _NODE_BYTES_PER_S, OK, text),
        (any(len(ranks) > _available(ranks)[1] or _is_busy(ranks)
             for ranks in job.nodes().values()), NOTE, f"{text}, slow: the processors are busy",
         "start fewer ranks per node, or reserve it"),
        (True, WARNING, f"{text}, slow: MPI does not use shared memory",
         "unset UCX_TLS, FI_PROVIDER and OMPI_MCA_btl; in containers, let the ranks of a node "
         "share one (--ipc=host)")])


def _between_nodes(job: JobFacts, pairs: Sequence[Pair]) -> Finding | None:
    latency_s, rate = _slowest(pairs)
    gbit = 8e-9 * rate
    text = f"{1e6 * latency_s:.1f} us, {gbit:.2f} Gbit/s"
    text += f" (the slowest of {len(pairs)} pairs of nodes)" if len(pairs) > 1 else ""
    speed = operator.attrgetter("gbit")
    fastest = [max((device for device in ranks[0].devices if device.active and device.gbit),
                   key=speed, default=None) for ranks in job.nodes().values()]
    best = min(filter(None, fastest), key=speed, default=None)
    if best is None:
        return Finding("between nodes", OK, f"{text}; the devices' speed is unknown")
    return check("between nodes", [
        (gbit < _MIN_OF_SPEED * best.gbit or best.is_fast and latency_s > _FAST_LATENCY_S, WARNING,
         f"{text}, far below {_device_text(best)}",
         "let MPI use it: the cluster's MPI module; UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER unset"
         if best.is_fast else "name the right device (UCX_NET_DEVICES, mpirun -iface, "
         "OMPI_MCA_btl_tcp_if_include), and look for other traffic")],
        f"{text}, over {_device_text(best)} or the like")


def gpus(job: JobFacts, rank: Rank) -> Rows:
    """Judge the GPUs of a rank, and how MPI and the network access GPU memory."""
    gpus, neighbors = rank.gpus, job.nodes()[rank.node]
    visible = next((name for name in _VISIBLE_VARIABLES if name in rank.variables), "")
    text = f"{gpus.count} of {gpus.kind}"
    text += f", driver {gpus.driver}" if gpus.driver else ""
    text += f", {visible}={rank.variables[visible]}" if visible else ""
    yield check("GPUs", [
        (not gpus.kind and rank.variables.get("MPICH_GPU_SUPPORT_ENABLED", "0") == "1", WARNING,
         "none, but MPICH_GPU_SUPPORT_ENABLED=1",
         "export MPICH_GPU_SUPPORT_ENABLED=0; in a container, let it see the GPUs: apptainer exec "
         "--nv (AMD: --rocm), docker run --gpus all"),
        (not gpus.kind, OK, "none"),
        (len(neighbors) > gpus.count, WARNING, f"{text}, for {count(len(neighbors), 'rank')}",
         f"start {count(gpus.count, 'rank')} on such a node")], text)
    if gpus.kind:
        yield _gpu_aware(rank)
        yield from _own_gpu(job, rank, neighbors)
        yield _nccl(job, rank)
        yield from _gpu_direct(rank)


def _gpu_aware(rank: Rank) -> Finding | None:
    vendor, gpus, name = rank.library.vendor, rank.gpus, rank.library.name or "MPI"
    switch = first_set(rank.variables, _SWITCHES.get(vendor, ()))
    text = (f"{name} says that it takes no GPU memory" if gpus.aware is False else
            f"nothing shows that {name} takes GPU memory")
    return check("GPU-aware MPI", [
        (vendor == "Cray MPICH" and switch and not gpus.gtl, WARNING,
         f"{switch}=1, but Cray's GTL library is not loaded: MPI_Init or the first GPU message "
         f"fails", f"LD_PRELOAD={_GTL[gpus.kind]}, or build mpi4py with craype-accel-* loaded; in "
         f"a container, bind /opt/cray/pe/mpich, and set LD_PRELOAD inside"),
        (gpus.aware, OK, f"{name} says that it takes GPU memory"),
        (switch, OK, f"{switch} is set"),
        (True, NOTE, f"{text}: data goes through the host's",
         _AWARE_REMEDIES.get(vendor, "use an MPI library built for these GPUs"))])


def _own_gpu(job: JobFacts, rank: Rank, neighbors: Sequence[Rank]) -> Rows:
    """Judge how mpiring uses the GPU of a rank."""
    gpus = rank.gpus
    sharers = sum(other.gpus.address == gpus.address for other in neighbors)
    text = f"{gpus.address}, one of {len(gpus.visible)}" if len(gpus.visible) > 1 else gpus.address
    yield check("mpiring's GPU", [
        # The text of the problem contains a remedy: install CuPy, its compiler, or a driver.
        (gpus.problem, NOTE, f"none by CuPy: {gpus.problem}",
         "do so for CuPy models, and for gradients that a node's ranks share; else PyTorch's go "
         "through pinned host memory"),
        (gpus.address and sharers > 1, NOTE, f"{text}, for {sharers} ranks",
         "they take turns in computing; start one rank for each GPU, or let each see its own (srun "
         "--gpus-per-task=1)")], text)
    if gpus.problem or not gpus.address:
        return
    if len(neighbors) > 1:
        yield check("GPU memory within a node", [
            (gpus.sharing_error, NOTE,
             f"cannot be shared ({gpus.sharing_error}): data goes through pinned host memory",
             "containers: give ranks one IPC and PID namespace; Linux only")],
            "shared: arrays of comm.empty, and gradients, are summed in place")
    if len(job.nodes()) > 1:
        yield Finding("GPU memory between nodes", OK, _GPU_AWARE.get(
            rank.variables.get("MPIRING_GPU_AWARE", "auto"), _GPU_AWARE["auto"]))


def _nccl(job: JobFacts, rank: Rank) -> Finding | None:
    gpus, versions = rank.gpus, {other.gpus.nccl.partition(" (")[0] for other in job.ranks}
    return check("NCCL", [
        (gpus.nccl_problem, NOTE, gpus.nccl_problem,
         "mpiring uses it if ranks do not see each other's GPU memory, as on several nodes"),
        (len(versions) > 1, WARNING, f"{gpus.nccl}, and other ranks have another or none",
         "install one version on all nodes; until then, mpiring does without it")], gpus.nccl)


def _gpu_direct(rank: Rank) -> Rows:
    """Judge GPUDirect RDMA (nvidia_peermem), GDRCopy, and UCX's support for GPUs."""
    gpus, tls = rank.gpus, rank.variables.get("UCX_TLS", "")
    has_gpu_transport = any(word in tls for word in ("cuda", "rocm", "gpu", "all"))
    is_direct = gpus.kind == "NVIDIA" and rank.fast_devices
    for name, modules, remedy in _GPU_DIRECT if is_direct else ():
        loaded = next((module for module in modules if module in gpus.modules), "")
        yield check(name, [(not loaded, NOTE, f"{modules[0]} is not loaded", remedy)],
                    f"{loaded} is loaded")
    yield check("UCX transports", [
        (tls and not tls.startswith("^") and not has_gpu_transport, WARNING,
         f"UCX_TLS={tls} has none for GPUs",
         f"unset UCX_TLS, or add {'cuda' if gpus.kind == 'NVIDIA' else 'rocm'}"),
        (gpus.transports == (), NOTE, "MPI's UCX has no modules for GPUs",
         _AWARE_REMEDIES.get(rank.library.vendor, "use a UCX built for these GPUs"))],
        ", ".join(gpus.transports or ()))
