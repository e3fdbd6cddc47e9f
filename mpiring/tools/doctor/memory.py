"""Judges shared memory, limits, and whether ranks may fork."""

from collections.abc import Iterator, Sequence

from ...text import count
from .facts import Job, Rank
from .findings import NOTE, OK, PROBLEM, WARNING, Finding, each_node, each_rank

_MIB = 1 << 20
# What each rank of a node takes of /dev/shm when it starts: measured with MPICH 5.0.2, which
# dies of a signal where there is less; Open MPI 5.0.11 asks for so much free memory.
_SHM_BYTES = {"MPICH": 5.3 * _MIB, "Open MPI": 16 * _MIB}
_SHM_BYTES_ELSE = 16 * _MIB
# As Docker makes it; PyTorch's data loaders hand batches on in it.
_SHM_SMALL = 256 * _MIB
_FEWEST_FILES = 1024
# Looks again, since jobs may have begun meanwhile; sh and bash.
_REMOVE = ("for f in /dev/shm/mpich_shm_* /dev/shm/sm_segment.* /dev/shm/vader_segment.*; do "
           "[ -O $f ] && ! grep -qsF $f /proc/[0-9]*/maps && rm $f; done")
# Without them, a fork copies pages that the network device writes into.
_FORK_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")


def findings(job: Job) -> Iterator[Finding]:
    """Judge each node's memory, and each rank's limits."""
    yield from each_node(job, lambda ranks: [_shm(ranks, _ranks_here(job, ranks))])
    yield from each_node(job, _leftovers)
    yield from each_rank(job, _limits)
    yield from each_rank(job, lambda rank: [_forks(rank)])


def shm_is_short(job: Job) -> bool:
    """Return whether some node's /dev/shm is too small for MPI."""
    return any(_needed(ranks[0], _ranks_here(job, ranks)) > (ranks[0].memory.shm_bytes or 0)
               for ranks in job.nodes().values() if ranks[0].memory.shm_bytes is not None)


def _ranks_here(job: Job, ranks: Sequence[Rank]) -> int:
    """Return how many ranks a node has; by what the launcher was asked for, before MPI knows."""
    return len(ranks) if job.size > 1 or job.failure is None else max(job.wanted, 1)


def _needed(rank: Rank, ranks_here: int) -> float:
    return ranks_here * _SHM_BYTES.get(rank.library.vendor, _SHM_BYTES_ELSE)


def _shm(ranks: Sequence[Rank], ranks_here: int) -> Finding:
    """Compare /dev/shm with what MPI takes of it; mpiring's own memory is not in it."""
    total, free = ranks[0].memory.shm_bytes, ranks[0].memory.shm_free_bytes
    if total is None or free is None:
        return Finding("/dev/shm", WARNING, "there is none", "mount -t tmpfs tmpfs /dev/shm")
    needed, vendor = _needed(ranks[0], ranks_here), ranks[0].library.vendor
    text = f"{_text(total)}, {_text(free)} free"
    wants = f"{vendor or 'MPI'} takes {_text(needed)} for {count(ranks_here, 'rank')}"
    remedy = ("mount -o remount,size=2G /dev/shm as root; in a container: docker run "
              "--shm-size=2g; in a pod: an emptyDir of medium Memory (packaging/mpijob.yaml)")
    if total < needed:
        return Finding("/dev/shm", WARNING if vendor == "Open MPI" else PROBLEM,
                       f"{text}, too small: {wants}", remedy)
    # Once MPI has started, what it needs is no longer free.
    if free < needed and not ranks[0].thread_level:
        return Finding("/dev/shm", PROBLEM, f"{text}, too full: {wants}",
                       "delete what dead jobs have left there (ls -l /dev/shm), or enlarge it")
    if total < _SHM_SMALL:
        return Finding("/dev/shm", NOTE, f"{text}: enough for MPI, little for PyTorch's data "
                       f"loaders", remedy)
    return Finding("/dev/shm", OK, f"{text}; {wants}")


def _leftovers(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """MPICH names its files by the job: a new job with an old Slurm number may trip over them."""
    memory = ranks[0].memory
    if memory.left_files:
        yield Finding(
            "dead jobs", NOTE, f"{count(memory.left_files, 'file')} of MPI in /dev/shm that no "
            f"process uses, {_text(memory.left_bytes)}", _REMOVE)


def _text(nbytes: float) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes / _MIB:.0f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:.0f} KiB"


def _limits(rank: Rank) -> Iterator[Finding]:
    locked, files = rank.memory.locked_bytes, rank.memory.open_files
    if locked is not None and any(device.is_fast and device.active for device in rank.devices):
        yield Finding("ulimit -l", WARNING, f"only {_text(locked)} may be locked, which fast "
                      f"networks need without limit", "memlock unlimited in "
                      "/etc/security/limits.conf, and LimitMEMLOCK=infinity for slurmd")
    if files is not None and files < _FEWEST_FILES:
        yield Finding("ulimit -n", NOTE, f"only {files} files may be open, and every shared array "
                      f"is one", f"ulimit -n {_FEWEST_FILES}")


def _forks(rank: Rank) -> Finding:
    """Judge forks, as of data loaders: a child shares the network's memory with its parent."""
    method = rank.start_method
    text = f"Python starts processes by {method}"
    fast = [device.name for device in rank.devices
            if device.kind in ("InfiniBand", "RoCE", "Omni-Path", "EFA") and device.active]
    safe = any(rank.variables.get(name, "0") not in ("", "0") for name in _FORK_VARIABLES)
    if method == "fork" and fast and not safe:
        return Finding("fork", WARNING, f"{text}, beside {', '.join(fast)}: a forked data loader "
                       f"can crash, or spoil messages", "multiprocessing.set_start_method("
                       "'forkserver') before mpiring.init(), or export RDMAV_FORK_SAFE=1")
    if method == "fork" and not fast:
        text += ", beside no device that minds"
    return Finding("fork", OK, text)
