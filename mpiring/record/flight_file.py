"""Describes a rank's last operations in the format of PyTorch's flight recorder.

`python -m torch.distributed.flight_recorder.fr_trace FOLDER` compares such files of all ranks, and
names the rank that differs. It accepts only PyTorch's collectives and back ends, and compares
types, sizes, dtypes and states. The dtype therefore holds the complete call, with op and root.

Source: FlightRecorder.hpp and torch/distributed/flight_recorder of PyTorch 2.13.
"""

import math
import pickle
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .counter import OperationCounter
from .flight import Flight

_VERSION = "2.10"
# fr_trace refuses other names of back ends; before PyTorch 2.12 also Gloo's.
_BACKEND = "nccl"
# PyTorch's names of collectives, by the prefix of a call's kind; other calls count as barriers.
_TYPES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter_v",
    "reduce": "reduce", "allgather": "all_gather_v", "all_gather": "all_gather_v",
    "broadcast": "broadcast", "gather": "gather", "scatter": "scatter", "all_to_all": "all_to_all",
    "": "barrier"}
# A dtype and a shape in the text of a call.
_ARRAY = re.compile(r"[a-z]\w* \(((?:\d+, ?)*\d*)\)")
_FIRST_GROUP = ("0", "default_pg")


def pickled(flights: Sequence[Flight], counters: Iterable[OperationCounter]) -> bytes:
    """Return the content of a rank's file, a pickled dict of lists, numbers and strings.

    Messages are left out, because fr_trace expects all ranks of a group in each operation.

    Args:
        flights: Last operations of the rank, the newest last.
        counters: Counters of the communicators to include.
    """
    groups = {counter.group: counter for counter in counters}
    numbers = {name: number for number, name in enumerate(sorted(groups))}
    entries = [*_entries(flights, groups, numbers)][::-1]
    return pickle.dumps({
        "version": _VERSION,
        "comm_lib_version": "mpiring",
        "pg_config": {name: {"name": name, "desc": desc, "ranks": str([*counter.ranks])}
                      for counter, (name, desc) in zip(groups.values(), map(_names_of, groups))},
        "pg_status": {str(number): _status(entries, number) for number in numbers.values()},
        "entries": entries})


def _entries(flights: Sequence[Flight], groups: Mapping[str, OperationCounter],
             numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the entries, the newest first.

    fr_trace drops entries with a lower `record_id` than the first entry of another rank. This
    number counts the earlier operations in all groups, which is the same on all ranks.
    """
    clock_s = time.time() - time.monotonic()
    earlier = {name: counter.sequence for name, counter in groups.items()}
    for flight in reversed(flights):
        if flight.group in groups:
            earlier[flight.group] = flight.sequence
            yield {"record_id": sum(earlier.values()), "pg_id": numbers[flight.group],
                   "process_group": _names_of(flight.group), **_call(flight),
                   **_progress(flight, clock_s)}


def _names_of(group: str) -> tuple[str, str]:
    return (group, "undefined") if group else _FIRST_GROUP


def _call(flight: Flight) -> dict[str, Any]:
    kind, text = flight.call.kind, flight.call.header.decode(errors="replace").strip()
    torch_type = next(name for prefix, name in _TYPES.items() if kind.startswith(prefix))
    # fr_trace compares dtypes only if the first array has a dimension.
    sizes = [[int(n) for n in re.findall(r"\d+", shape)] or [1]
             for shape in _ARRAY.findall(flight.call.detail)] or [[1]]
    return {
        "collective_seq_id": flight.sequence, "p2p_seq_id": 0, "op_id": flight.sequence,
        # A second colon would end the name.
        "profiling_name": f"{_BACKEND}:{torch_type} {text.replace(':', ';')}",
        "input_sizes": sizes, "output_sizes": sizes, "input_dtypes": [text],
        "output_dtypes": [text], "is_p2p": False, "frames": [], "algorithm": flight.algorithm,
        "bytes": flight.call.nbytes}


def _progress(flight: Flight, clock_s: float) -> dict[str, Any]:
    created_ns, started_ns, ended_ns = (
        math.floor((at_s + clock_s) * 1e9) if at_s else None
        for at_s in (flight.called_s, flight.started_s, flight.ended_s))
    state = "completed" if ended_ns else "started" if started_ns else "scheduled"
    return {
        "state": state, "retired": state == "completed", "time_created_ns": created_ns,
        "time_discovered_started_ns": started_ns, "time_discovered_completed_ns": ended_ns,
        "exposed_ms": flight.exposed_s * 1e3}


def _status(entries: Sequence[dict[str, Any]], number: int) -> dict[str, int]:
    """Return the numbers of a group's last operations in each state; -1 for none."""
    times = {"enqueued": "time_created_ns", "started": "time_discovered_started_ns",
             "completed": "time_discovered_completed_ns"}
    return {f"last_{name}_collective": max(
        (entry["collective_seq_id"] for entry in entries
         if entry["pg_id"] == number and entry[time_ns]), default=-1)
        for name, time_ns in times.items()}
