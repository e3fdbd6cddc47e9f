"""Holds measurements, and the environment that they were made in."""

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..files import Environment, machine
from .world import World


@dataclass(frozen=True)
class Measurement:
    """The readings of a case and contender.

    Attributes:
        labels: Describe case and contender.
        readings: By kind, times in seconds; none where the contender cannot do the case.
    """

    labels: dict[str, Any]
    readings: dict[str, list[float]]


def pooled(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Join the readings of measurements that have equal labels, in the order of the first ones."""
    found: dict[str, Measurement] = {}
    for measurement in measurements:
        key = json.dumps(measurement.labels, sort_keys=True)
        known = found.setdefault(key, Measurement(measurement.labels, {}))
        for name, values in measurement.readings.items():
            known.readings.setdefault(name, []).extend(values)
    return list(found.values())


def beside(found: Sequence[Measurement], *keys: str,
           ) -> Iterator[tuple[Measurement, dict[str, Measurement]]]:
    """Yield each measurement, with those of its case by contender.

    Args:
        keys: Of the labels that are equal in a case.
    """
    def case(measurement: Measurement) -> tuple[Any, ...]:
        return tuple(measurement.labels[key] for key in keys)

    cases: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for measurement in found:
        cases.setdefault(case(measurement), {})[measurement.labels["contender"]] = measurement
    for measurement in found:
        yield measurement, cases[case(measurement)]


def environment(world: World) -> Environment:
    """Return everything about this run that may matter to a reader of its numbers.

    Collective: yes. Blocking: yes.
    """
    mine = {"rank": world.rank, "host": socket.gethostname(), "node": world.comm.node_rank,
            # Those that this process may use, where they are known (Linux).
            "cores": (sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                      else None)}
    # The first line of the library's description, without what is not name and version.
    library = world.mpi.Get_library_version().strip("\0").splitlines()[0]
    return {
        **machine(),
        "mpi_library": " ".join(library.replace("Version:", "").split()),
        "thread_level": world.thread_level,
        "ranks": world.size,
        "nodes": world.comm.num_nodes,
        "placement": world.raw.allgather(mine),
    }
