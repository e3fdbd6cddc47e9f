"""Trains with one method, and takes times, losses and costs."""

import logging
from argparse import Namespace
from typing import TYPE_CHECKING

import numpy as np

from ...record.statistics import Statistics
from . import timing
from .curves import ALONE
from .gradients import check_parameters
from .wire import Traffic
from .world import World

if TYPE_CHECKING:
    from .torch_training import Training

_log = logging.getLogger("mpiring")


def learn(world: World, options: Namespace, training: "Training", traffic: Traffic, name: str,
          seed: int) -> dict[str, list[float]]:
    """Train to the end, or to the time limit, and check that ranks agree; return the readings.

    Raises:
        WrongAnswerError: Parameters differ between ranks.

    Collective: yes. Blocking: yes.
    """
    seconds, validated, bits = list[float](), list[float](), list[float]()
    cost, done, limit = Statistics(), 0, options.time_limit or float("inf")
    # All ranks know the slowest rank's time, and so stop at the same step.
    while done < options.steps and sum(seconds) < limit:
        if done == options.settled:
            traffic.begin()
        seconds += timing.timed(world, training.step, 1, prepare=training.draw)
        done += 1
        if done > options.settled:
            cost += training.statistics
        over = done == options.steps or sum(seconds) >= limit
        if name != ALONE and (over or done % options.validate_every == 0):
            validated.append(done)
            bits.append(bits_per_byte(world, training))
    readings = {"step": seconds, "validated": validated, "bits": bits}
    if name != ALONE:
        check_parameters(world, {name: training.parameters()})
        if done > options.settled:
            readings |= _costs(world, cost, done - options.settled, traffic.end(cost.bytes_sent))
    if done < options.steps and world.rank == 0:
        _log.warning("%s, seed %d: stopped after %d of %d steps by --time-limit %g", name, seed,
                     done, options.steps, limit)
    return readings


def bits_per_byte(world: World, training: "Training") -> float:
    """Return the loss on the validation texts, of which each rank predicts a share."""
    total = np.array(training.validate(), np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, total, op=world.mpi.SUM)
    return float(total[0] / total[1])


def _costs(world: World, cost: Statistics, steps: int, host_bytes: float) -> dict[str, list[float]]:
    """Return the costs of a settled step: bytes of all ranks, seconds of the slowest rank."""
    nbytes = np.array([cost.dense_bytes, cost.bytes_sent], np.float64)
    world.raw.Allreduce(world.mpi.IN_PLACE, nbytes, op=world.mpi.SUM)
    slowest = world.slowest([cost.encode_s, cost.wire_s, cost.decode_s])
    names = ("dense_bytes", "sent_bytes", "host_bytes", "encode_s", "wire_s", "decode_s")
    return {name: [value / steps] for name, value in zip(names, (*nbytes, host_bytes, *slowest))}
