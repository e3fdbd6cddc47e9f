"""Judges whether every rank has processors of its own, and as many threads as those bear."""

import math
from collections.abc import Iterator, Sequence

from ...text import count
from .facts import Job, Rank
from .findings import NOTE, OK, WARNING, Finding

TITLE = "Processors"

# The first that is set counts: OpenBLAS, MKL, and what both and PyTorch obey.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
# Fewer threads than this part of the processors leave too much of them idle.
_USED = 0.5
# A job of the doctor's length adds little to a load over a minute.
_BUSY = 0.5


def findings(job: Job) -> Iterator[Finding]:
    """Judge each node's processors, and what its ranks do with them."""
    for ranks in job.nodes().values():
        here = tuple(rank.rank for rank in ranks)
        yield _room(ranks, here)
        yield _binding(ranks, here)
        yield _threads(ranks, here)
        if is_busy(ranks):
            load, online = ranks[0].processors.load, ranks[0].processors.online
            yield Finding("other programs", NOTE, f"load {load:.1f} on "
                          f"{count(online, 'processor')} in the last minute",
                          "let nobody else on the node: srun --exclusive", here)
    for rank in job.ranks:
        yield from _slurm_share(rank)


def available(ranks: Sequence[Rank]) -> float:
    """Return how many processors' time the ranks of a node have in all."""
    union = frozenset[int]().union(*(rank.processors.allowed for rank in ranks))
    quotas = [rank.processors.quota for rank in ranks if rank.processors.quota is not None]
    return min([float(len(union)), *quotas])


def is_busy(ranks: Sequence[Rank]) -> bool:
    """Return whether other programs keep more than half of a node's processors busy."""
    return max(rank.processors.load for rank in ranks) > _BUSY * ranks[0].processors.online


def is_oversubscribed(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks of a node have to take turns."""
    return len(ranks) > available(ranks)


def _room(ranks: Sequence[Rank], here: tuple[int, ...]) -> Finding:
    first = ranks[0].processors
    union = frozenset[int]().union(*(rank.processors.allowed for rank in ranks))
    room = available(ranks)
    text = (f"{count(len(ranks), 'rank')} on {len(union)} of {count(first.online, 'processor')}")
    if room < len(union):
        text += f", of which a cgroup grants {room:g}"
    if is_oversubscribed(ranks):
        return Finding(
            "processors", WARNING, f"{text}: oversubscribed; ranks wait for each other's turns",
            f"start at most {count(max(1, math.floor(room)), 'rank')} on such a node, or ask for "
            f"more processors (srun --cpus-per-task, docker --cpus)", here)
    if len(ranks) == 1 and first.cores < len(first.allowed):
        text += f" ({first.cores} cores)"
    return Finding("processors", OK, text, "", here)


def _binding(ranks: Sequence[Rank], here: tuple[int, ...]) -> Finding:
    sets = [rank.processors.allowed for rank in ranks]
    sizes = sorted({len(one) for one in sets})
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    online = ranks[0].processors.online
    if sum(map(len, sets)) == len(frozenset[int]().union(*sets)):
        return Finding("binding", OK, f"each rank has {each} of its own", "", here)
    if len(sets[0]) == online and len(set(sets)) == 1:
        text = f"none: each rank may use all {online}"
        if is_oversubscribed(ranks):
            return Finding("binding", OK, text, "", here)
        return Finding("binding", NOTE, text, "mpirun -bind-to core (MPICH), --bind-to core (Open "
                       "MPI), srun --cpu-bind=cores", here)
    if len(set(sets)) == 1 and len(ranks) <= len(sets[0]):
        return Finding("binding", OK, f"all ranks share the same {each}", "", here)
    text = (f"all ranks are bound to the same {each} of {online}" if len(set(sets)) == 1 else
            "some ranks share processors, while others have their own")
    return Finding("binding", WARNING, text,
                   "mpirun --bind-to none, srun --cpu-bind=cores; and mind OMPI_MCA_*, I_MPI_PIN* "
                   "or SLURM_CPU_BIND* variables", here)


def _threads(ranks: Sequence[Rank], here: tuple[int, ...]) -> Finding:
    """Judge the threads of NumPy's BLAS, which PyTorch has as many of."""
    each = [_threads_of(rank) for rank in ranks]
    room, total = available(ranks), sum(each)
    variable = next((name for name in _THREAD_VARIABLES if ranks[0].variables.get(name)), "")
    source = f"{variable}={ranks[0].variables[variable]}" if variable else "nothing is set"
    share = max(1, math.floor(room / len(ranks)))
    span = f"{each[0]}" if len(set(each)) == 1 else f"{min(each)} to {max(each)}"
    text = f"{span} per rank in NumPy's BLAS ({source}): {total} on {count(int(room), 'processor')}"
    if not variable and "torch" in ranks[0].versions:
        text += "; PyTorch's are shared out by mpiring.torch"
    if total > max(room, len(ranks)):
        return Finding("threads", WARNING, text, f"export OMP_NUM_THREADS={share}", here)
    if total < _USED * room:
        return Finding("threads", NOTE, text, f"export OMP_NUM_THREADS={share}, if the model's "
                       f"compute is in NumPy or PyTorch on CPUs", here)
    return Finding("threads", OK, text, "", here)


def _threads_of(rank: Rank) -> int:
    """Return how many threads a rank's BLAS takes: what a variable says, else all it may use."""
    for name in _THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list, of which the first is the outermost level's.
        first = rank.variables.get(name, "").partition(",")[0]
        if first.isdigit() and int(first):
            return int(first)
    return len(rank.processors.allowed)


def _slurm_share(rank: Rank) -> Iterator[Finding]:
    """Since Slurm 22.05, srun does not take --cpus-per-task from the batch script any more."""
    wanted = rank.variables.get("SLURM_CPUS_PER_TASK", "")
    got = len(rank.processors.allowed)
    if wanted.isdigit() and got < int(wanted):
        yield Finding("--cpus-per-task", WARNING,
                      f"{wanted} were asked for, but the rank may use {got}",
                      "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the batch script, or give "
                      "srun --cpus-per-task, too", (rank.rank,))
