"""Makes pictures with matplotlib, all in one style."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, MissingDependencyError
from .output import writing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Pictures are transparent, and each color is visible on white pages and on dark pages. The color of
# text has the same contrast with both, 4.3, which is the maximum. The first four colors are by
# Okabe and Ito; color-blind readers can distinguish them. Each contender needs a different color.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#6A7FDB", "#8C6BB1",
          "#A0522D", "#117733", "#C44E7B", "#7F7F00", "#00868B", "#AA4499", "#5B8C5A")
INK = "#797979"
GRAY = "#8C8C8C"
_MARKERS = "osD^vPX<>hp*d8"
INCHES = (7.2, 3.4)
_DPI = 200
_POINTS = 10
# With more curves than this, there is a legend; otherwise, each name is at the end of its curve.
_MAX_NAMED = 8
# A legend has three columns if no label is longer than this, otherwise two.
_LONGEST_OF_THREE = 24
_STYLE = {"font.size": _POINTS, "axes.titlesize": _POINTS, "legend.fontsize": _POINTS,
          "axes.grid": True, "grid.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
          # Names may have any characters.
          "text.parse_math": False,
          "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
          "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
          "svg.fonttype": "none", "svg.hashsalt": "mpiring",
          "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
          **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color",
                           "ytick.color"), INK)}


def refuse_undrawable(path: str) -> None:
    """Raise an error if no picture with this name can be drawn.

    Raises:
        ConfigError: matplotlib does not know the format of the extension.
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as exc:
        raise MissingDependencyError("drawing needs matplotlib: pip install 'mpiring[bench]'"
                                     ) from exc
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ConfigError(f"{path}: expected a name that ends in .{', .'.join(sorted(known))}")


@contextmanager
def picture(path: str, heights: Sequence[float], columns: int, caption: str,
            ) -> "Iterator[Sequence[Sequence[Axes]]]":
    """Yield the empty panels of a picture, row by row; write the picture at the end.

    Args:
        path: Name of the file, whose extension sets the format: .png, .pdf, .svg.
        heights: Heights of the rows, in inches.
        columns: Number of panels in each row.
        caption: Text above all panels.

    Raises:
        ConfigError: The file cannot be written.
        MissingDependencyError: matplotlib is not installed.
    """
    refuse_undrawable(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    with rc_context(_STYLE):
        figure = Figure((INCHES[0], sum(heights)), layout="constrained")
        grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).tolist()
        yield grid
        handles, labels = grid[0][0].get_legend_handles_labels()
        if handles and len(handles) <= _MAX_NAMED and all(map(_is_curve, handles)):
            for panels, height in zip(grid, heights):
                _name_curves(panels[-1], height)
        elif handles:
            columns = 3 if max(map(len, labels)) <= _LONGEST_OF_THREE else 2
            figure.legend(handles, labels, loc="outside lower center", ncols=columns,
                          frameon=False)
        figure.suptitle(caption, fontsize=_POINTS)
        # Without a date, identical rows produce identical SVG files.
        undated = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        with writing(path):
            figure.savefig(path, dpi=_DPI, metadata=undated)


def _is_curve(handle: "Artist") -> bool:
    return hasattr(handle, "get_linestyle") and handle.get_linestyle() in ("-", "--", ":")


def _name_curves(axes: "Axes", height: float) -> None:
    """Write the names of curves next to the panel, each in its color, close to the curve's end.

    Args:
        axes: Panel with the curves.
        height: Height of the panel with its labels, in inches.
    """
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    ends = sorted(
        (to_axes.transform((1.0, np.asarray(line.get_ydata())[-1]))[1], number, line)
        for number, line in enumerate(axes.get_lines())
        if not str(line.get_label()).startswith("_"))
    gap = 1.2 * _POINTS / 72 / (0.75 * height)
    for (_, _, line), place in zip(ends, _spread([end for end, *_ in ends], gap)):
        axes.text(1.03, place, str(line.get_label()), transform=axes.transAxes, va="center",
                  color=line.get_color())


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions at least `gap` apart, and keep them within 0 and 1 if they fit."""
    spread: list[float] = []
    for place in places:
        spread.append(max(place, spread[-1] + gap if spread else 0.0))
    limit = 1.0
    for number in reversed(range(len(spread))):
        spread[number] = min(spread[number], limit)
        limit = spread[number] - gap
    return spread


def name_bars(axes: "Axes", names: Sequence[str]) -> None:
    """Label horizontal bars; the first is at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def label_log(axis: "Axis") -> None:
    """Label a logarithmic axis with numbers; by default, matplotlib writes formulas."""
    from matplotlib.ticker import LogFormatter
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(LogFormatter())


def curve_style(number: int) -> dict[str, Any]:
    """Return the color and the marker of the curve with this number."""
    return {"color": COLORS[number % len(COLORS)], "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.5}
