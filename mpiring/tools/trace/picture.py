"""Draws the budget of a step, and what each rank does in one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..picture import picture
from .budget import Activity, Budget, Key, Operation, Span, Step, Wait, idle_part, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# So many have room in a timeline.
MOST_RANKS = 4

_COMPUTE, _BEHIND, _EXPOSED, _IDLE = "#c8c8c8", "#0072B2", "#D55E00", "#E69F00"
_READY = "#8c8c8c"
_OPERATIONS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_BAR_INCHES, _LANE_INCHES, _FRAME_INCHES = 0.24, 0.3, 1.1
_HEIGHT = 0.8
# A name is written into a bar that takes up this part of the picture for each letter.
_LETTER = 0.011


def draw(path: str, caption: str, budgets: Mapping[int, Budget], activities: Sequence[Activity],
         step: int, last_called: Mapping[Key, float]) -> None:
    """Write a picture: a bar for each rank's budget, and a step of the first ranks over time.

    Args:
        path: Its ending tells the format.
        caption: Stands above.
        budgets: By rank.
        activities: Of a few ranks.
        step: The number of the step that is drawn.
        last_called: When the last rank called each operation.

    Raises: as picture.
    """
    drawn = [_Timeline(activity, step, last_called) for activity in activities]
    lanes = sum(len(one.lanes) for one in drawn)
    heights = [_FRAME_INCHES + _BAR_INCHES * len(budgets), _FRAME_INCHES + _LANE_INCHES * lanes]
    with picture(path, heights, 1, caption) as ((above,), (below,)):
        _bars(above, budgets)
        _lanes(below, drawn, step)


def _bars(axes: "Axes", budgets: Mapping[int, Budget]) -> None:
    """Draw where the time of a step goes on each rank."""
    places, left = range(len(budgets)), [0.0] * len(budgets)
    parts = {
        "compute": (_COMPUTE, [one.compute - one.hidden for one in budgets.values()]),
        "compute, with communication hidden behind it": (
            _BEHIND, [one.hidden for one in budgets.values()]),
        "exposed communication": (_EXPOSED, [one.exposed for one in budgets.values()]),
        "idle: another rank is not there yet": (_IDLE, [one.idle for one in budgets.values()])}
    for label, (colour, values) in parts.items():
        axes.barh(places, values, left=left, color=colour, label=label, height=_HEIGHT)
        left = [sum(pair) for pair in zip(left, values)]
    axes.set_yticks(places, [f"rank {rank}" for rank in budgets])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of a step (ms, mean)")


class _Timeline:
    """One step of one rank, in milliseconds from the first rank's beginning.

    Attributes:
        lanes: The names of its lanes, "program" first.
    """

    def __init__(self, activity: Activity, number: int, last_called: Mapping[Key, float]) -> None:
        self.rank = activity.rank
        self.step = next((step for step in activity.steps if step.number == number), None)
        step = self.step or Step(number, 0.0, 0.0)
        self.waits = [(wait.began, wait.ended) for wait in activity.waits if _is_in(step, wait)]
        self.idle = [idle_part(wait, last_called) for wait in activity.waits if _is_in(step, wait)]
        self.ready = [span for span in activity.ready if step.began <= span[0] < step.ended]
        self.operations = [one for one in activity.operations if _is_in(step, one)]
        used = sorted({one.lane for one in self.operations})
        self.places = {lane: place for place, lane in enumerate(used, 1)}
        self.lanes = [f"rank {self.rank}: program", *(f"operations {lane + 1}" for lane in used)]


def _is_in(step: Step, span: Wait | Operation) -> bool:
    return span.began < step.ended and span.ended > step.began


def _lanes(axes: "Axes", timelines: Sequence[_Timeline], number: int) -> None:
    """Draw what the program does, and below it what is under way meanwhile."""
    known = [one for one in timelines if one.step is not None]
    began = min(one.step.began for one in known if one.step)
    length = max(one.step.ended for one in known if one.step) - began
    top, names = 0, []
    for one in known:
        _program(axes, one, top, began)
        for operation in one.operations:
            place = top + one.places[operation.lane]
            _bar(axes, place, (operation.began, operation.ended), began,
                 _OPERATIONS[operation.key[1] % len(_OPERATIONS)])
            width = (operation.ended - operation.began) / length
            if len(operation.name) * _LETTER < width:
                axes.text(_ms((operation.began + operation.ended) / 2, began), place,
                          operation.name, ha="center", va="center", fontsize=6, color="white")
        top += len(one.lanes)
        names += one.lanes
        axes.axhline(top - 0.5, color="black", linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, length / 1e3)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"step {number}: dark grey: gradients become ready; below: operations under "
                   f"way", loc="left")
    axes.set_xlabel("time (ms)")


def _program(axes: "Axes", one: _Timeline, place: int, zero: float) -> None:
    """Draw a rank's compute, and over it the times of waiting."""
    if one.step is not None:
        _bar(axes, place, (one.step.began, one.step.ended), zero, _COMPUTE)
    for spans, colour in ((one.ready, _READY), (union(one.waits), _EXPOSED),
                          (union(one.idle), _IDLE)):
        for span in spans:
            _bar(axes, place, span, zero, colour)


def _bar(axes: "Axes", place: int, span: Span, zero: float, colour: str) -> None:
    axes.barh(place, (span[1] - span[0]) / 1e3, left=_ms(span[0], zero), color=colour,
              height=_HEIGHT)


def _ms(at: float, zero: float) -> float:
    return (at - zero) / 1e3
