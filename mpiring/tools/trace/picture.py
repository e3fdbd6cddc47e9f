"""Draws the budget of a step, and a step of each rank over time."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..picture import INK, name_bars, picture
from .budget import (
    Activity, Key, LastCall, Span, Step, StepBudget, TracedOperation, Wait, idle_part, union)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A timeline has room for so many.
MOST_RANKS = 4

_COMPUTE, _BEHIND, _EXPOSED, _IDLE = "#c8c8c8", "#0072B2", "#D55E00", "#E69F00"
_DATA = "#882255"
_READY = "#8c8c8c"
_OPERATIONS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_PARTS: Sequence[tuple[str, str, Callable[[StepBudget], float]]] = (
    ("compute", _COMPUTE, lambda budget: budget.compute - budget.hidden),
    ("compute, hiding communication", _BEHIND, lambda budget: budget.hidden),
    ("waiting for data", _DATA, lambda budget: budget.data),
    ("exposed communication", _EXPOSED, lambda budget: budget.exposed),
    ("idle: another rank is not there yet", _IDLE, lambda budget: budget.idle))
_BAR_INCHES, _LANE_INCHES, _FRAME_INCHES = 0.24, 0.3, 1.1
_HEIGHT = 0.8
# A bar shows its name where it has this share of the picture for each letter.
_LETTER = 0.011


def draw(path: str, caption: str, budgets: Mapping[int, StepBudget], activities: Sequence[Activity],
         step: int, last_called: Mapping[Key, LastCall]) -> None:
    """Write a picture: a bar for each rank's budget, and a step of the first ranks over time.

    Args:
        path: Its ending sets the format.
        caption: Stands above.
        budgets: By rank.
        activities: Of a few ranks.
        step: The number of the step that is drawn.
        last_called: When the last rank called each operation.

    Raises: as picture.
    """
    drawn = [_Timeline(activity, step, last_called) for activity in activities]
    lanes = sum(len(timeline.lanes) for timeline in drawn)
    heights = [_FRAME_INCHES + _BAR_INCHES * len(budgets), _FRAME_INCHES + _LANE_INCHES * lanes]
    with picture(path, heights, 1, caption) as ((above,), (below,)):
        _bars(above, budgets)
        _lanes(below, drawn, step)


def _bars(axes: "Axes", budgets: Mapping[int, StepBudget]) -> None:
    """Draw where the time of a step goes on each rank."""
    rows, left = range(len(budgets)), [0.0] * len(budgets)
    for label, colour, part in _PARTS:
        values = [part(budget) for budget in budgets.values()]
        if any(values) or colour != _DATA:
            axes.barh(rows, values, left=left, color=colour, label=label, height=_HEIGHT)
            left = [sum(pair) for pair in zip(left, values)]
    name_bars(axes, [f"rank {rank}" for rank in budgets])
    axes.set_xlabel("time of a step (ms, mean)")


class _Timeline:
    """One step of one rank, in milliseconds from the first rank's beginning.

    Attributes:
        lanes: The names of its lanes, "program" first.
    """

    def __init__(self, activity: Activity, number: int,
                 last_called: Mapping[Key, LastCall]) -> None:
        self.rank = activity.rank
        self.step = next((step for step in activity.steps if step.number == number), None)
        step = self.step or Step(number, 0.0, 0.0)
        self.waits = [wait[:2] for wait in activity.waits if _is_in(step, wait)]
        self.idle = [idle_part(wait, last_called) for wait in activity.waits if _is_in(step, wait)]
        self.data = [span for span in activity.data if _is_in(step, span)]
        self.ready = [span for span in activity.ready if step.began <= span[0] < step.ended]
        self.operations = [span for span in activity.operations if _is_in(step, span)]
        used = sorted({operation.lane for operation in self.operations})
        self.rows = {lane: row for row, lane in enumerate(used, 1)}
        self.lanes = [f"rank {self.rank}: program", *(f"operations {lane + 1}" for lane in used)]


def _is_in(step: Step, span: Wait | TracedOperation | Span) -> bool:
    return span[0] < step.ended and span[1] > step.began


def _lanes(axes: "Axes", timelines: Sequence[_Timeline], number: int) -> None:
    """Draw what the program does, and below it what is under way meanwhile."""
    known = [timeline for timeline in timelines if timeline.step is not None]
    began = min(timeline.step.began for timeline in known if timeline.step)
    length = max(timeline.step.ended for timeline in known if timeline.step) - began
    top, names = 0, []
    for timeline in known:
        _program(axes, timeline, top, began)
        for operation in timeline.operations:
            row = top + timeline.rows[operation.lane]
            _bar(axes, row, operation[:2], began,
                 _OPERATIONS[operation.key[1] % len(_OPERATIONS)])
            width = (operation.ended - operation.began) / length
            if len(operation.name) * _LETTER < width:
                axes.text(_ms((operation.began + operation.ended) / 2, began), row,
                          operation.name, ha="center", va="center", fontsize=6, color="white")
        top += len(timeline.lanes)
        names += timeline.lanes
        axes.axhline(top - 0.5, color=INK, linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, length / 1e3)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"step {number}: dark grey: gradients become ready; below: operations under "
                   f"way", loc="left")
    axes.set_xlabel("time (ms)")


def _program(axes: "Axes", timeline: _Timeline, row: int, zero: float) -> None:
    """Draw a rank's compute, and over it the times of waiting."""
    if timeline.step is not None:
        _bar(axes, row, (timeline.step.began, timeline.step.ended), zero, _COMPUTE)
    for spans, colour in ((timeline.ready, _READY), (timeline.data, _DATA),
                          (union(timeline.waits), _EXPOSED), (union(timeline.idle), _IDLE)):
        for span in spans:
            _bar(axes, row, span, zero, colour)


def _bar(axes: "Axes", row: int, span: Span, zero: float, colour: str) -> None:
    axes.barh(row, (span[1] - span[0]) / 1e3, left=_ms(span[0], zero), color=colour,
              height=_HEIGHT)


def _ms(at: float, zero: float) -> float:
    return (at - zero) / 1e3
