"""Tells which ranks wait for their data, which ones the others wait for, and why."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple
from statistics import fmean

from ...text import ranks_text
from ..table import significant
from .budget import Activity, Key, LastCall, Step, StepBudget, idle_part, mean, step_at

# Less of a step is not worth a sentence.
_WORTH = 0.05
# By chance, others wait for each rank in turn. A rank stands out if others wait for it so many
# times as long as for the mean rank. The difference must be so many standard deviations, or so
# much of all waits.
_STANDS_OUT, _DEVIATIONS, _MOSTLY = 1.5, 2.0, 0.75
# So many ranks are named.
_MOST = 3

# Milliseconds that all others together wait for a rank in a step; by rank and number of the step.
_Waited = dict[tuple[int, int], float]


class Lateness:
    """The ranks that were late for the operations of a job's steps.

    Args:
        last_called: The last call of each operation.
    """

    def __init__(self, last_called: Mapping[Key, LastCall]) -> None:
        self._last_called = last_called
        self._budgets: dict[int, Mapping[int, StepBudget]] = {}
        self._waited: _Waited = defaultdict(float)

    def add(self, activity: Activity, steps: Sequence[Step], budgets: Mapping[int, StepBudget],
            ) -> None:
        """Add a rank.

        Args:
            activity: The rank's.
            steps: Those that count.
            budgets: Theirs, by number.
        """
        self._budgets[activity.rank] = budgets
        for wait in activity.waits:
            step, last = step_at(steps, wait.began), self._last_called.get(wait.key)
            if step and last:
                began, ended = idle_part(wait, self._last_called)
                self._waited[last.rank, step.number] += (ended - began) / 1e3

    def sentences(self) -> Iterator[str]:
        """Yield what is worth knowing; nothing where ranks are even."""
        means = {rank: mean(list(budgets.values())) for rank, budgets in self._budgets.items()}
        yield from _waits_for_data(means)
        if len(means) < 2:
            return
        # The shares of all ranks' time that are spent waiting for each rank.
        all_ms = sum(budget.step for of_rank in self._budgets.values()
                     for budget in of_rank.values())
        shares = dict.fromkeys(means, 0.0)
        for (rank, _), waited_ms in self._waited.items():
            shares[rank] += waited_ms / all_ms
        limit = sum(shares.values()) * _in_turn(
            len(means), max(len(budgets) for budgets in self._budgets.values()))
        named = [rank for rank in sorted(shares, key=lambda rank: -shares[rank])[:_MOST]
                 if shares[rank] >= limit and _of_others(shares[rank], len(means)) >= _WORTH]
        for rank in named:
            share = _of_others(shares[rank], len(means))
            yield (f"others wait for rank {rank}, {100 * share:.0f} % of their step"
                   f"{self._reason({rank}, ': it {}')}")
        others = shares.keys() - named
        share = sum(shares[rank] for rank in others)
        if share >= _WORTH:
            yield (f"ranks wait for {'others' if named else 'one another'} in turn, "
                   f"{100 * share:.0f} % of their step"
                   f"{self._reason(others, ': each time for one that {}')}")

    def _reason(self, ranks: Set[int], clause: str) -> str:
        """Return why these ranks were late when they were, or nothing if that is not seen.

        Args:
            clause: Around the reason.
        """
        late, usual, weights = [], [], []
        means: dict[int, StepBudget] = {}
        for (rank, number), waited_ms in self._waited.items():
            budget = self._budgets.get(rank, {}).get(number)
            if rank in ranks and budget is not None and waited_ms:
                if number not in means:
                    means[number] = mean([budgets[number] for budgets in self._budgets.values()
                                          if number in budgets])
                late.append(budget)
                usual.append(means[number])
                weights.append(waited_ms)
        if not weights:
            return ""
        reason = _difference(_weighed(late, weights), _weighed(usual, weights))
        return clause.format(reason) if reason else ""


def _waits_for_data(means: Mapping[int, StepBudget]) -> Iterator[str]:
    """Yield a sentence about the ranks that wait for their data."""
    shares = {rank: budget.data / budget.step for rank, budget in means.items()
              if budget.data >= _WORTH * budget.step}
    if shares:
        longest = max(shares, key=lambda rank: shares[rank])
        more = f", rank {longest} the longest, {100 * shares[longest]:.0f} %"
        verb, whose = ("wait", "their") if len(shares) > 1 else ("waits", "its")
        yield (f"{ranks_text(list(shares))} {verb} for {whose} data, "
               f"{100 * fmean(shares.values()):.0f} % of {whose} step{more * (len(shares) > 1)}")


def _in_turn(size: int, steps: int) -> float:
    """Return up to which share of the others' waiting a rank is one that is waited for in turn."""
    mean_share = 1 / size
    deviation = math.sqrt(mean_share * (1 - mean_share) / steps)
    return max(_STANDS_OUT * mean_share, min(_MOSTLY, mean_share + _DEVIATIONS * deviation))


def _of_others(share: float, size: int) -> float:
    """Return a share of all ranks' time as one of the time of all but one."""
    return share * size / (size - 1)


def _weighed(budgets: Sequence[StepBudget], weights: Sequence[float]) -> StepBudget:
    """Return the weighted mean of budgets."""
    total = sum(weights)
    return StepBudget(*(sum(weight * value for weight, value in zip(weights, values)) / total
                        for values in zip(*map(astuple, budgets))))


def _difference(late: StepBudget, usual: StepBudget) -> str:
    """Return what only a late rank does, as a clause; "" if there is no difference."""
    known = usual.tokens > 0
    # Of the milliseconds by which it computes longer, those that its additional tokens take.
    long = usual.compute * (late.tokens / usual.tokens - 1) if known else 0.0
    slow = late.compute - usual.compute - max(0.0, long)
    data = late.data - usual.data
    most = max(data, long, slow)
    if most <= 0 or math.isnan(most):
        return ""
    if most == data:
        return f"waits for its data ({_ms(late.data)}; the mean is {_ms(usual.data)})"
    if most == long:
        return (f"has longer batches ({late.tokens:,.0f} tokens; the mean is {usual.tokens:,.0f}), "
                f"which mpiring.data.TokenBatches would even out")
    if known and late.tokens:
        ratio = late.compute / late.tokens / (usual.compute / usual.tokens)
        return f"computes longer, also per token ({ratio:.2f} times the mean)"
    return (f"computes longer ({_ms(late.compute)}; the mean is {_ms(usual.compute)})"
            + "; model.weigh(tokens) would show whether its batches are longer" * (not known))


def _ms(milliseconds: float) -> str:
    return f"{significant(milliseconds, 3)} ms"
