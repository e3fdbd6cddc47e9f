"""Checks averaged gradients and trained parameters, and measures the memory that steps use."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...provisional import Array
from .contenders import ALONE, GLOO, OURS
from .inputs import WrongAnswerError
from .memory import Growth, NodeGrowth
from .world import World

# The result of a float32 sum depends on its order. The trained parameters also depend on whether a
# ReLU passes the gradient of an input near zero.
_TOLERANCE, _TRAINED_TOLERANCE = 1e-4, 1e-2


def start_training(world: World, make: Callable[[], Any], right: Mapping[str, Array],
                   use: Callable[[Any], object] = lambda training: training.step(),
                   ) -> tuple[Any, dict[str, list[float]]]:
    """Create a training run, and check the gradients of its first step.

    Return the run, and the memory that it adds, in bytes: the largest peak of a rank, and the
    largest total of a node at the end.

    Args:
        make: Function that returns the run, with a `name` and methods `step` and `gradients`.
        right: Means over ranks of the first step's gradients; empty to check none.
        use: Function that is called twice with the run, to measure its peak memory.

    Raises:
        WrongAnswerError: A gradient is not the mean.
    """
    node_growth, growth = NodeGrowth(world), Growth(world.comm.local_size)
    training = make()
    # All runs start from the same weights, so that the first step can be checked.
    training.step()
    if right and training.name != ALONE:
        rank, wrong = _first_wrong(world, training.gradients(), right, _TOLERANCE)
        if wrong:
            raise WrongAnswerError(f"{training.name} on rank {rank}: the gradients {wrong} are not "
                                   f"the means over ranks")
    # The optimizer creates its state in the first step; this does not count toward the peak.
    training.step()
    growth.forget_peak()
    use(training)
    use(training)
    return training, {"peak_bytes": world.slowest([growth.max_bytes()]),
                      "node_bytes": [node_growth.bytes_now()]}


def means_over_ranks(world: World, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the means of all ranks' arrays, computed by MPI in float64."""
    means = {}
    for name, value in arrays.items():
        means[name] = value.astype(np.float64, order="C") / world.size
        world.raw.Allreduce(world.mpi.IN_PLACE, means[name], op=world.mpi.SUM)
    return means


def _first_wrong(world: World, arrays: Mapping[str, Array], right: Mapping[str, Array],
                 tolerance: float) -> tuple[int, list[str]]:
    """Return the lowest rank with wrong arrays and their names; (0, []) if there is none."""
    # The tolerance for rounding is relative to the largest number.
    wrong = [name for name, value in right.items() if not np.allclose(
        arrays[name], value, rtol=tolerance, atol=tolerance * np.abs(value).max())]
    return next(((rank, names) for rank, names in enumerate(world.raw.allgather(wrong)) if names),
                (0, []))


def check_parameters(world: World, trained: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise WrongAnswerError on all ranks if trained parameters differ between ranks or contenders.

    After the same number of steps, they must be bitwise identical on all ranks, and close to the
    reference. The reference is DDP with Gloo if it takes part, otherwise DataParallel.
    """
    reference = GLOO if GLOO in trained else OURS
    for contender, parameters in trained.items():
        if contender == ALONE:
            continue
        digest = hashlib.sha256()
        for value in parameters.values():
            digest.update(value.tobytes())
        if len(set(world.raw.allgather(digest.digest()))) > 1:
            raise WrongAnswerError(f"{contender} on rank {world.rank}: the parameters differ "
                                   f"between ranks after training")
        rank, wrong = _first_wrong(
            world, parameters, trained.get(reference, {}), _TRAINED_TOLERANCE)
        if wrong:
            raise WrongAnswerError(f"{contender} on rank {rank}: after training, the parameters "
                                   f"{wrong} are not those with {reference}")
