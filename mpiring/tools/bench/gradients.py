"""Checks averaged gradients and trained parameters, and measures the memory of steps."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...memory.arrays import Array
from .contenders import ALONE, GLOO, OURS
from .inputs import WrongAnswerError
from .memory import Growth, NodeGrowth
from .world import World

# Sums of float32 depend on their order; and what was trained, on whether a ReLU whose input is
# nearly zero lets its gradient pass.
_TOLERANCE, _TRAINED_TOLERANCE = 1e-4, 1e-2


def begun(world: World, make: Callable[[], Any], right: Mapping[str, Array],
          use: Callable[[Any], object] = lambda training: training.step(),
          ) -> tuple[Any, dict[str, list[float]]]:
    """Make a training and check its first step.

    Args:
        make: Returns the training, with its `name` and functions `step` and `gradients`.
        right: Means over ranks of the first step's gradients; empty to check none.
        use: Called twice with the training, to measure the peak of memory.

    Returns:
        The training, and by how many bytes processes grow with it: at the peak, that of the ranks
        that grows most, and at the end, the node that does.

    Raises:
        WrongAnswerError: A gradient is not the mean.

    Collective: yes. Blocking: yes.
    """
    of_node, growth = NodeGrowth(world), Growth(world.comm.local_size)
    training = make()
    # The first step of all trainings starts from the same weights, so that it can be checked.
    training.step()
    if right and training.name != ALONE:
        check(world, training.name, training.gradients(), right)
    # After the first step buckets may be built again, which is not counted.
    training.step()
    growth.forget_peak()
    use(training)
    use(training)
    return training, {"peak_bytes": world.slowest([growth.max_bytes()]),
                      "node_bytes": [of_node.bytes_now()]}


def means_over_ranks(world: World, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the means of all ranks' arrays, in float64, by MPI.

    Collective: yes. Blocking: yes.
    """
    means = {}
    for name, value in arrays.items():
        means[name] = value.astype(np.float64, order="C") / world.size
        world.raw.Allreduce(world.mpi.IN_PLACE, means[name], op=world.mpi.SUM)
    return means


def check(world: World, contender: str, gradients: Mapping[str, Array],
          right: Mapping[str, Array]) -> None:
    """Raise on all ranks if on any of them a gradient is not the mean.

    Raises:
        WrongAnswerError: One differs by more than rounding does.

    Collective: yes. Blocking: yes.
    """
    rank, wrong = _first_wrong(world, gradients, right, _TOLERANCE)
    if wrong:
        raise WrongAnswerError(f"{contender} on rank {rank}: the gradients {wrong} are not the "
                               f"means over ranks")


def _first_wrong(world: World, arrays: Mapping[str, Array], right: Mapping[str, Array],
                 tolerance: float) -> tuple[int, list[str]]:
    """Return the lowest rank on which arrays are wrong, and their names, if there are any."""
    # Rounding is tolerated, at the size of the largest number.
    wrong = [name for name, value in right.items() if not np.allclose(
        arrays[name], value, rtol=tolerance, atol=tolerance * np.abs(value).max())]
    return next(((rank, names) for rank, names in enumerate(world.raw.allgather(wrong)) if names),
                (0, []))


def check_parameters(world: World, trained: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise on all ranks if trained parameters differ between ranks or contenders.

    Args:
        trained: Parameters of each contender, after as many steps.

    Raises:
        WrongAnswerError: They differ between ranks in any bit, or by more than rounding causes
            from those of DDP with Gloo, else of DataParallel, where either takes part.

    Collective: yes. Blocking: yes.
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
