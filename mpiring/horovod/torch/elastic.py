"""Horovod's elastic training: if ranks die, the others return to the last commit and continue.

`run`, `TorchState` and `ElasticSampler`, for `import mpiring.horovod.torch as hvd`.
"""

import copy
import functools
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from ... import elastic
from ...torch import broadcast_optimizer_state, broadcast_parameters
from ..requests import HorovodInternalError, HostsUpdatedInterrupt
from ..world import abandon, begin, global_process_set, is_initialized, rank, size, world

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "TorchState", "run"]

T = TypeVar("T")


class _Survivors(elastic.State):
    """The surviving ranks; a TorchState keeps the state from which training continues."""

    _resume_point = "the last commit"


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls `func(state, ...)`, and calls it again when ranks die.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                ...
                state.commit()

    Before each call, `state.sync()` copies the state of rank 0 to all ranks. If ranks die, the
    others get new numbers, return to the last `state.commit()` or `state.save()` of the new rank 0,
    and call the reset callbacks. All process sets except the global one end. `func` or a reset
    callback must add them again, with the new numbers.

    This needs Open MPI's `mpirun --with-ft ulfm`. Otherwise `func` is called once, and the death of
    a rank ends the job. Exceptions that were not caused by a death are raised, including
    HorovodInternalError.

    Args:
        func: Function of a `TorchState` and other arguments. It must query ranks and sizes
            itself, because they change after a death.

    Collective: yes, the returned function. Blocking: yes.
    """
    @functools.wraps(func)
    def wrapper(state: "TorchState", *args: Any, **kwargs: Any) -> T:
        def train(ranks: elastic.State) -> T:
            # If the world has other ranks than the survivors, ranks have died.
            if not is_initialized() or world().comm is not ranks.comm:
                abandon()
                begin(ranks.comm.survivors().comm, comm=ranks.comm)
                state.restore()
                state.on_reset()
            skip_sync = False
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                state.on_reset()

        return elastic.run(train, _Survivors(world().comm))

    return wrapper


class ElasticSampler(Sampler[int]):
    """Sampler that divides the rest of an epoch among the remaining ranks.

    Pass it to `TorchState`, call `record_batch` after each batch, and call `set_epoch` at the end
    of each epoch, not at its beginning.

    Args:
        dataset: Dataset; only its length is used.
        shuffle: If true, each epoch has a different order.
        seed: Seed of the orders, the same on all ranks.

    Attributes:
        epoch: Number of the epoch.
        processed_num: Number of samples of this epoch that all ranks together have processed.
        num_replicas, rank: Number of ranks and this rank's number at the last reset.
        remaining_indices: Indices that had not been processed at the last reset.
        num_samples, total_size: Number of indices for each rank, and for all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin with all samples of another epoch.

        Args:
            epoch: Number of the epoch, which determines the order.
        """
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch on each rank as processed; this does not affect the iteration.

        Args:
            batch_idx: Number of the batch; ignored.
            batch_size: Number of samples of the batch on each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the position of another sampler, with any number of ranks.

        Args:
            state_dict: Result of `state_dict` of the other sampler.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num:]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # All ranks get the same number, so the first indices are repeated.
        self.indices = list(itertools.islice(itertools.cycle(self.remaining_indices), self.rank,
                                             self.total_size, self.num_replicas))
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TorchState:
    """State of training that `run` synchronizes and restores: every argument is an attribute.

    If an object has a `state_dict()`, as modules, optimizers, schedulers and an `ElasticSampler`
    do, it is saved. Other objects are pickled.

    Args:
        model: Module.
        optimizer: Optimizer.
        kwargs: Further attributes, in the same order on all ranks.
    """

    _handled: Sequence[str] = ()

    def __init__(self, model: torch.nn.Module | None = None,
                 optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        vars(self).update(values)
        # Including schedulers: an unpickled one would change the settings of another optimizer.
        self._handled = [name for name, value in values.items()
                         if hasattr(value, "state_dict") and hasattr(value, "load_state_dict")]
        self._others = [name for name in values if name not in self._handled]
        self._reset_callbacks: list[Callable[[], Any]] = []
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # The saved state belongs to the previous object.
        if name in self._handled:
            self._states[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Copy all attributes in memory; a rank may also call it alone."""
        objects = pickle.dumps({name: getattr(self, name) for name in self._others})
        self._states, self._objects = {name: copy.deepcopy(getattr(self, name).state_dict())
                                       for name in self._handled}, objects

    def restore(self) -> None:
        """Return to the last saved state, and drop gradients."""
        for name, state in self._states.items():
            value = getattr(self, name)
            # A copy, because an optimizer writes into the state that it loads.
            value.load_state_dict(copy.deepcopy(state))
            if hasattr(value, "zero_grad"):
                value.zero_grad()
        vars(self).update(pickle.loads(self._objects))

    def sync(self) -> None:
        """Copy all attributes of rank 0 to all ranks, and save them.

        Collective: yes. Blocking: yes.
        """
        comm = global_process_set.arrive("sync")
        for value in (getattr(self, name) for name in self._handled):
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict().values(), comm)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, comm)
            else:
                value.load_state_dict(comm.broadcast_object(value.state_dict()))
        vars(self).update(comm.broadcast_object(
            {name: getattr(self, name) for name in self._others}))
        # After all copies: if a rank dies, the saved attributes are still consistent.
        self.save()

    def commit(self) -> None:
        """Save, and check whether hosts were added or removed."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: no ranks are added to a job, and any operation detects a death."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions to call after a death, when the last commit is restored.

        A callback can, for example, scale the learning rate by the new number of ranks.

        Args:
            callbacks: Functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing; derived classes may override it, to act after a death and before `sync`."""
