"""Tests that pictures of results can be read: axes, labels, and curves that hide others."""

import itertools
import math

import pytest
from launching import needed

from mpiring.tools import picture, plot
from mpiring.tools.simulate import step_command
from mpiring.tools.units import parse_sizes

ABOUT = {"ranks": 4, "nodes": 1, "cpu": "A CPU", "mpi_library": "MPICH 5", "cluster": "a cluster"}
NAMES = ("mpiring auto", "mpiring ring", "mpiring direct", "mpiring shared", "mpiring native",
         "mpiring hierarchical", "MPI_Allreduce", "Gloo", "Horovod")


def of_size(contender, nbytes, us, limit_us=math.nan, ratio=1.0):
    return {"contender": contender, "bytes": nbytes, "median_us": us, "limit_us": limit_us,
            "this_over_limit": us / limit_us, "busbw_GBps": nbytes / us / 1e3, "dtype": "float32",
            "buffer": "empty", "thread_level": "multiple", "test": "allreduce",
            "native_over_this": ratio}


def of_sizes(sizes, contenders=NAMES[:1], us=lambda place, nbytes: 30.0 + place + nbytes / 1e3):
    return [of_size(name, nbytes, us(place, nbytes)) for place, name in enumerate(contenders)
            for nbytes in sizes]


def of_step(contender, ms, level="multiple", hidden=math.nan):
    return {"contender": contender, "median_ms": ms, "efficiency_percent": 5000 / ms,
            "hidden_percent": hidden, "thread_level": level}


def of_nodes(nodes, algorithm, ms, **others):
    return {"nodes": nodes, "algorithm": algorithm, "selected": True, "ms": ms, "limit_ms": 1.0,
            "efficiency_percent": 100 / ms, **others}


