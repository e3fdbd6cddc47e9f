"""Gives every rank its share of batches of a token budget, each sample once per epoch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

import numpy as np

from ..arguments import refuse_other_state, truth, whole_number
from ..communicator import Communicator, or_world
from ..errors import ConfigError
from ..memory.arrays import Array
from ..memory.digest import digest
from ..operations.consistency import same_on_all
from .packing import EpochPlan, TokenBudget, plan

# What a state says: which samples, and in what order.
_IDENTITY = ("lengths", "digest", "seed", "shuffle")


@dataclass
class _Iteration:
    """An iteration that has begun.

    Attributes:
        epoch, history: As TokenBatches has them.
        plan: The batches of all ranks.
        drawn: How many batches were drawn from it.
    """

    epoch: int
    history: list[list[Any]]
    plan: EpochPlan
    drawn: int = 0

    @property
    def first(self) -> int:
        """The batch with which the iteration begins."""
        return int(self.plan.bounds.searchsorted(self.history[-1][-1]))

    def __len__(self) -> int:
        return len(self.plan) - self.first

    def position_after(self, batches: int) -> tuple[int, list[list[Any]]]:
        """Return the epoch and its history once so many batches are done."""
        done = int(self.plan.bounds[self.first + batches])
        return self.epoch, [*self.history[:-1], [*self.history[-1][:-1], done]]


class TokenBatches:
    """This rank's samples, batch by batch, where samples have different lengths.

    A batch of all ranks has at most so many tokens, of samples of similar length (little padding);
    each rank gets as even a share of it as there is (no rank waits for another). Every sample comes
    once per epoch, and in which batch does not depend on the number of ranks.

        batches = TokenBatches(lengths, comm, tokens=8192, seed=1)
        while batches.epoch < 10:
            for mine in batches:                      # [17, 4, 101]: this rank's samples
                model.weigh(sum(lengths[i] for i in mine))
                ...

    It is also a `batch_sampler` of PyTorch's DataLoader and of torchdata's StatefulDataLoader. What
    shares a loader among ranks by itself must not: leave it out of Accelerate's `prepare`, and pass
    Lightning's Trainer `use_distributed_sampler=False`.

    An iteration has the batches of an epoch; once all were drawn, the next one has those of the
    next epoch. One that was broken off begins again where it had begun, since what draws ahead
    of training, as workers do, has drawn more than was trained on; to go on after the last batch
    that was drawn, `load_state_dict(state_dict())`. Ranks have to break off, and to save and load
    states, at the same batch: this is not compared.

    All ranks take part in every batch. Of those with about as many samples as ranks some get more
    than others (see `imbalance`), and of those with fewer some get an empty list (and
    `model.weigh(0)`, which counts nothing of theirs): so it is with samples longer than
    `tokens / comm.size`. The load is even where `tokens` is `4 * comm.size` times the longest.

    Args:
        lengths: Of all samples, in tokens: a sequence or a vector of whole numbers of at least 1,
            the same on every rank. It is copied, in 1 to 8 bytes each.
        comm: The ranks.
        tokens: At most so many in a batch of all ranks together, padding not counted. There are 5
            to 10 percent fewer: batches are even, and most have a number of samples that a power
            of two divides, so that as many ranks can share it evenly.
        longest: Longer samples count as so many tokens: you cut them to that. By default, all
            count whole.
        seed: Of the order, from 0 to 2**31 - 1. An order is the same with any version of NumPy.
        shuffle: Anew in each epoch. Without it, samples are sorted by length only within windows
            of the order that they have, and each epoch is as the first.
        window: Samples are sorted by length within windows of about so many batches, and of not
            fewer than 4096 samples. More makes less padding, and batches that more often have the
            same company.

    Raises:
        ConfigError: A length is not such a number; a sample is longer than `tokens`; ranks differ
            in lengths or settings, or a setting is wrong.

    Planning an epoch, at its first batch, takes some 0.1 s per million samples, and with lengths
    and order up to 20 bytes per sample; a half of that stays.

    Collective: yes; iterations and all the rest are not. Blocking: yes.

    Source: shares are by LPT; see `packing.shares`.
    """

    def __init__(self, lengths: Sequence[int] | Array, comm: Communicator | None = None, *,
                 tokens: int, longest: int | None = None, seed: int = 0, shuffle: bool = True,
                 window: int = 64) -> None:
        comm = or_world(comm)
        self._comm, rank = comm, f"rank {comm.rank}: "
        with same_on_all(comm, "TokenBatches", remedy="give every rank the same lengths, in the "
                         "same order, and the same settings") as same:
            if longest is not None:
                longest = whole_number(rank + "longest", longest, 1)
            self._budget = TokenBudget(whole_number(rank + "tokens", tokens, 1, (1 << 31) - 1),
                                       longest, whole_number(rank + "window", window, 1))
            self._seed = whole_number(rank + "seed", seed, 0, (1 << 31) - 1)
            self._shuffle = truth(rank + "shuffle", shuffle)
            self._lengths = _checked(lengths, comm.rank)
            _refuse_longer_than(self._budget, self._lengths, comm.rank)
            same.update(vars(self._budget), seed=self._seed, shuffle=self._shuffle,
                        samples=len(self._lengths), lengths=self._lengths.astype(np.int64))
        self._digest = f"{digest([self._lengths]):016x}"
        self._iteration: _Iteration | None = None
        self._begin(0)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way; of the next one if there is none."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first batch, unless it is the present one.

        Iterations move on by themselves: only who wants another order of epochs, or has a framework
        that does so, calls this. The present epoch stays where it is, such as one that was resumed.

        Raises:
            ConfigError: The epoch is not a whole number from 0.
        """
        epoch = whole_number("epoch", epoch, 0)
        self._leave_behind()
        if epoch != self._epoch:
            self._iteration = None
            self._begin(epoch)

    def _leave_behind(self) -> None:
        """Move on from an iteration whose batches were all drawn.

        Who knows how many there are, as Lightning does, never asks for the end.
        """
        now = self._under_way()
        if now is not None and now.drawn == len(now):
            self._begin(now.epoch + 1)

    def _under_way(self) -> _Iteration | None:
        """Return the last iteration, unless it was left behind."""
        now = self._iteration
        return now if now is not None and now.epoch == self._epoch else None

    def _begin(self, epoch: int, history: list[list[Any]] | None = None,
               planned: EpochPlan | None = None) -> None:
        """Let the next iteration be of an epoch.

        Args:
            history: What was done of it: by which budgets, and how many samples by each; the last
                one is this object's.
            planned: What `_plan_of` returns for them, if it is there already.
        """
        self._epoch = epoch
        self._history = history or [[*astuple(self._budget), 0]]
        self._plan = planned
        self._wasted: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Return how many batches the iteration under way has, or the next one if there is none.

        Epochs may differ by some.
        """
        now = self._under_way()
        return len(self._next() if now is None else now)

    @property
    def batch_size(self) -> NoReturn:
        """None: raises ConfigError, for what asks means to share batches that are shared already.

        Accelerate's `prepare` would give each rank some of its batches, and lose the others.
        """
        raise ConfigError(
            f"rank {self._comm.rank}: TokenBatches has no batch_size: batches differ in it, and "
            f"are this rank's share already; leave the loader out of Accelerate's prepare()")

    def __iter__(self) -> Iterator[list[int]]:
        self._leave_behind()
        now = self._iteration = self._next()
        for index in range(now.first, len(now.plan)):
            # Before it is given away: who is behind says so by `seen`.
            now.drawn += 1
            yield now.plan.shares(index, self._comm.size)[self._comm.rank]
        # Unless set_epoch or load_state_dict have come in between, or a later iteration.
        if self._iteration is now:
            self._leave_behind()

    def _next(self) -> _Iteration:
        """Return the next iteration."""
        if self._plan is None:
            self._plan = self._plan_of(self._epoch, self._history)
        return _Iteration(self._epoch, self._history, self._plan)

    def _plan_of(self, epoch: int, history: list[list[Any]]) -> EpochPlan:
        """Plan an epoch by its last budget, without the samples that were done by earlier ones.

        Raises:
            ConfigError: No batch begins where the history says that one did.
        """
        # In as few bytes as are signed and enough.
        samples: Array = np.arange(
            len(self._lengths), dtype=np.int32 if len(self._lengths) < 1 << 31 else np.int64)
        for number, (tokens, longest, window, done) in enumerate(history):
            # RandomState: its stream is the same in every version of NumPy.
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(
                [self._seed, epoch, number]))) if self._shuffle else None
            planned = plan(self._lengths, samples, TokenBudget(tokens, longest, window), random)
            if planned.bounds[planned.bounds.searchsorted(done)] != done:
                raise ConfigError(
                    f"rank {self._comm.rank}: the state of TokenBatches has {done} samples done by "
                    f"Budget({tokens=}, {longest=}, {window=}), but no batch ends there: pass what "
                    f"state_dict() has returned")
            samples = planned.order[done:]
        return planned

    @property
    def padding(self) -> float:
        """How much of this epoch is padding, if each rank pads samples to its longest of a batch.

        A share of all tokens with padding, from 0 to 1, of all batches on all ranks. Computed when
        first asked for, in some seconds per million samples.
        """
        return self._waste()[0]

    @property
    def imbalance(self) -> float:
        """By how much the heaviest rank of a batch exceeds the mean of ranks, in this epoch.

        A share of the mean; of all batches, weighted by their tokens. Computed as `padding` is.
        """
        return self._waste()[1]

    def _waste(self) -> tuple[float, float]:
        if self._wasted is None:
            self._wasted = self._next().plan.waste(self._comm.size)
        return self._wasted

    def state_dict(self, *, seen: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank; fit for JSON.

        Args:
            seen: How many batches were trained on since the iteration began: the one whose first
                batch was drawn last, also if it is over. By default all that were drawn, which
                are more where `mpiring.data.prefetch`, or a DataLoader with workers, is ahead of
                training.

        Raises:
            ConfigError: No so many were drawn.
        """
        now = self._iteration
        if seen is not None:
            seen = whole_number("seen (batches drawn in this iteration)", seen, 0,
                                now.drawn if now is not None else 0)
        if now is None or seen is None and self._under_way() is None:
            epoch, history = self._epoch, self._history
        else:
            epoch, history = now.position_after(now.drawn if seen is None else seen)
        return {"epoch": epoch, "history": [list(entry) for entry in history],
                **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was called, on every rank; also with another number of ranks.

        The next iteration has what was left of the epoch (nothing, if that was all of it). With
        other `tokens`, `longest` or `window`, samples that were left are packed anew.

        Raises:
            ConfigError: Lengths, the seed or `shuffle` were others, or it is not such a state.
        """
        whose = "of TokenBatches"
        refuse_other_state(state, ("epoch", "history", *_IDENTITY), whose)
        identity, saved = self._identity(), {name: state[name] for name in _IDENTITY}
        if saved != identity:
            raise ConfigError(
                f"rank {self._comm.rank}: the state is of batches with "
                f"{_differences(saved, identity)}, but these have {_differences(identity, saved)}; "
                f"resume with the same samples in the same order, and the same seed")
        epoch = whole_number(f"the state {whose}: epoch", state["epoch"], 0)
        history = _history(state["history"], len(self._lengths))
        if not history or history[-1][:-1] != [*astuple(self._budget)]:
            history.append([*astuple(self._budget), 0])
        planned = self._plan_of(epoch, history)
        self._iteration = None
        self._begin(epoch, history, planned)

    def _identity(self) -> dict[str, Any]:
        return {"lengths": len(self._lengths), "digest": self._digest, "seed": self._seed,
                "shuffle": self._shuffle}


def _history(entries: Any, n: int) -> list[list[Any]]:
    """Return a state's history without budgets by which nothing was done; raises ConfigError."""
    name, history, left = "the state of TokenBatches: history", [], n
    if not isinstance(entries, Sequence) or not all(
            isinstance(entry, Sequence) and len(entry) == 4 for entry in entries):
        raise ConfigError(f"{name} is {entries!r:.200}: pass what state_dict() has returned")
    for tokens, longest, window, samples in entries:
        if done := whole_number(f"{name}: samples", samples, 0, left):
            history.append([
                whole_number(f"{name}: tokens", tokens, 1),
                None if longest is None else whole_number(f"{name}: longest", longest, 1),
                whole_number(f"{name}: window", window, 1), done])
            left -= done
    return history


def _differences(identity: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Write what is not the same."""
    return ", ".join(f"{name}={x}" for name, x in identity.items() if x != other[name])


def _checked(lengths: Any, rank: int) -> Array:
    """Return a copy of samples' lengths, in as few bytes as are enough; raises ConfigError."""
    if isinstance(lengths, list | tuple):
        # NumPy would take True for 1, and make floats of all if one is.
        if not all(issubclass(kind, int | np.integer) and kind is not bool
                   for kind in set(map(type, lengths))):
            _refuse_first_of(lengths, rank)
    try:
        x = np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rank {rank}: lengths is a {type(lengths).__name__}, which is no "
                          f"vector of whole numbers: {error}") from error
    if x.shape == (0,):
        raise ConfigError(f"rank {rank}: lengths is empty: expected the length of at least one "
                          f"sample")
    if x.ndim != 1:
        raise ConfigError(f"rank {rank}: lengths has shape {x.shape}: expected a vector with a "
                          f"whole number, of at least 1, for each sample")
    if x.dtype.kind not in "iu":
        _refuse_first_of(x.tolist(), rank)
        raise ConfigError(f"rank {rank}: lengths is an array of {x.dtype}: expected whole numbers, "
                          f"such as lengths.astype(np.int64)")
    if x.min() < 1:
        _refuse_first_of(x.tolist(), rank)
    return x.astype(np.min_scalar_type(x.max()))


def _refuse_first_of(lengths: Sequence[Any], rank: int) -> None:
    """Raise ConfigError that names the first sample whose length is wrong."""
    for sample, length in enumerate(lengths):
        if isinstance(length, float) and length.is_integer() and length >= 1:
            continue    # Not this one: the dtype is what is wrong, or another one.
        whole_number(f"rank {rank}: lengths[{sample}]", length, 1)


def _refuse_longer_than(budget: TokenBudget, lengths: Array, rank: int) -> None:
    if min(budget.longest or budget.tokens + 1, int(lengths.max())) > budget.tokens:
        sample = int((lengths > budget.tokens).argmax())
        raise ConfigError(
            f"rank {rank}: sample {sample} has {lengths[sample]} tokens, more than a batch of all "
            f"ranks may have: tokens={budget.tokens}, longest={budget.longest}; raise tokens, or "
            f"cut samples to longest={budget.tokens} or less")
