"""Tunes the averaging of gradients in the first steps of a training, and saves the result."""

import dataclasses
import logging
import time
from typing import Any

import numpy as np

from ..arguments import truth
from ..buckets.bucket import BucketPlan
from ..communicator import Communicator
from ..errors import ConfigError
from ..launch.cache import Cache
from ..memory.digest import digest
from ..operations.algorithms import candidates
from .fused import FusedTensors, Fusion
from .search import TURNS, Axis, Choice, Descent, Outcome, Search

_log = logging.getLogger("mpiring")

# Increase this number when saved choices change their meaning.
_EDITION = 1
MAX_STEPS = 60
# The first step with other settings allocates memory; the fastest of the following steps counts.
_IGNORED_STEPS, _TIMED_STEPS = 1, 2
# A step that is not timed comes first, and a comparison last.
_MAX_TRIALS = (MAX_STEPS - 1) // (_IGNORED_STEPS + _TIMED_STEPS) - 2 * TURNS
# On any network, the additional messages of shorter buckets cost more time than they hide.
_SHORTEST_BUCKET = 256 << 10
_OPERATIONS, _PIECES, _SLICES = (1, 2, 4), (0.5, 1.0, 2.0), (1, 2, 3)


def is_wanted(fusion: Fusion, comm: Communicator) -> bool:
    """Return whether to tune in the first steps.

    Raises ConfigError if the user requests both tuning and bitwise identical runs.
    """
    if fusion.autotune is None:
        if fusion.deterministic and comm.config.autotune and comm.rank == 0:
            _log.info("autotune is off: deterministic=True asks for equal bits in all runs")
        return comm.config.autotune and not fusion.deterministic and comm.size > 1
    if truth("autotune", fusion.autotune) and fusion.deterministic:
        raise ConfigError(
            f"rank {comm.rank}: autotune=True with deterministic=True: the fastest settings "
            f"differ from run to run, and with them the rounding of means; leave out one of them")
    return fusion.autotune and comm.size > 1


class Autotuner:
    """Times the first steps with different settings, and keeps the fastest ones.

    Each rank measures its own time. After the last step of a trial, the ranks agree on the time of
    the slowest rank, so they make the same decisions. Other steps need no message.

    If it `overlaps`, several operations may be in flight. `first` are the settings before the first
    trial; None until that begins.
    """

    def __init__(self, comm: Communicator, *, overlaps: bool) -> None:
        self._comm, self._overlaps = comm, overlaps
        self.first: Choice | None = None
        self._search: Search | None = None
        self._cache: Cache | None = None
        self._since_s = 0.0
        self._times: list[float] = []

    def end_step(self, fused: FusedTensors, *, fixed: bool) -> bool:
        """Record the time of the step that ends; return whether tuning is over.

        If `fixed`, buckets must not change. Collective; blocking at the end of a trial.
        """
        if self._search is None:
            return self._begin(fused, fixed=fixed)
        self._times.append(time.perf_counter() - self._since_s)
        if len(self._times) == _IGNORED_STEPS + _TIMED_STEPS:
            slowest = np.array([min(self._times[_IGNORED_STEPS:])])
            self._comm.allreduce(slowest, op="max")
            self._times.clear()
            try:
                fused.use(self._search.send(float(slowest[0])))
            except StopIteration as end:
                self._finish(fused, end.value)
                return True
        self._since_s = time.perf_counter()
        return False

    def _begin(self, fused: FusedTensors, *, fixed: bool) -> bool:
        """Use saved settings, or begin a search; return whether there are saved settings."""
        self.first = first = fused.choice
        plans = _plans(fused, fixed=fixed)
        axes = self._axes(fused, list(plans))
        tensors = digest(f"{tensor}\n".encode() for tensor in fused.tensors.values())
        self._cache = Cache(
            self._comm.config.tuning_folder, "step-",
            f"{_EDITION} {self._comm.tunable.cluster}, model {tensors:016x}, {[*fused.reducers]}"
            f"{', fixed buckets' * fixed}, from {first}")
        saved = self._saved(first, axes)
        if saved is not None:
            fused.use(saved)
            self._report(f"an earlier job has chosen {saved}")
            return True
        algorithm_for, gpu = self._comm.tunable.algorithm_for, fused.gpu

        def identity(choice: Choice) -> object:
            plan = plans[choice.bucket_bytes]
            algorithms = tuple(
                algorithm_for(bucket.nbytes, bucket.dtype, choice.algorithm(bucket.nbytes), gpu)
                for bucket in plan)
            return plan, algorithms, choice.operations, choice.pieces, choice.slices

        self._search = Descent(first, axes, identity, _MAX_TRIALS).search()
        fused.use(next(self._search))
        self._since_s = time.perf_counter()
        return False

    def _axes(self, fused: FusedTensors, lengths: list[int]) -> list[Axis]:
        """Return the settings that matter for this model, and the values to try."""
        comm, nodes = self._comm, self._comm.memory_groups
        names = candidates(comm.size, len(nodes), {bucket.plan.dtype for bucket in fused.buckets},
                           fused.gpu)
        algorithms = ["auto", *names] if comm.config.algorithm == "auto" else ["auto"]
        # Pieces and slices only affect messages. On GPUs, their size is fixed.
        sends = len(nodes) > 1 and not fused.gpu
        axes = [Axis("bucket_bytes", lengths), Axis("long", algorithms, ordered=False)]
        if self._overlaps:
            axes.append(Axis("operations", sorted({*_OPERATIONS, fused.choice.operations})))
        axes.append(Axis("short", algorithms, ordered=False))
        if sends:
            axes.append(Axis("pieces", _PIECES))
        if sends and len(nodes) < comm.size:
            axes.append(Axis("slices", _SLICES))
        return axes

    def _saved(self, first: Choice, axes: list[Axis]) -> Choice | None:
        """Return the choice that rank 0 has on disk, if all its values may be chosen."""
        value: Any = None
        if self._comm.rank == 0 and self._cache is not None:
            value = self._cache.read("choice")
        value = self._comm.broadcast_object(value)
        try:
            return dataclasses.replace(first, **{
                axis.name: axis.values[axis.values.index(value[axis.name])] for axis in axes})
        except (KeyError, TypeError, ValueError):
            return None

    def _finish(self, fused: FusedTensors, outcome: Outcome) -> None:
        fused.use(outcome.choice)
        self._report(outcome)
        if self._comm.rank == 0 and self._cache is not None:
            try:
                self._cache.write("choice", dataclasses.asdict(outcome.choice))
            except OSError as exc:
                _log.warning("the settings cannot be saved in %s (%s), so each job tunes again",
                             self._cache.folder, exc.strerror or exc)

    def _report(self, text: object) -> None:
        if self._comm.rank == 0:
            # The user has asked for tuning, and a warning appears even without configured logging.
            _log.warning("autotune: %s", text)


def _plans(fused: FusedTensors, *, fixed: bool) -> dict[int, tuple[BucketPlan, ...]]:
    """Return different plans of buckets, including the current one, by increasing bucket length."""
    plans = {fused.choice.bucket_bytes: fused.plan(fused.choice.bucket_bytes)}
    if fixed:
        return plans
    total = sum(tensor.padded_bytes for tensor in fused.tensors.values())
    nbytes = _SHORTEST_BUCKET
    while nbytes < 2 * total:
        plan = fused.plan(nbytes)
        if plan not in plans.values():
            plans[nbytes] = plan
        nbytes *= 2
    return dict(sorted(plans.items()))
