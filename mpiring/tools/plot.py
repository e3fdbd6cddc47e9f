"""Draws the results that `--json` writes."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ConfigError
from .entries import FLAG, Field, number, text, whole
from .picture import (
    COLORS, GRAY, INCHES, INK, curve_style, label_measured, limit_style, name_bars, picture,
)
from .table import Environment, Row
from .units import ranks_on_nodes, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Rows of `bench allreduce` that only show a limit.
LIMITS = ("memory copy", "device copy", "pinned copies")
_MEMORY = {"empty": "comm.empty", "private": "private memory"}
# Values that are drawn, which are above 0 if an axis is logarithmic.
_ABOVE_0 = 1e-9
_ABOUT = {"ranks": whole(1), "nodes": whole(1), "cpu": text(), "mpi_library": text()}
_SIZES = {"contender": text(), "thread_level": text(), "bytes": whole(1),
          "buffer": Field(lambda x: isinstance(x, str) and x in _MEMORY, "empty or private"),
          "median_us": number(_ABOVE_0, nan=True), "device": text(optional=True)}
CLUSTER = {"cluster": text()}
STEPS = {"contender": text(), "median_ms": number(0), "efficiency_percent": number(0, nan=True),
         "hidden_percent": number(nan=True, optional=True), "model": text(optional=True),
         "thread_level": text(optional=True), "device": text(optional=True),
         "parameters": number(0)}


class Drawing(NamedTuple):
    """How the results of a benchmark are drawn.

    Attributes:
        columns: Number of panels in a line.
        title: Function that returns the title of a line, from one of its rows and all rows.
        fields, about: Fields of rows, and of the environment, that it draws.
    """

    draw: "Callable[[Sequence[Axes], Sequence[Row]], None]"
    fields: Mapping[str, Field]
    columns: int = 2
    title: Callable[[Row, Sequence[Row]], str] = lambda row, rows: ""
    about: Mapping[str, Field] = _ABOUT

    def panels(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        """Return the rows of each line, by its title."""
        panels: dict[str, list[Row]] = {}
        for row in rows:
            panels.setdefault(self.title(row, rows), []).append(row)
        return panels


def draw(path: str, benchmark: str, about: Environment, rows: Sequence[Row],
         drawings: Mapping[str, Drawing]) -> None:
    """Write a picture of the results of a benchmark, with its drawing in `drawings`.

    It raises ConfigError if there is nothing to draw, and the errors of `picture.picture`.
    """
    drawing = drawings.get(benchmark)
    if not rows or drawing is None:
        raise ConfigError(f"{path}: there is nothing to draw of {len(rows)} results of {benchmark}")
    panels = drawing.panels(rows)
    caption = about["cluster"] if "cluster" in drawing.about else " · ".join([
        ranks_on_nodes(about["ranks"], about["nodes"]), about["cpu"], about["mpi_library"],
        *dict.fromkeys(row["device"] for row in rows if row.get("device", "cpu") != "cpu")])
    with picture(path, [INCHES[1]] * len(panels), drawing.columns, caption) as grid:
        for axes, (title, members) in zip(grid, panels.items()):
            drawing.draw(axes, members)
            axes[0].set_title(title, loc="left")


def _curves(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw time and bus bandwidth over size, a curve per contender."""
    _over_size(axes, rows, "median_us", "busbw_GBps")
    _limit(axes, rows)
    axes[0].set_ylabel("time of an allreduce (µs, median)")
    axes[1].set_ylabel("bus bandwidth (GB/s)")


