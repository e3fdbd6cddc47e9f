"""Reads what `bench --json` has written, and selects rows of it."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mpiring.tools.results import read_json

HERE = Path(__file__).parent
OURS, PERSISTENT, MPI = "mpiring auto", "mpiring persistent", "MPI_Allreduce"
CONTENDERS = {OURS: "mpiring", MPI: "MPI", "Gloo": "Gloo", "Horovod": "Horovod"}
ALONE, PARALLEL, BACK_END = "compute only", "mpiring DataParallel", "mpiring + PyTorch's DDP"
GLOO = "Gloo + PyTorch's DDP"
NARROW = ("float16", "bfloat16")
STEP_NAMES = {ALONE: "compute alone", PARALLEL: "mpiring `DataParallel`",
              "mpiring Sharded": "`Sharded`",
              "mpiring Sharded, overlap": "`Sharded`, `overlap=True`",
              "mpiring Sharded, node": "`Sharded`, `weights=\"node\"`",
              BACK_END: "mpiring back end + DDP", GLOO: "Gloo + DDP", "Horovod": "Horovod"}


@dataclass(frozen=True)
class Result:
    """The contents of a file of `bench ... --json`."""

    benchmark: str
    about: dict
    rows: list


@lru_cache(None)
def result_of(name):
    """Return a result of the folder data."""
    return Result(*read_json(str(HERE / "data" / f"{name}.json")))


def at_best_level(rows, *keys):
    """Return rows of the better thread level of each contender and case, in their order."""
    best = {}
    for row in rows:
        case = tuple(row[key] for key in (*keys, "contender"))
        if case not in best or row["median_us"] < best[case]["median_us"]:
            best[case] = {**row, "thread_level": ""}
    return list(best.values())


def allreduces(buffer):
    """Return what selects the rows of a kind of buffer."""
    return lambda rows: [row for row in at_best_level(rows, "bytes", "buffer", "dtype")
                         if row["buffer"] == buffer]


def case_of(about, row):
    """Return the hosts, ranks and links of a predicted step, in words."""
    if row["nodes"] == 1:
        return f"one node, {row['ranks']} ranks"
    rate = about["bandwidth"] * 8 / 1e6
    links = f"{rate:.0f} Mbit/s" if rate < 1000 else f"{rate / 1000:.0f} Gbit/s"
    return f"{row['nodes']} × {row['ranks'] // row['nodes']}, {links}"


def by_size(rows, key="median_us"):
    """Return values by contender, by size."""
    found = {}
    for row in rows:
        found.setdefault(row["bytes"], {})[row["contender"]] = row[key]
    return found


def sixteen_bits(result):
    """Return milliseconds by dtype, by how many numbers, where 16 bits were measured as well."""
    times = {(row["bytes"], row["dtype"]): row["median_us"] / 1e3
             for row in at_best_level(result.rows, "bytes", "dtype") if row["contender"] == OURS}
    return {nbytes // 4: {"float32": times[nbytes, dtype],
                          **{narrow: times[nbytes // 2, narrow] for narrow in NARROW}}
            for nbytes, dtype in sorted(times)
            if dtype == "float32" and (nbytes // 2, NARROW[0]) in times}


def hosts_of(about):
    """Return hosts × ranks, and that ranks are dealt out where they are."""
    dealt = ", dealt" if "round-robin" in about["lab"] else ""
    return f"{about['nodes']} × {about['ranks'] // about['nodes']}{dealt}"


def over(rows, row, **of):
    """Return the median of a row over that of another row, with its interval where it is known.

    Args:
        rows: All rows of a result.
        row: The row.
        of: Key of the other row and its value, as in `contender="Horovod"`; both rows have the
            same model.

    Returns:
        The ratio, and the ends of its 95 % interval; None if the other row is missing.
    """
    (key, value), = of.items()
    for other in rows:
        if other[key] == value and other.get("model") == row.get("model"):
            name = {ALONE: "over_compute", "dense": "over_dense", "alone": "over_alone"}.get(
                value, "over_gloo")
            return (row["median_ms"] / other["median_ms"],
                    row.get(f"{name}_low"), row.get(f"{name}_high"))
    return None
