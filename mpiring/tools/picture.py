"""Makes pictures with matplotlib, all in one style."""

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ConfigError, MissingDependencyError
from ..provisional import remedies
from .output import writing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    Panels = Sequence[Sequence[Axes]]

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
_POINTS, _MIN_POINTS = 10, 6
# Distance of the lines of two labels that do not touch, over the size of their font: letters are
# less high than lines.
_CLOSEST = 0.8
# Curves coincide if no point of one is farther from the other, in points: the radius of a marker.
_COINCIDING_POINTS = 1.75
# Mean width of a letter over the size of its font.
_LETTER = 0.6
# Part of the height of a panel with its labels that its curves or bars have at least.
_MIN_HEIGHT = 0.6
# With more curves than this, there is a legend; otherwise, each name is at the end of its curve.
_MAX_NAMED = 8
# A legend has three columns if no label is longer than this, otherwise two.
_LONGEST_OF_THREE = 24
# Distance of markers from the sides of a panel, over its width.
_X_MARGIN = 0.06
_STYLE = {"font.size": _POINTS, "axes.titlesize": _POINTS, "legend.fontsize": _POINTS,
          "axes.xmargin": _X_MARGIN, "axes.ymargin": 0.08,
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
    """Raise ConfigError for unknown extensions, and MissingDependencyError without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError as exc:
        raise MissingDependencyError(
            f"drawing needs matplotlib: {remedies.pip_install('[bench]')}") from exc
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ConfigError(f"{path}: expected a name that ends in .{', .'.join(sorted(known))}")


@contextmanager
def picture(path: str, heights: Sequence[float], columns: int, caption: str,
            ) -> "Iterator[Panels]":
    """Yield the empty panels of a picture, row by row; write the picture at the end.

    The extension of `path` sets the format: .png, .pdf, .svg. A row has `columns` panels; its
    height is in inches.

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
        _label(figure, grid, heights)
        width = int(72 * INCHES[0] / (_LETTER * _POINTS))
        figure.suptitle(textwrap.fill(caption, width), fontsize=_POINTS)
        _fit(figure, grid, heights)
        # Without a date, identical rows produce identical SVG files.
        undated = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        with writing(path):
            figure.savefig(path, dpi=_DPI, metadata=undated)


def _label(figure: "Figure", grid: "Panels", heights: Sequence[float]) -> None:
    """Label logarithmic axes, and name curves next to the panels or in a legend below them."""
    for panel in itertools.chain(*grid):
        _label_log(panel)
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles and len(handles) <= _MAX_NAMED and all(map(_is_curve, handles)):
        for line, height in zip(grid, heights):
            _name_curves(line[-1], height)
    elif handles:
        columns = 3 if max(map(len, labels)) <= _LONGEST_OF_THREE else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _fit(figure: "Figure", grid: "Panels", heights: Sequence[float]) -> None:
    """Fit labels into the panels, name curves that coincide, and make the picture high enough.

    The sizes of panels are known only when all other texts are in the figure.
    """
    figure.draw_without_rendering()
    for panel in itertools.chain(*grid):
        _fit_labels(panel, figure.dpi / 72)
        _tell_coinciding(panel, figure.dpi / 72)
    figure.draw_without_rendering()
    figure.set_figheight(sum(heights) + sum(
        max(_missing_inches(panel, height, figure.dpi) for panel in line)
        for line, height in zip(grid, heights)))


def _is_curve(handle: "Artist") -> bool:
    return hasattr(handle, "get_linestyle") and handle.get_linestyle() in ("-", "--", ":")


def _named_lines(axes: "Axes") -> "list[Line2D]":
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def _label_log(axes: "Axes") -> None:
    """Label logarithmic axes with plain numbers, at least two of them.

    By default, matplotlib writes formulas, and labels only powers of ten.
    """
    from matplotlib.ticker import AutoLocator, FixedLocator, LogLocator
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), FixedLocator):
            continue
        low, high = sorted(axis.get_view_interval())
        for locator in (LogLocator(), LogLocator(subs=(1, 2, 5)), AutoLocator()):
            axis.set_major_locator(locator)
            if sum(low <= tick <= high for tick in locator()) > 2:
                break
        axis.set_major_formatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip("."))
        axis.set_ticks([], minor=True)


