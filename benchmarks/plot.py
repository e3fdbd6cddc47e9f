"""Draws the `--json` results of a study: `python -m benchmarks.plot FILE.json FILE.png`."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpiring.provisional import count
from mpiring.tools.picture import COLORS, GRAY, INK, curve_style, name_bars
from mpiring.tools.entries import listed, number, text
from mpiring.tools.plot import STEPS, Drawing, model_title, step_bars
from mpiring.tools.results import draw_json
from mpiring.tools.table import Row

from . import main

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# If times differ by a larger factor, their axis is logarithmic.
_LINEAR_RANGE = 10


def declare(parser: ArgumentParser) -> None:
    """Declare the files."""
    parser.description = "Draws the results of a study."
    parser.add_argument("results", metavar="FILE.json",
                        help="results of a study, or - for standard input")
    parser.add_argument("plot", metavar="FILE.png")
    parser.set_defaults(action=_plot)


def _plot(options: Namespace) -> int:
    draw_json(options.results, options.plot, DRAWINGS)
    return 0


def _batch_bars(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw tokens per second, and the losses of tokens and time."""
    positions, names = range(len(rows)), [row["contender"] for row in rows]
    axes[0].barh(positions, [row["tokens_per_s"] for row in rows], color=[
        COLORS[0] if name == "TokenBatches" else GRAY for name in names])
    axes[0].set_xlabel("real tokens per second\nlonger is better")
    for i, loss in enumerate(("padding", "idle")):
        axes[1].barh([position + 0.4 * i - 0.2 for position in positions],
                     [row[f"{loss}_percent"] for row in rows], 0.4, color=COLORS[i], label=loss)
    axes[1].set_xlabel("% of tokens, % of a step\nshorter is better")
    axes[1].legend(frameon=False)
    for panel in axes:
        name_bars(panel, names)


def _learning(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw the validation loss over training time and over bytes, with a curve per method."""
    for panel, key, unit, title in zip(
            axes, ("curve_s", "curve_bytes"), (1, 1e6),
            ("time of training (s)", "sent by all ranks (MB)")):
        _loss_curves(panel, rows, key, unit)
        panel.set_xlabel(title)
        panel.set_ylabel("validation loss (bits per byte)")


def _loss_curves(panel: "Axes", rows: Sequence[Row], key: str, unit: float) -> None:
    trained = [row for row in rows if row["curve_s"]]
    for i, row in enumerate(trained):
        panel.plot([value / unit for value in row[key]], row["curve_bits"], **curve_style(i),
                   label=row.get("method", row.get("reducer")), linewidth=1.2)
    targets = {row["target_bits"] for row in trained if row["target_bits"] == row["target_bits"]}
    for target in targets:
        panel.axhline(target, color=INK, linestyle="--", linewidth=1, label="target")
    reached = [row[key][-1] for row in trained if row[key][-1]]
    if reached and max(reached) > _LINEAR_RANGE * min(reached):
        # A method that has sent nothing yet has no place on this axis.
        panel.set_xscale("log", nonpositive="mask")


def _update_bars(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw the time of an update, labeled with its ratio to updates that all ranks repeat."""
    bars = axes[0].barh(range(len(rows)), [row["median_ms"] for row in rows], color=[
        COLORS[0] if "mpiring" in row["contender"] else GRAY for row in rows])
    axes[0].bar_label(bars, [f"{row['over_redundant']:.2f}" for row in rows], padding=3)
    name_bars(axes[0], [row["contender"] for row in rows])
    axes[0].margins(x=0.2)
    axes[0].set_xlabel("time of an update (ms, median); shorter is better")


def _loader_title(row: Row, rows: Sequence[Row]) -> str:
    model = model_title(row, rows)
    return model if row["loader"] == "-" else f"{model}, loader: {row['loader']}"


def _training_title(row: Row, rows: Sequence[Row]) -> str:
    # Methods without a loss have fewer seeds.
    seeds = count(max(row["seeds"] for row in rows), "seed")
    return f"transformer, {row['parameters'] / 1e6:.1f} M parameters, {row['optimizer']}, {seeds}"


_TIMES = listed(number(0))
_LEARNING = {
    "method": text(optional=True), "reducer": text(optional=True), "curve_s": _TIMES,
    "curve_bytes": _TIMES, "curve_bits": listed(number(nan=True)), "target_bits": number(nan=True),
    "seeds": number(0), "parameters": number(0), "optimizer": text()}
DRAWINGS = {
    "batches": Drawing(_batch_bars, {"contender": text(), **dict.fromkeys(
        ("tokens_per_s", "padding_percent", "idle_percent"), number(nan=True))}),
    "muon": Drawing(_update_bars, {
        "contender": text(), "median_ms": number(0), "over_redundant": number(nan=True),
        "model": text(optional=True), "parameters": number(0)}, 1, model_title),
    "prefetch": Drawing(step_bars, {**STEPS, "loader": text()}, 1, _loader_title),
    "reducers": Drawing(_learning, _LEARNING, 1, _training_title),
    "local": Drawing(_learning, _LEARNING, 2, _training_title)}


if __name__ == "__main__":
    sys.exit(main("plot", declare))