USUAL = parse_sizes("8..64M")
CASES = {
    "usual sizes": ("allreduce", of_sizes(USUAL, NAMES[:3])),
    "one size": ("allreduce", [of_size("mpiring auto", 1 << 16, 30, 20.0),
                               of_size("memory copy", 1 << 16, 20, 20.0)]),
    "one number": ("allreduce", of_sizes([1 << 16])),
    "close sizes": ("allreduce", of_sizes([60_000, 1 << 16])),
    "many sizes": ("allreduce", of_sizes(range(8, 100), NAMES)),
    "equal curves": ("allreduce", of_sizes([8, 1 << 20], NAMES, lambda *_: 30.0)),
    "equal times": ("latency", of_sizes(USUAL, NAMES, lambda *_: 1.0)),
    "a narrow range": ("latency", [of_size(name, nbytes, 2.0 + place / 9, ratio=1.0 + place / 1e4)
                                   for name in ("mpiring auto", "MPI_Allreduce")
                                   for place, nbytes in enumerate((8, 16, 4096))]),
    "nothing to compare with": ("latency", [{**row, "native_over_this": math.nan}
                                            for row in of_sizes(USUAL, NAMES[:2])]),
    "one step": ("steps", [of_step("compute only", 50.0)]),
    "many steps": ("steps", [of_step(name, 60.0, level, 50.0)
                             for name in NAMES for level in ("multiple", "serialized")]),
    "one overlap": ("overlap", [{
        "contender": "Gloo", "compute": "numpy", "compute_ms": 50, "total_ms": 60,
        "communication_ms": 20, "overlap_percent": 100.0}]),
    "one node": ("simulate", [of_nodes(1, "shared", 2.0, limit_ms=0.0, efficiency_percent=0.0)]),
    "many nodes": ("simulate", [of_nodes(nodes, "ring", 2.0 + nodes) for nodes in range(1, 99)]),
    "faster than the limit": ("simulate", [of_nodes(2, "ring", 0.7), of_nodes(4, "ring", 2.0)]),
}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Return a function that draws rows and returns the figure, without a file."""
    figures, figure = [], needed("matplotlib.figure").Figure

    def saved(self, *_, **__):
        figures.append(self)
        self.draw_without_rendering()

    monkeypatch.setattr(figure, "savefig", saved)

    def draw(benchmark, rows):
        plot.draw(str(tmp_path / "x.svg"), benchmark, ABOUT, rows, plot.DRAWINGS)
        return figures[-1]

    return draw


def boxes_of(labels):
    return sorted((label.get_window_extent() for label in labels
                   if label.get_visible() and label.get_text()), key=lambda box: box.x0)


@pytest.mark.parametrize("case", CASES)
def test_a_picture_can_be_read(drawn, case):
    figure = drawn(*CASES[case])
    for panel in figure.axes:
        assert len(boxes_of(panel.get_xticklabels())) >= 2
        names_bars = bool(panel.patches)
        view = panel.get_ylim()
        assert names_bars or sum(
            min(view) <= label.get_position()[1] <= max(view) and bool(label.get_text())
            for label in panel.get_yticklabels()) >= 2
        # Letters are less high than their line.
        for left, right in itertools.pairwise(boxes_of(panel.get_xticklabels())):
            assert (left.x0 + left.x1) / 2 + 0.75 * min(left.width, right.width) < (
                right.x0 + right.x1) / 2
        for text in (*panel.texts, panel.xaxis.label, panel.yaxis.label, panel.title):
            box = text.get_window_extent()
            assert not text.get_text() or (
                box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1), text
        radius = 0.5 * 3.5 * figure.dpi / 72
        for line in panel.get_lines():
            points = line.get_transform().transform(line.get_xydata())
            for x, y in points[~(points != points).any(axis=1)]:
                assert not math.isfinite(y) or x + radius < panel.bbox.x1
                assert not math.isfinite(y) or y + radius < panel.bbox.y1
        heights = [label.get_window_extent().height for label in panel.get_yticklabels()]
        assert not names_bars or sum(heights) < panel.bbox.height
        assert panel.bbox.height > 1.5 * figure.dpi


def test_all_measured_values_are_labeled(drawn):
    for benchmark, rows, names in (
            ("allreduce", of_sizes(USUAL), [
                "8 B", "16 B", "64 B", "256 B", "1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB",
                "1 MiB", "4 MiB", "16 MiB", "64 MiB"]),
            ("simulate", [of_nodes(1 << power, "ring", 2.0) for power in range(10)],
             [str(1 << power) for power in range(10)])):
        for panel in drawn(benchmark, rows).axes:
            shown = [label.get_text() for label in panel.get_xticklabels() if label.get_visible()]
            assert shown == names


def test_curves_that_coincide_are_named(drawn):
    def notes(*values):
        rows = [of_size(name, nbytes, us) for name, times in zip(NAMES, values)
                for nbytes, us in zip((8, 1024, 1 << 20), times)]
        return [panel.get_xlabel().partition("\n")[2].replace("\n", " ")
                for panel in drawn("allreduce", rows).axes]

    assert notes((1, 10, 100), (2, 20, 300), (2.001, 20, 300)) == 2 * [
        "coincide: mpiring direct, mpiring ring"]
    assert notes((1, 10, 100), (1, 10, 100)) == 2 * ["coincide: all curves"]
    assert notes((1, 10, 100), (1, 10, 200)) == notes((1, 10, 100), (100, 10, 1)) == ["", ""]
    # The second one was measured up to 1 KiB. The marker of a single point is wider than a line.
    assert notes((1, 10, 100), (1, 10)) == 2 * ["coincide: all curves"]
    assert notes((1, 10, 100), (1,)) == ["", ""]


def test_a_step_of_several_thread_levels_names_them_and_tells_its_percentages(drawn):
    (panel,) = drawn("steps", [of_step("compute only", 50.0), of_step("Gloo", 80.0, hidden=40.0),
                               of_step("Gloo", 90.0, "serialized", 20.0)]).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "compute only (multiple)", "Gloo (multiple)", "Gloo (serialized)"]
    assert panel.get_xlabel().splitlines() == [
        "time of a training step (ms, median); shorter is better",
        "first percentage: time of compute only / this time",
        "second percentage: part of communication that is hidden behind compute"]
    (panel,) = drawn("steps", [{**of_step("alone", 50.0), "efficiency_percent": math.nan}]).axes
    assert [text.get_text() for text in panel.texts] == [""]
    assert panel.get_xlabel().endswith("\npercentage: time of alone / this time")


def test_logarithmic_axes_have_plain_numbers(drawn):
    time, rate = drawn("allreduce", of_sizes([8, 1 << 26], us=lambda _, nbytes: nbytes)).axes
    assert "1,000,000" in [label.get_text() for label in time.get_yticklabels()]
    assert {label.get_text() for label in rate.get_yticklabels()} >= {"0.001"}


def test_a_limit_of_one_size_has_a_marker():
    assert picture.limit_style(1)["marker"] and not picture.limit_style(2)["marker"]


def test_the_curves_of_predicted_steps_are_drawn(tmp_path):
    needed("matplotlib")
    rows = [{"nodes": 4, "strategy": name, "step_ms": 3.0, "efficiency_percent": 50.0}
            for name in ("DataParallel", "Sharded")]
    plot.draw(str(tmp_path / "x.svg"), "predicted steps", ABOUT, rows, step_command.DRAWINGS)
    assert "coincide: all curves" in (tmp_path / "x.svg").read_text()