def _fit_labels(axes: "Axes", per_point: float) -> None:
    """Turn the labels below a panel if they touch each other, and hide those without space."""
    labels = [(label.get_window_extent(), label) for label in axes.get_xticklabels()
              if label.get_text()]
    labels.sort(key=lambda pair: pair[0].x0)
    if all(left.x1 + 2 * per_point < right.x0
           for (left, _), (right, _) in itertools.pairwise(labels)):
        return
    centers = [(box.x0 + box.x1) / 2 / per_point for box, _ in labels]
    gap = min(right - left for left, right in itertools.pairwise(centers))
    axes.tick_params(axis="x", labelrotation=90, labelsize=min(_POINTS, max(_MIN_POINTS, gap)))
    last = np.inf
    for center, (_, label) in zip(reversed(centers), reversed(labels)):
        if last - center < _CLOSEST * _MIN_POINTS:
            label.set_visible(False)
        else:
            last = center


def _missing_inches(axes: "Axes", height: float, dpi: float) -> float:
    """Return the inches that a panel of this height lacks for its curves, or names of bars."""
    # Bars have names at their left; other labels have space.
    names = sum(label.get_window_extent().height for label in axes.get_yticklabels()
                ) if axes.patches else 0
    return max(0, _MIN_HEIGHT * height - axes.bbox.height / dpi,
               (1.2 * names - axes.bbox.height) / dpi)


def _tell_coinciding(axes: "Axes", per_point: float) -> None:
    """Name the curves of a panel that coincide, below it."""
    curves = {str(line.get_label()): axes.transData.transform(line.get_xydata()) / per_point
              for line in _named_lines(axes)
              if _is_curve(line) and line.get_transform() == axes.transData}
    groups: list[list[str]] = []
    for name, points in curves.items():
        matching = next((group for group in groups if any(
            _covers(points, curves[other]) or _covers(curves[other], points)
            for other in group)), None)
        if matching is None:
            groups.append([name])
        else:
            matching.append(name)
    width = int(axes.bbox.width / per_point / (_LETTER * _POINTS))
    for group in groups:
        if len(group) > 1:
            names = ", ".join(group) if len(group) < len(curves) else "all curves"
            axes.set_xlabel(f"{axes.get_xlabel()}\n" + textwrap.fill(f"coincide: {names}", width))


def _covers(curve: "np.ndarray[Any, Any]", points: "np.ndarray[Any, Any]") -> bool:
    """Return whether all points are on a curve, as far as a reader can tell.

    A line does not cover a single point, because the point's marker is wider.
    """
    points, curve = (each[np.isfinite(each).all(axis=1)] for each in (points, curve))
    if not len(points) or not len(curve) or len(points) == 1 < len(curve):
        return False
    begins, along = curve[:-1] if len(curve) > 1 else curve, np.diff(curve, axis=0)
    along = along if len(along) else np.zeros_like(curve)
    # Position on each line of the curve that is nearest to each point, from 0 to 1.
    squares = np.maximum((along ** 2).sum(axis=1), 1e-12)
    nearest = np.clip(((points[:, None] - begins) * along).sum(axis=2) / squares, 0, 1)
    away = points[:, None] - (begins + nearest[..., None] * along)
    return bool(np.hypot(away[..., 0], away[..., 1]).min(axis=1).max() <= _COINCIDING_POINTS)


def _name_curves(axes: "Axes", height: float) -> None:
    """Write the names of curves next to the panel, each in its color, close to the curve's end.

    The height, in inches, is that of the panel with its labels.
    """
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    ends = []
    for number, line in enumerate(_named_lines(axes)):
        y = np.asarray(line.get_ydata(), float)
        # A curve without values in this panel is named because it may have some in others.
        known = y[np.isfinite(y)]
        ends.append((to_axes.transform((1.0, known[-1]))[1] if len(known) else 0.5, number, line))
    ends.sort()
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


def label_measured(axes: "Axes", values: Sequence[float], text: Callable[[float], str],
                   name: str) -> None:
    """Label all measured values on the horizontal axis of a panel, which is logarithmic.

    The double of a single value is also labeled: it shows the scale.
    """
    shown = sorted(set(values))
    axes.set_xscale("log", base=2)
    if len(shown) == 1:
        shown.append(2 * shown[0])
    room = (shown[-1] / shown[0]) ** _X_MARGIN
    axes.set_xlim(shown[0] / room, shown[-1] * room)
    axes.set_xticks(shown, list(map(text, shown)))
    axes.set_xticks([], minor=True)
    axes.set_xlabel(name)


def limit_style(count: int) -> dict[str, Any]:
    """Return the style of the curve of a limit with this number of points."""
    return {"color": INK, "linestyle": "--", "linewidth": 1, "marker": "_" if count == 1 else ""}


def curve_style(number: int) -> dict[str, Any]:
    """Return the color and the marker of the curve with this number."""
    return {"color": COLORS[number % len(COLORS)], "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.5}
