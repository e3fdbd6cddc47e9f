"""Judges whether every rank has processors of its own, and a fitting number of threads."""

import math
from collections.abc import Iterator, Sequence

from ...text import count
from .facts import Job, Rank
from .findings import NOTE, OK, WARNING, Finding, each_node, each_rank

# The first that is set counts: OpenBLAS, MKL, and the one that both and PyTorch obey.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
# Fewer threads than this share of the processors leave too many of them idle.
_USED = 0.5
# A job as short as the doctor adds little to a load over a minute.
_BUSY = 0.5


def findings(job: Job) -> Iterator[Finding]:
    """Judge each node's processors, and how its ranks use them."""
    yield from each_node(job, _node)
    yield from each_rank(job, _slurm_share)


def _node(ranks: Sequence[Rank]) -> Iterator[Finding]:
    yield _room(ranks)
    yield _binding(ranks)
    yield _threads(ranks)
    if is_busy(ranks):
        load, online = ranks[0].processors.load, ranks[0].processors.online
        yield Finding("other programs", NOTE, f"load {load:.1f} on {count(online, 'processor')} "
                      f"in the last minute", "let nobody else on the node: srun --exclusive")


def _all_allowed(ranks: Sequence[Rank]) -> frozenset[int]:
    return frozenset[int]().union(*(rank.processors.allowed for rank in ranks))


def available(ranks: Sequence[Rank]) -> float:
    """Return how many processors' time the ranks of a node have in all."""
    quotas = [rank.processors.quota for rank in ranks if rank.processors.quota is not None]
    return min([float(len(_all_allowed(ranks))), *quotas])


def is_busy(ranks: Sequence[Rank]) -> bool:
    """Return whether other programs keep more than half of a node's processors busy."""
    return max(rank.processors.load for rank in ranks) > _BUSY * ranks[0].processors.online


def is_oversubscribed(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks of a node have to take turns."""
    return len(ranks) > available(ranks)


def _room(ranks: Sequence[Rank]) -> Finding:
    first, room, allowed = ranks[0].processors, available(ranks), len(_all_allowed(ranks))
    text = f"{count(len(ranks), 'rank')} on {allowed} of {count(first.online, 'processor')}"
    if room < allowed:
        text += f", of which a cgroup grants {room:g}"
    if is_oversubscribed(ranks):
        return Finding(
            "processors", WARNING, f"{text}: oversubscribed; ranks wait for each other's turns",
            f"start at most {count(max(1, math.floor(room)), 'rank')} on such a node, or ask for "
            f"more processors (srun --cpus-per-task, docker --cpus)")
    if len(ranks) == 1 and first.cores < len(first.allowed):
        text += f" ({first.cores} cores)"
    return Finding("processors", OK, text)


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _binding(ranks: Sequence[Rank]) -> Finding:
    sets = [rank.processors.allowed for rank in ranks]
    each, online = _span([len(allowed) for allowed in sets]), ranks[0].processors.online
    if sum(map(len, sets)) == len(_all_allowed(ranks)):
        return Finding("binding", OK, f"each rank has {each} of its own")
    alike = len(set(sets)) == 1
    if alike and len(sets[0]) == online:
        text = f"none: each rank may use all {online}"
        if is_oversubscribed(ranks):
            return Finding("binding", OK, text)
        return Finding("binding", NOTE, text, "mpirun -bind-to core (MPICH), --bind-to core (Open "
                       "MPI), srun --cpu-bind=cores")
    if alike and len(ranks) <= len(sets[0]):
        return Finding("binding", OK, f"all ranks share the same {each}")
    return Finding("binding", WARNING, f"all ranks are bound to the same {each} of {online}"
                   if alike else "some ranks share processors, while others have their own",
                   "mpirun --bind-to none, srun --cpu-bind=cores; and mind OMPI_MCA_*, I_MPI_PIN* "
                   "or SLURM_CPU_BIND* variables")


def _threads(ranks: Sequence[Rank]) -> Finding:
    """Judge the threads of NumPy's BLAS; PyTorch has as many."""
    each, room = [_threads_of(rank) for rank in ranks], available(ranks)
    total, variables = sum(each), ranks[0].variables
    variable = next((name for name in _THREAD_VARIABLES if variables.get(name)), "")
    source = f"{variable}={variables[variable]}" if variable else "nothing is set"
    remedy = f"export OMP_NUM_THREADS={max(1, math.floor(room / len(ranks)))}"
    text = (f"{_span(each)} per rank in NumPy's BLAS ({source}): {total} on "
            f"{count(int(room), 'processor')}")
    if not variable and "torch" in ranks[0].versions:
        text += "; PyTorch's are shared out by mpiring.torch"
    if total > max(room, len(ranks)):
        return Finding("threads", WARNING, text, remedy)
    if total < _USED * room:
        return Finding("threads", NOTE, text,
                       f"{remedy}, if the model's compute is in NumPy or PyTorch on CPUs")
    return Finding("threads", OK, text)


def _threads_of(rank: Rank) -> int:
    """Return how many threads a rank's BLAS takes: as a variable says, or one per processor."""
    for name in _THREAD_VARIABLES:
        # OMP_NUM_THREADS may be a list, of which the first is the outermost level's.
        first = rank.variables.get(name, "").partition(",")[0]
        if first.isdigit() and int(first):
            return int(first)
    return len(rank.processors.allowed)


def _slurm_share(rank: Rank) -> Iterator[Finding]:
    """Since Slurm 22.05, srun no longer takes --cpus-per-task from the batch script."""
    wanted, got = rank.variables.get("SLURM_CPUS_PER_TASK", ""), len(rank.processors.allowed)
    if wanted.isdigit() and got < int(wanted):
        yield Finding("--cpus-per-task", WARNING,
                      f"{wanted} were asked for, but the rank may use {got}",
                      "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the batch script, or give "
                      "srun --cpus-per-task, too")