def _latencies(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw time, and speedup over MPI's own call, over size, a curve per contender."""
    # One legend serves the panels of all collectives.
    rows = [{**row, "contender": "MPI's own"} if row["contender"].startswith("MPI_") else row
            for row in rows]
    _over_size(axes, rows, "median_us", "native_over_this")
    axes[0].set_ylabel("time (µs, median of rounds)")
    axes[1].set_ylabel("time of MPI's own / this")


def _over_size(axes: "Sequence[Axes]", rows: Sequence[Row], *keys: str) -> None:
    """Draw a value per panel over size, a curve per contender and thread level."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["bytes"])):
        if row["contender"] not in LIMITS and row["median_us"] == row["median_us"]:
            curves.setdefault((row["contender"], row["thread_level"]), []).append(row)
    names = sorted({name for name, _ in curves}, key=lambda name: ("mpiring" not in name, name))
    levels = list(dict.fromkeys(level for _, level in curves))
    for name, level in sorted(curves, key=lambda curve: (names.index(curve[0]), curve[1])):
        members = curves[name, level]
        style: dict[str, Any] = {
            **curve_style(names.index(name)),
            "label": f"{name} ({level})" if len(levels) > 1 else name,
            "linestyle": ("-", ":")[levels.index(level) % 2],
            "linewidth": 2.2 if name == "mpiring auto" else 1.2}
        sizes = [row["bytes"] for row in members]
        for panel, key in zip(axes, keys):
            panel.plot(sizes, [row[key] for row in members], **style)
    for panel in axes:
        panel.set_yscale("log")
        label_measured(panel, [row["bytes"] for row in rows], size_text, "array size")


def _limit(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw the shortest time that the memory or the link allows."""
    known = {row["bytes"]: row for row in rows if row["limit_us"] == row["limit_us"]}
    if not known:
        return
    name = next((row["contender"] for row in rows
                 if row["contender"] in LIMITS and row["this_over_limit"] == 1),
                "limit: link rate")
    members = [known[size] for size in sorted(known)]
    sizes = [row["bytes"] for row in members]
    style = {**limit_style(len(members)), "label": name}
    axes[0].plot(sizes, [row["limit_us"] for row in members], **style)
    # busbw is inversely proportional to the time.
    axes[1].plot(sizes, [row["busbw_GBps"] * row["this_over_limit"] for row in members], **style)


def _overlap_bars(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw compute, the time that communication adds, and the hidden share of communication."""
    names = [f"{row['contender']}\n{row['compute']} compute" for row in rows]
    positions = range(len(rows))
    compute = [min(row["compute_ms"], row["total_ms"]) for row in rows]
    added = [max(0.0, row["total_ms"] - row["compute_ms"]) for row in rows]
    axes[0].barh(positions, compute, color=GRAY, label="compute alone")
    axes[0].barh(positions, added, left=compute, color=COLORS[1], label="added by communication")
    axes[0].plot([row["compute_ms"] + row["communication_ms"] for row in rows], positions,
                 "|", color=INK, markersize=12, label="compute + communication alone")
    axes[0].set_xlabel("time (ms, median)\nshorter is better")
    hidden = axes[1].barh(positions, [row["overlap_percent"] for row in rows], color=COLORS[0])
    axes[1].bar_label(hidden, fmt="%.0f %%", padding=3)
    axes[1].set_xlim(0, 115)
    axes[1].set_xticks(range(0, 101, 20))
    axes[1].set_xlabel("communication hidden (%)\nlonger is better")
    name_bars(axes[0], names)
    name_bars(axes[1], [""] * len(names))


def step_bars(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw the time of a step, labeled with the scaling efficiency."""
    bars = axes[0].barh(range(len(rows)), [row["median_ms"] for row in rows], color=[
        COLORS[0] if "mpiring" in row["contender"] else GRAY for row in rows])
    axes[0].bar_label(bars, [", ".join(_shares(row)) for row in rows], padding=3)
    levels = {row.get("thread_level", "") for row in rows}
    name_bars(axes[0], [
        f"{row['contender']} ({row.get('thread_level', '')})" if len(levels) > 1 else
        row["contender"] for row in rows])
    axes[0].margins(x=0.2)
    notes = [f"percentage: time of {rows[0]['contender']} / this time"]
    if any(len(_shares(row)) > 1 for row in rows):
        notes = [f"first {notes[0]}",
                 "second percentage: part of communication that is hidden behind compute"]
    axes[0].set_xlabel("\n".join([
        "time of a training step (ms, median); shorter is better", *notes]))


def _shares(row: Row) -> list[str]:
    hidden = row.get("hidden_percent", float("nan"))
    return [f"{value:.0f} %{words}" for value, words in (
        (row["efficiency_percent"], ""), (hidden, " hidden")) if value == value]


def _reducer_bars(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw the time of a step with each Reducer."""
    step_bars(axes, [{**row, "contender": row["reducer"],
                      "efficiency_percent": 100 / row["over_alone"]} for row in rows])


def model_title(row: Row, rows: Sequence[Row]) -> str:
    """Return the name and the size of a row's model; "" if it has no name."""
    return f"{row['model']}, {row['parameters'] / 1e6:.1f} M parameters" if "model" in row else ""


def _scaling(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw time and efficiency over the number of nodes, a curve per algorithm."""
    over_nodes(axes, rows, "algorithm", "ms")
    chosen = [row for row in rows if row["selected"]]
    axes[0].plot([row["nodes"] for row in chosen], [row["ms"] for row in chosen], "o",
                 markersize=8, markerfacecolor="none", markeredgecolor=INK,
                 label="what auto takes")
    limits = {row["nodes"]: row["limit_ms"] for row in rows}
    axes[0].plot(list(limits), list(limits.values()), **limit_style(len(limits)),
                 label="byte limit")
    axes[0].set_yscale("log", nonpositive="mask")
    axes[0].set_ylabel("time of an allreduce (ms)")
    axes[1].set_ylabel("byte limit / time (%)")


def over_nodes(axes: "Sequence[Axes]", rows: Sequence[Row], name_key: str, time_key: str) -> None:
    """Draw time and efficiency over the number of nodes, a curve per name."""
    for i, name in enumerate(dict.fromkeys(row[name_key] for row in rows)):
        members = [row for row in rows if row[name_key] == name]
        style = {**curve_style(i), "label": name.removeprefix("reducer="), "linewidth": 1.2,
                 "clip_on": False}
        for panel, key in zip(axes, (time_key, "efficiency_percent")):
            panel.plot([row["nodes"] for row in members], [row[key] for row in members], **style)
    axes[1].set_ylim(0, 1.08 * max(100, *(row["efficiency_percent"] for row in rows)))
    for panel in axes:
        label_measured(panel, [row["nodes"] for row in rows], str, "nodes")


def _title_by(key: str) -> Callable[[Row, Sequence[Row]], str]:
    return lambda row, rows: f"{row[key]}, {_MEMORY[row['buffer']]}"


DRAWINGS = {
    "allreduce": Drawing(_curves, {
        **_SIZES, "dtype": text(), **dict.fromkeys(
            ("limit_us", "this_over_limit", "busbw_GBps"), number(_ABOVE_0, nan=True))},
        title=_title_by("dtype")),
    "latency": Drawing(_latencies, {
        **_SIZES, "test": text(), "native_over_this": number(_ABOVE_0, nan=True)},
        title=_title_by("test")),
    "overlap": Drawing(_overlap_bars, {
        "contender": text(), "compute": text(), **dict.fromkeys(
            ("compute_ms", "total_ms", "communication_ms"), number(0)),
        "overlap_percent": number(nan=True)}),
    "steps": Drawing(step_bars, STEPS, 1, model_title),
    "reducers": Drawing(_reducer_bars, {
        "reducer": text(), "median_ms": number(0), "over_alone": number(_ABOVE_0, nan=True),
        "hidden_percent": number(nan=True, optional=True)}, 1),
    "simulate": Drawing(_scaling, {
        "nodes": whole(1), "algorithm": text(), "selected": FLAG, "ms": number(_ABOVE_0),
        "limit_ms": number(0), "efficiency_percent": number(0, nan=True)},
        about=CLUSTER)}
