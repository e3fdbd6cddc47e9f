"""Makes pictures with matplotlib, all in one style."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingDependencyError
from .files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow, and some
# more: there must be one for each contender.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555",
           "#882255", "#000000", "#117733", "#AA4499", "#999933", "#332288", "#DDCC77")
GREY = COLOURS[6]
_MARKERS = "osD^vPX<>hp*d8"
INCHES = (7.2, 3.4)
_DPI = 200
_STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "axes.grid": True,
          "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True,
          "axes.spines.top": False, "axes.spines.right": False}


def refuse_undrawable(path: str) -> None:
    """Raise if no picture of this name can be drawn.

    Raises:
        ConfigError: Its ending names no format that matplotlib knows.
        MissingDependencyError: There is no matplotlib.
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
    """Yield the panels of a picture, row by row, to be drawn on; then write it.

    Args:
        path: Its ending sets the format: .png, .pdf, .svg.
        heights: Of the rows, in inches.
        columns: Panels in each row.
        caption: Written above all.

    Raises:
        ConfigError: The file cannot be written.
        MissingDependencyError: There is no matplotlib.
    """
    refuse_undrawable(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    with rc_context(_STYLE):
        figure = Figure((INCHES[0], sum(heights)), layout="constrained")
        grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).tolist()
        yield grid
        handles, labels = grid[0][0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(caption, fontsize=8)
        with writing(path):
            figure.savefig(path, dpi=_DPI)


def name_bars(axes: "Axes", names: Sequence[str]) -> None:
    """Write names beside horizontal bars, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def curve_style(number: int) -> dict[str, Any]:
    """Return colour and marker of a curve, by its number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.5}
