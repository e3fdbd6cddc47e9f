"""Gives each rank its share of batches with a token budget; each sample occurs once per epoch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

import numpy as np

from ..arguments import refuse_other_state, truth, whole_number
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.arrays import Array
from ..memory.digest import digest
from ..operations.consistency import same_on_all
from ..world import or_world
from .packing import EpochPlan, TokenBudget, plan


@dataclass
class _Iteration:
    """An iteration that has begun, with the epoch and the history at that time."""

    epoch: int
    history: list[list[Any]]
    plan: EpochPlan
    drawn: int = 0

    @property
    def first(self) -> int:
        """Index of the first batch of the iteration."""
        return int(self.plan.bounds.searchsorted(self.history[-1][-1]))

    def __len__(self) -> int:
        return len(self.plan) - self.first

    def position_after(self, batches: int) -> tuple[int, list[list[Any]]]:
        """Return the epoch and its history after a number of batches."""
        done = int(self.plan.bounds[self.first + batches])
        return self.epoch, [*self.history[:-1], [*self.history[-1][:-1], done]]


class TokenBatches:
    """This rank's samples, batch by batch, for samples of different lengths.

    A batch of all ranks has a limited number of tokens and samples of similar length, which keeps
    padding low. All ranks get similar numbers of tokens, which keeps waits short. Each sample
    occurs once per epoch, in a batch that does not depend on the number of ranks.

        batches = TokenBatches(lengths, comm, tokens=8192, seed=1)
        while batches.epoch < 10:
            for samples in batches:                   # [17, 4, 101]: this rank's samples
                model.weigh(sum(lengths[i] for i in samples))
                ...

    It can also be the `batch_sampler` of a PyTorch DataLoader or a torchdata StatefulDataLoader.
    Other tools must not divide this loader among ranks again: leave it out of Accelerate's
    `prepare`, and pass `use_distributed_sampler=False` to Lightning's Trainer.

    An iteration has the batches of one epoch. After all of them were drawn, the next iteration has
    the batches of the next epoch. If you leave an iteration early, the next iteration repeats it
    from its first batch, because workers may have drawn more batches than were trained on. To
    continue after the last batch that was drawn, call `load_state_dict(state_dict())`. All ranks
    must leave, save and load at the same batch; this is not checked.

    All ranks take part in every batch. If a batch has about as many samples as ranks, some ranks
    get more tokens than others (see `imbalance`). If it has fewer samples than ranks, some ranks
    get an empty list; call `model.weigh(0)`, which gives them no weight. This happens with samples
    longer than `tokens / comm.size`. The load is even if `tokens` is `4 * comm.size` times the
    longest sample.

    Args:
        lengths: Lengths of all samples in tokens: a sequence or vector of whole numbers of at least
            1, the same on every rank. The copy takes 1 to 8 bytes per sample.
        comm: Communicator whose ranks train together; by default, all ranks.
        tokens: Largest number of tokens in a batch of all ranks, without padding. Batches have 5 to
            10 percent fewer tokens, because they have similar sizes. In most batches, the number of
            samples is also divisible by a power of two, and thus by many numbers of ranks.
        longest: Length to which you cut longer samples; only this many of their tokens count. By
            default, all tokens count.
        seed: Seed of the order, from 0 to 2**31 - 1. The order is the same with any version of
            NumPy.
        shuffle: If true, each epoch has a new order. If false, samples are sorted by length only
            within windows of the given order, and all epochs are the same.
        window: Approximate number of batches in a window. Samples are sorted by length within
            windows, which have at least 4096 samples. Larger windows need less padding, but the
            same samples are more often in the same batch.

    Raises:
        ConfigError: A length is not a whole number of at least 1, a sample is longer than `tokens`,
            a setting is wrong, or ranks differ in lengths or settings.

    The epoch is planned before its first batch, which takes about 0.1 s per million samples.
    Lengths and order need up to 20 bytes per sample during planning, and half of it afterwards.

    Collective: yes; iterations and methods are not. Blocking: yes.

    Source: LPT divides batches among ranks; see `packing.shares`.
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
            self._lengths = _checked_lengths(lengths, comm.rank)
            _refuse_longer_than(self._budget, self._lengths, comm.rank)
            same.update(vars(self._budget), seed=self._seed, shuffle=self._shuffle,
                        samples=len(self._lengths), lengths=self._lengths.astype(np.int64))
        self._digest = f"{digest([self._lengths]):016x}"
        self._iteration: _Iteration | None = None
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """Epoch of the current iteration, or of the next one if there is none."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first batch, unless it is the current one.

        Iterations proceed to the next epoch automatically. Call this only for another order of
        epochs; some frameworks also call it. If `epoch` is the current epoch, for example after
        resuming, its position does not change.

        Args:
            epoch: Number of the epoch.

        Raises:
            ConfigError: The epoch is not a whole number from 0.
        """
        epoch = whole_number("epoch", epoch, 0)
        self._end_complete_iteration()
        if epoch != self._epoch:
            self._iteration = None
            self._begin_epoch(epoch)

    def _end_complete_iteration(self) -> None:
        """Proceed to the next epoch if all batches of the iteration were drawn.

        Code that counts batches, such as Lightning, does not run the iteration to its end.
        """
        iteration = self._current_iteration()
        if iteration is not None and iteration.drawn == len(iteration):
            self._begin_epoch(iteration.epoch + 1)

    def _current_iteration(self) -> _Iteration | None:
        """Return the last iteration, unless the epoch has changed since."""
        iteration = self._iteration
        return iteration if iteration is not None and iteration.epoch == self._epoch else None

    def _begin_epoch(self, epoch: int, history: list[list[Any]] | None = None,
                     planned: EpochPlan | None = None) -> None:
        """Set the epoch of the next iteration.

        The history has the budgets that were used in the epoch, each with its number of completed
        samples; the last is this object's. `planned` is its plan, if known.
        """
        self._epoch = epoch
        self._history = history or [[*astuple(self._budget), 0]]
        self._plan = planned
        self._waste: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Return the number of batches in the current iteration, or in the next if there is none.

        The number may vary slightly between epochs.
        """
        iteration = self._current_iteration()
        return len(self._next_iteration() if iteration is None else iteration)

    @property
    def batch_size(self) -> NoReturn:
        """Always raises ConfigError, because callers would divide batches among ranks again.

        Accelerate's `prepare` would give each rank some of its batches, and lose the rest.
        """
        raise ConfigError(
            f"rank {self._comm.rank}: TokenBatches has no batch_size: batches differ in it, and "
            f"are this rank's share already; leave the loader out of Accelerate's prepare()")

    def __iter__(self) -> Iterator[list[int]]:
        self._end_complete_iteration()
        iteration = self._iteration = self._next_iteration()
        for index in range(iteration.first, len(iteration.plan)):
            # The batch counts before the caller has used it; callers that draw ahead pass `seen`.
            iteration.drawn += 1
            yield iteration.plan.shares(index, self._comm.size)[self._comm.rank]
        # set_epoch, load_state_dict or another iteration may have been called meanwhile.
        if self._iteration is iteration:
            self._end_complete_iteration()

    def _next_iteration(self) -> _Iteration:
        if self._plan is None:
            self._plan = self._plan_of(self._epoch, self._history)
        return _Iteration(self._epoch, self._history, self._plan)

    def _plan_of(self, epoch: int, history: list[list[Any]]) -> EpochPlan:
        """Plan an epoch with its last budget, without samples completed with earlier budgets.

        Raises ConfigError if a position in the history is not between two batches.
        """
        # This is the smallest sufficient signed dtype.
        samples: Array = np.arange(
            len(self._lengths), dtype=np.int32 if len(self._lengths) < 1 << 31 else np.int64)
        for number, (tokens, longest, window, done) in enumerate(history):
            # RandomState, because its stream is the same in every version of NumPy.
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
        """Share of padding in this epoch if each rank pads each batch to its longest sample.

        The share is a fraction from 0 to 1 of all tokens including padding, over all batches and
        ranks. The first access computes it, in a few seconds per million samples.
        """
        return self._padding_and_imbalance()[0]

    @property
    def imbalance(self) -> float:
        """Relative excess of the rank with the most tokens over the mean of all ranks.

        This is an average over all batches of the epoch, weighted by their tokens. The first access
        computes it, like `padding`.
        """
        return self._padding_and_imbalance()[1]

    def _padding_and_imbalance(self) -> tuple[float, float]:
        if self._waste is None:
            self._waste = self._next_iteration().plan.waste(self._comm.size)
        return self._waste

    def state_dict(self, *, seen: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank; suitable for JSON.

        Args:
            seen: Number of batches trained on since the latest iteration began; by default, all
                batches that were drawn. Pass it if `mpiring.data.prefetch`, or a DataLoader with
                workers, draws batches ahead of training.

        Raises:
            ConfigError: Fewer batches were drawn.
        """
        iteration = self._iteration
        if seen is not None:
            seen = whole_number("seen (batches drawn in this iteration)", seen, 0,
                                iteration.drawn if iteration is not None else 0)
        if iteration is None or seen is None and self._current_iteration() is None:
            epoch, history = self._epoch, self._history
        else:
            epoch, history = iteration.position_after(iteration.drawn if seen is None else seen)
        return {"epoch": epoch, "history": [list(entry) for entry in history],
                **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, on every rank; the number of ranks may differ.

        The next iteration has the rest of the epoch, which may be empty. If `tokens`, `longest` or
        `window` differ, the remaining samples are packed again.

        Args:
            state: Result of `state_dict`.

        Raises:
            ConfigError: Lengths, seed or `shuffle` differ, or `state` is no result of `state_dict`.
        """
        whose, identity = "of TokenBatches", self._identity()
        refuse_other_state(state, ("epoch", "history", *identity), whose)
        saved = {name: state[name] for name in identity}
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
        self._begin_epoch(epoch, history, planned)

    def _identity(self) -> dict[str, Any]:
        """Return the values of a state that identify the samples and their order."""
        return {"lengths": len(self._lengths), "digest": self._digest, "seed": self._seed,
                "shuffle": self._shuffle}


def _history(entries: Any, n: int) -> list[list[Any]]:
    """Return a state's history without unused budgets; raise ConfigError if it is wrong."""
    name, history, remaining = "the state of TokenBatches: history", [], n
    if not isinstance(entries, Sequence) or not all(
            isinstance(entry, Sequence) and len(entry) == 4 for entry in entries):
        raise ConfigError(f"{name} is {entries!r:.200}: pass what state_dict() has returned")
    for tokens, longest, window, samples in entries:
        if done := whole_number(f"{name}: samples", samples, 0, remaining):
            history.append([
                whole_number(f"{name}: tokens", tokens, 1),
                None if longest is None else whole_number(f"{name}: longest", longest, 1),
                whole_number(f"{name}: window", window, 1), done])
            remaining -= done
    return history


def _differences(identity: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a text with the values that differ."""
    return ", ".join(f"{name}={x}" for name, x in identity.items() if x != other[name])


def _checked_lengths(lengths: Any, rank: int) -> Array:
    """Return a copy of lengths in the smallest sufficient dtype; raise ConfigError if wrong."""
    # NumPy would convert True to 1, and all numbers to floats if one is a float.
    if isinstance(lengths, list | tuple) and not all(
            issubclass(kind, int | np.integer) and kind is not bool
            for kind in set(map(type, lengths))):
        _refuse_first_of(lengths, rank)
    try:
        x = np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rank {rank}: lengths is a {type(lengths).__name__}, which is not "
                          f"a vector of whole numbers: {error}") from error
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
    """Raise ConfigError for the first sample whose length is wrong, if there is one."""
    for sample, length in enumerate(lengths):
        if isinstance(length, float) and length.is_integer() and length >= 1:
            continue    # This length is whole; the dtype or another length is wrong.
        whole_number(f"rank {rank}: lengths[{sample}]", length, 1)


def _refuse_longer_than(budget: TokenBudget, lengths: Array, rank: int) -> None:
    if min(budget.longest or budget.tokens + 1, int(lengths.max())) > budget.tokens:
        sample = int((lengths > budget.tokens).argmax())
        raise ConfigError(
            f"rank {rank}: sample {sample} has {lengths[sample]} tokens, more than a batch of all "
            f"ranks may have: tokens={budget.tokens}, longest={budget.longest}; raise tokens, or "
            f"cut samples to longest={budget.tokens} or less")
