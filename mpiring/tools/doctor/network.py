"""Judges the networks: which there are, and what was measured over them."""

import statistics
from collections.abc import Iterator, Sequence

from .facts import Device, Job, Pair, Rank
from .findings import NOTE, OK, WARNING, Finding, each_rank, where
from .processors import is_busy, is_oversubscribed

# Below these, messages take a way that they should not take: on a node, not its memory.
_NODE_LATENCY_S, _NODE_BYTES_PER_S = 20e-6, 1e9
_FAST_LATENCY_S = 30e-6
_OF_SPEED = 0.5
_OF_MEDIAN = 0.6

_TRANSPORT_VARIABLES = {"UCX_TLS": ("tcp",), "FI_PROVIDER": ("tcp", "sockets"),
                        "OMPI_MCA_btl": ("tcp",)}


def findings(job: Job) -> Iterator[Finding]:
    """Judge devices, variables that choose among them, and measurements."""
    yield from each_rank(job, lambda rank: [_devices(rank), *_variables(rank)])
    inside = [pair for pair in job.pairs if len({job.ranks[rank].node for rank in pair.ranks}) == 1]
    between = [pair for pair in job.pairs if pair not in inside]
    if inside:
        yield _inside(job, inside)
    if between:
        yield _between(job, between)
        yield from _slow_links(job, between)


def _devices(rank: Rank) -> Finding:
    active = [device for device in rank.devices if device.active and device.kind != "virtual"]
    active += [device for device in rank.devices if device.active and device not in active]
    down = [device.name for device in rank.devices if device.is_fast and not device.active]
    text = ", ".join(map(_described, active)) or "none"
    if down:
        return Finding("devices", WARNING, f"{text}; down: {', '.join(down)}",
                       "ask the administrators: ibstat shows the state of each port")
    return Finding("devices", OK, text)


def _described(device: Device) -> str:
    speed = f"{device.gbit:g} Gbit/s" if device.gbit else "speed unknown"
    return f"{device.name} ({device.kind}, {speed})"


def _variables(rank: Rank) -> Iterator[Finding]:
    fast = [device for device in rank.devices if device.is_fast and device.active]
    for name, slow in _TRANSPORT_VARIABLES.items():
        words = rank.variables.get(name, "").split(",")
        if fast and any(word in slow for word in words) and not any(
                word.startswith(("rc", "dc", "ud", "ib", "all", "verbs", "cxi", "psm", "efa"))
                for word in words):
            yield Finding("variables", WARNING, f"{name}={rank.variables[name]} keeps MPI from "
                          f"using {_described(fast[0])}", f"unset {name}")
    chosen = rank.variables.get("UCX_NET_DEVICES", "")
    names = {device.name for device in rank.devices} | {"all", "lo", ""}
    missing = [word for word in chosen.split(",") if word.partition(":")[0] not in names]
    if missing and not chosen.startswith("^"):
        yield Finding("variables", WARNING, f"UCX_NET_DEVICES={chosen}, but {', '.join(missing)} "
                      f"is not on this node", "unset UCX_NET_DEVICES")
    if any(device.kind == "Slingshot" for device in fast) and rank.library.vendor not in (
            "", "Cray MPICH"):
        yield Finding("variables", WARNING, f"{rank.library.name} may not know Slingshot",
                      "load the cluster's own MPI module (cray-mpich), and build mpi4py with it")


def _span(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the longest latency and the least bandwidth."""
    return max(pair.latency_s for pair in pairs), min(pair.bytes_per_s for pair in pairs)


def _inside(job: Job, pairs: Sequence[Pair]) -> Finding:
    latency_s, rate = _span(pairs)
    text = f"{1e6 * latency_s:.1f} us, {rate / 1e9:.2f} GB/s"
    text += " (the slowest node)" if len(pairs) > 1 else ""
    if latency_s <= _NODE_LATENCY_S and rate >= _NODE_BYTES_PER_S:
        return Finding("within a node", OK, text)
    nodes = job.nodes().values()
    if any(is_oversubscribed(ranks) or is_busy(ranks) for ranks in nodes):
        return Finding("within a node", NOTE, f"{text}, slow: the processors are busy",
                       "start fewer ranks per node, or let nobody else on it")
    return Finding("within a node", WARNING, f"{text}, slow: MPI does not use shared memory",
                   "unset UCX_TLS, FI_PROVIDER and "
                   "OMPI_MCA_btl; in containers, let the ranks of a node share one (--ipc=host)")


def _gbit(device: Device) -> float:
    return device.gbit or 0.0


def _between(job: Job, pairs: Sequence[Pair]) -> Finding:
    latency_s, rate = _span(pairs)
    gbit = 8e-9 * rate
    text = f"{1e6 * latency_s:.1f} us, {gbit:.2f} Gbit/s"
    text += f" (the slowest of {len(pairs)} pairs of nodes)" if len(pairs) > 1 else ""
    fastest = [max((device for device in ranks[0].devices if device.active and device.gbit),
                   key=_gbit, default=None) for ranks in job.nodes().values()]
    best = min(filter(None, fastest), key=_gbit, default=None)
    if best is None or best.gbit is None:
        return Finding("between nodes", OK, f"{text}; the devices' speed is unknown")
    if gbit < _OF_SPEED * best.gbit or best.is_fast and latency_s > _FAST_LATENCY_S:
        remedy = ("let MPI use it: the cluster's MPI module; UCX_TLS, UCX_NET_DEVICES, "
                  "FI_PROVIDER unset" if best.is_fast else
                  "name the right device (UCX_NET_DEVICES, mpirun -iface, "
                  "OMPI_MCA_btl_tcp_if_include), and look for other traffic")
        return Finding("between nodes", WARNING, f"{text}, far below {_described(best)}", remedy)
    return Finding("between nodes", OK, f"{text}, over {_described(best)} or the like")


def _slow_links(job: Job, pairs: Sequence[Pair]) -> Iterator[Finding]:
    if len(pairs) < 3:
        return
    median = statistics.median(pair.bytes_per_s for pair in pairs)
    for pair in pairs:
        if pair.bytes_per_s < _OF_MEDIAN * median:
            yield Finding(
                "slow link", WARNING, f"{where(pair.ranks, job)}: {8e-9 * pair.bytes_per_s:.2f} "
                f"Gbit/s, where the median is {8e-9 * median:.2f}",
                "leave out the node whose links are all slow: srun --exclude")
