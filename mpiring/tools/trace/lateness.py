"""Explains which ranks wait for data, for which ranks the others wait, and why."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple
from statistics import fmean

from ...provisional import ranks_text
from ..table import significant
from .budget import Activity, Key, LastCall, Step, StepBudget, idle_part, mean, step_at

# Shorter waits, as a share of a step, are not reported.
_MIN_SHARE = 0.05
# Each rank is sometimes the last one by chance. A rank is named only if others wait for it this
# many times as long as for an average rank. The difference must also be this many standard
# deviations, or the rank must cause this share of all waits.
_MIN_RATIO, _DEVIATIONS, _MAJORITY = 1.5, 2.0, 0.75
# Maximum number of ranks that are named.
_MAX_RANKS = 3


class Lateness:
    """The ranks that called operations later than the other ranks."""

    def __init__(self, last_called: Mapping[Key, LastCall]) -> None:
        self._last_called = last_called
        self._budgets: dict[int, Mapping[int, StepBudget]] = {}
        # Milliseconds that all others together waited for a rank, by rank and number of the step.
        self._waited: dict[tuple[int, int], float] = defaultdict(float)

    def add(self, activity: Activity, steps: Sequence[Step], budgets: Mapping[int, StepBudget],
            ) -> None:
        """Add a rank, and examine these steps; budgets are by step number."""
        self._budgets[activity.rank] = budgets
        for wait in activity.waits:
            step, last = step_at(steps, wait.began), self._last_called.get(wait.key)
            if step and last:
                began, ended = idle_part(wait, self._last_called)
                self._waited[last.rank, step.number] += (ended - began) / 1e3

    def sentences(self) -> Iterator[str]:
        """Yield sentences for the report; none if the ranks are balanced."""
        means = {rank: mean(list(budgets.values())) for rank, budgets in self._budgets.items()}
        yield from _waits_for_data(means)
        if len(means) < 2:
            return
        # For each rank, the time that others spend waiting for it, as a share of all ranks' time.
        total_ms = sum(budget.step for budgets in self._budgets.values()
                       for budget in budgets.values())
        shares = dict.fromkeys(means, 0.0)
        for (rank, _), waited_ms in self._waited.items():
            shares[rank] += waited_ms / total_ms
        limit = sum(shares.values()) * _share_by_chance(
            len(means), max(len(budgets) for budgets in self._budgets.values()))
        # Factor from a share of all ranks' time to a share of the other ranks' time.
        to_others = len(means) / (len(means) - 1)
        named = [rank for rank in sorted(shares, key=lambda rank: -shares[rank])[:_MAX_RANKS]
                 if shares[rank] >= limit and to_others * shares[rank] >= _MIN_SHARE]
        for rank in named:
            yield (f"others wait for rank {rank}, {100 * to_others * shares[rank]:.0f} % of their "
                   f"step{self._reason({rank}, ': it {}')}")
        others = shares.keys() - named
        share = sum(shares[rank] for rank in others)
        if share >= _MIN_SHARE:
            yield (f"ranks wait for {'others' if named else 'one another'} in turn, "
                   f"{100 * share:.0f} % of their step"
                   f"{self._reason(others, ': each time for one that {}')}")

    def _reason(self, ranks: Set[int], clause: str) -> str:
        """Return the most likely reason why these ranks were late, or "" if there is none.

        The clause is a format string of the result, with a place for the reason.
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
        reason = _difference(_weighted_mean(late, weights), _weighted_mean(usual, weights))
        return clause.format(reason) if reason else ""


def _waits_for_data(means: Mapping[int, StepBudget]) -> Iterator[str]:
    """Yield a sentence about the ranks that wait for data, if there are any."""
    shares = {rank: budget.data / budget.step for rank, budget in means.items()
              if budget.data >= _MIN_SHARE * budget.step}
    if shares:
        longest = max(shares, key=lambda rank: shares[rank])
        more = f", rank {longest} the longest, {100 * shares[longest]:.0f} %"
        verb, whose = ("wait", "their") if len(shares) > 1 else ("waits", "its")
        yield (f"{ranks_text(list(shares))} {verb} for {whose} data, "
               f"{100 * fmean(shares.values()):.0f} % of {whose} step{more * (len(shares) > 1)}")


def _share_by_chance(size: int, steps: int) -> float:
    """Return the largest share of all waits that one of `size` balanced ranks may cause."""
    mean_share = 1 / size
    deviation = math.sqrt(mean_share * (1 - mean_share) / steps)
    return max(_MIN_RATIO * mean_share, min(_MAJORITY, mean_share + _DEVIATIONS * deviation))


def _weighted_mean(budgets: Sequence[StepBudget], weights: Sequence[float]) -> StepBudget:
    """Return the weighted mean of budgets."""
    total = sum(weights)
    return StepBudget(*(sum(weight * value for weight, value in zip(weights, values)) / total
                        for values in zip(*map(astuple, budgets))))


def _difference(late: StepBudget, usual: StepBudget) -> str:
    """Return how a late rank differs from the mean, as a clause; "" if there is no difference."""
    has_tokens = usual.tokens > 0
    # Milliseconds of data, of computing additional tokens, and of slower computing.
    data = late.data - usual.data
    tokens = usual.compute * (late.tokens / usual.tokens - 1) if has_tokens else 0.0
    slow = late.compute - usual.compute - max(0.0, tokens)
    largest = max(data, tokens, slow)
    if largest <= 0 or math.isnan(largest):
        return ""
    if largest == data:
        return f"waits for its data ({_ms(late.data)}; the mean is {_ms(usual.data)})"
    if largest == tokens:
        return (f"has longer batches ({late.tokens:,.0f} tokens; the mean is {usual.tokens:,.0f}), "
                f"which mpiring.data.TokenBatches would even out")
    if has_tokens and late.tokens:
        ratio = late.compute / late.tokens / (usual.compute / usual.tokens)
        return f"computes longer, also per token ({ratio:.2f} times the mean)"
    return (f"computes longer ({_ms(late.compute)}; the mean is {_ms(usual.compute)})"
            + "; model.weigh(tokens) would show whether its batches are longer" * (not has_tokens))


def _ms(milliseconds: float) -> str:
    return f"{significant(milliseconds, 3)} ms"
