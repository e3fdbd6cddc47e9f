"""Draws the time budget of a step, and a timeline of one step for a few ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..picture import INK, name_bars, picture
from .budget import Activity, Key, LastCall, Step, StepBudget, idle_part, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum number of ranks in the timeline.
MAX_RANKS = 4

_COMPUTE, _HIDDEN, _EXPOSED, _IDLE = "#c8c8c8", "#0072B2", "#D55E00", "#E69F00"
_DATA = "#882255"
_READY = "#8c8c8c"
_OPERATIONS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_PARTS: Sequence[tuple[str, str, Callable[[StepBudget], float]]] = (
    ("compute", _COMPUTE, lambda budget: budget.compute - budget.hidden),
    ("compute, hiding communication", _HIDDEN, lambda budget: budget.hidden),
    ("waiting for data", _DATA, lambda budget: budget.data),
    ("exposed communication", _EXPOSED, lambda budget: budget.exposed),
    ("idle: another rank is not there yet", _IDLE, lambda budget: budget.idle))
_BAR_INCHES, _LANE_INCHES, _FRAME_INCHES = 0.24, 0.3, 1.1
_HEIGHT = 0.8
# Width of a letter, as a share of the panel. A bar shows its name if the name fits.
_LETTER = 0.011

# Start and end in microseconds, color, and text.
_Bar = tuple[float, float, str, str]


def draw(path: str, caption: str, budgets: Mapping[int, StepBudget], activities: Sequence[Activity],
         number: int, last_called: Mapping[Key, LastCall]) -> None:
    """Write a picture: a bar for the budget of each rank, and a timeline of one step.

    The activities are those of the ranks in the timeline. For errors, see `tools.picture.picture`.
    """
    drawn = [(step, list(_rows(activity, step, last_called)))
             for activity in activities for step in activity.steps if step.number == number]
    lanes = sum(len(rows) for _, rows in drawn)
    heights = [_FRAME_INCHES + _BAR_INCHES * len(budgets), _FRAME_INCHES + _LANE_INCHES * lanes]
    with picture(path, heights, 1, caption) as ((above,), (below,)):
        _draw_budgets(above, budgets)
        _draw_rows(below, [rows for _, rows in drawn], min(step.began for step, _ in drawn),
                   max(step.ended for step, _ in drawn))
        below.set_title(f"step {number}: dark gray: gradients become ready; below: operations "
                        f"in flight", loc="left")


def _draw_budgets(axes: "Axes", budgets: Mapping[int, StepBudget]) -> None:
    """Draw a bar for the budget of each rank."""
    rows, left = range(len(budgets)), [0.0] * len(budgets)
    for label, color, part in _PARTS:
        values = [part(budget) for budget in budgets.values()]
        if any(values) or color != _DATA:
            axes.barh(rows, values, left=left, color=color, label=label, height=_HEIGHT)
            left = [sum(pair) for pair in zip(left, values)]
    name_bars(axes, [f"rank {rank}" for rank in budgets])
    axes.set_xlabel("time of a step (ms, mean)")


def _rows(activity: Activity, step: Step, last_called: Mapping[Key, LastCall],
          ) -> Iterator[tuple[str, list[_Bar]]]:
    """Yield the names and bars of the rows of a rank: its program, then operations in flight."""
    def in_step(span: Sequence[Any]) -> bool:
        return bool(span[0] < step.ended and span[1] > step.began)

    # Later colors cover earlier ones.
    spans = {_COMPUTE: [(step.began, step.ended)], _READY: activity.ready, _DATA: activity.data,
             _EXPOSED: union(wait[:2] for wait in activity.waits),
             _IDLE: union(idle_part(wait, last_called) for wait in activity.waits)}
    yield f"rank {activity.rank}: program", [
        (*span, color, "") for color, colored in spans.items() for span in filter(in_step, colored)]
    operations = list(filter(in_step, activity.operations))
    for lane in sorted({operation.lane for operation in operations}):
        yield f"operations {lane + 1}", [
            (operation.began, operation.ended,
             _OPERATIONS[operation.key[1] % len(_OPERATIONS)], operation.name)
            for operation in operations if operation.lane == lane]


def _draw_rows(axes: "Axes", ranks: Sequence[Sequence[tuple[str, list[_Bar]]]], zero: float,
               last: float) -> None:
    """Draw the rows of all ranks, between times in microseconds."""
    names: list[str] = []
    for rows in ranks:
        for name, bars in rows:
            began, ended, colors, texts = zip(*bars)
            axes.barh([len(names)] * len(bars), [(end - at) / 1e3 for at, end in zip(began, ended)],
                      left=[(at - zero) / 1e3 for at in began], color=colors, height=_HEIGHT)
            for at, end, text in zip(began, ended, texts):
                if 0 < len(text) * _LETTER < (end - at) / (last - zero):
                    axes.text(((at + end) / 2 - zero) / 1e3, len(names), text, ha="center",
                              va="center", fontsize=6, color="black")
            names.append(name)
        axes.axhline(len(names) - 0.5, color=INK, linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, (last - zero) / 1e3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time (ms)")
