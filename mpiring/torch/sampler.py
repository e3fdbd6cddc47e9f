"""Divides a dataset among ranks, epoch by epoch, and resumes at any position."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ..arguments import refuse_other_state, truth, whole_number
from ..communicator import Communicator
from ..errors import ConfigError
from ..operations.consistency import same_on_all
from ..world import or_world


class DistributedSampler(Sampler[int]):
    """This rank's share of a dataset's indices, in an order that all ranks agree on.

        sampler = DistributedSampler(dataset, comm, seed=1)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)

    It replaces the PyTorch class with the same name. In training, every rank gets the same number
    of samples, so that all ranks take part in every step. In evaluation (`pad=False`), every sample
    is drawn exactly once.

    Args:
        dataset: Any object with a length, the same on every rank.
        comm: Communicator whose ranks train together; by default, all ranks.
        shuffle: If true, each epoch has a new random order, which depends on `seed` and the epoch.
        seed: Seed of the order, the same on every rank; from 0 to 2**31 - 1.
        drop_last: If true, leave out the last samples (fewer than `comm.size`) that cannot be
            divided evenly.
        pad: If true, repeat samples from the start of the epoch until all ranks have the same
            number. If false, the first ranks get one sample more than the others.

    Raises:
        ConfigError: Ranks differ in the length of the dataset or in settings, or a setting is
            wrong.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, dataset: Sized, comm: Communicator | None = None, *, shuffle: bool = True,
                 seed: int = 0, drop_last: bool = False, pad: bool = True) -> None:
        comm = or_world(comm)
        with same_on_all(comm, "DistributedSampler",
                         remedy="give every rank the same dataset and settings") as same:
            if not hasattr(dataset, "__len__"):
                raise ConfigError(f"rank {comm.rank}: dataset is a {type(dataset).__name__}, which "
                                  f"has no length; pass what DataLoader gets, or range(n)")
            seed = whole_number(f"rank {comm.rank}: seed", seed, 0, (1 << 31) - 1)
            same.update(length=len(dataset), shuffle=truth("shuffle", shuffle), seed=seed,
                        drop_last=truth("drop_last", drop_last), pad=truth("pad", pad))
        self._n = len(dataset)
        self._rank, self._size = comm.rank, comm.size
        self._shuffle, self._seed = shuffle, seed
        self._drop_last, self._pad = drop_last, pad
        self._epoch = 0
        # Number of samples, over all ranks, before the current position and before this iteration.
        self._position = self._start = 0
        # Whether the iteration has ended; the next iteration has all samples.
        self._over = False

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: choose its order, and start at its first sample.

        Args:
            epoch: Number of the epoch.

        Raises:
            ConfigError: The epoch is not a whole number from 0.
        """
        epoch = whole_number("epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._position, self._start, self._over = epoch, 0, 0, False

    def __len__(self) -> int:
        """Return the number of this rank's samples in the current iteration, or in the next one."""
        return len(self._positions(0 if self._over else self._start))

    def __iter__(self) -> Iterator[int]:
        if self._over:
            self._start, self._over = 0, False
        order = self._order()
        self._position = self._start
        for position in self._positions(self._start):
            self._position += self._size
            yield order[position % self._n]
        # Not reset to 0 yet, since training may lag behind. The position must be the same on all
        # ranks, which may have different numbers of samples.
        self._position, self._over = self._n, True

    def _positions(self, start: int) -> range:
        """Return the positions of this rank's samples in the epoch; positions from n on repeat."""
        left = self._n - start
        samples = left // self._size if self._drop_last else -(-left // self._size)
        stop = start + samples * self._size if self._drop_last or self._pad else self._n
        return range(start + self._rank, stop, self._size)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._n))
        generator = torch.Generator("cpu").manual_seed(self._seed << 32 ^ self._epoch)
        order: list[int] = torch.randperm(self._n, generator=generator, device="cpu").tolist()
        return order

    def state_dict(self, *, seen: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank.

        Args:
            seen: Number of samples that this rank has trained on since the iteration began. By
                default, all samples that were drawn. Pass it if `mpiring.data.prefetch`, or a
                DataLoader with workers, draws samples ahead of training.

        Raises:
            ConfigError: Fewer samples were drawn in this epoch.
        """
        position = self._position
        if seen is not None:
            position = min(self._start + whole_number("seen", seen, 0) * self._size, self._n)
            if position > self._position:
                raise ConfigError(
                    f"rank {self._rank}: seen={seen}, but fewer samples were drawn in epoch "
                    f"{self._epoch}; if prefetch has epochs, save the state of its result")
        return {"epoch": self._epoch, "position": position, "seed": self._seed,
                "length": self._n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position; the number of ranks may differ.

        Args:
            state: Result of `state_dict`.

        Raises:
            ConfigError: The state has another length or seed, or is not the state of a sampler.
        """
        refuse_other_state(state, ("epoch", "position", "seed", "length"),
                           "of a DistributedSampler")
        epoch = whole_number("epoch", state["epoch"], 0)
        position = whole_number("position", state["position"], 0, self._n)
        if (state["length"], state["seed"]) != (self._n, self._seed):
            raise ConfigError(
                f"rank {self._rank}: the state is of {state['length']} samples and seed "
                f"{state['seed']}, but this sampler has {self._n} and {self._seed}")
        self._epoch, self._over = epoch, False
        self._start = self._position = position
