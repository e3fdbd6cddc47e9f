"""Tests that prefetching over epochs yields each epoch's batches once, and resumes anywhere."""

import contextlib
import json
import multiprocessing
import os
import threading

import numpy as np
import pytest
import simulated_gpu
from drawn_batches import LENGTHS, Comm
from launching import SOON_S, needed, until

from mpiring import ClosedError, ConfigError
from mpiring.data import TokenBatches, prefetch

EPOCHS = range(3)
# PyTorch's own, where a process with threads forks.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Shuffled:
    """Batches, or a sampler, of an epoch; a running iteration would notice the next epoch."""

    def __init__(self, count=7):
        self.count, self.epoch, self.set = count, -1, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.set.append(epoch)

    def __iter__(self):
        for i in range(self.count):
            yield 100 * self.epoch + i

    def __len__(self):
        return self.count


class Endless(Shuffled):
    def __iter__(self):
        i = -1
        while True:
            yield 100 * self.epoch + (i := i + 1)


class Plain:
    """Hides all but the batches of a loader, as the class of a user does."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def fetchers():
    return [thread for thread in threading.enumerate() if thread.name == "mpiring prefetch"]


def as_it_is(samples):
    return samples


def data_loader(**options):
    """Return a DataLoader of PyTorch; `sampler` and `batch_sampler` are functions that make it."""
    torch = needed("torch")
    made = {name: options.pop(name)() for name in ("sampler", "batch_sampler") if name in options}
    return torch.utils.data.DataLoader(
        range(1000), collate_fn=as_it_is, generator=torch.Generator().manual_seed(1),
        multiprocessing_context="fork" if options.get("num_workers") else None, **options, **made)


def token_batches(rank=0, size=1):
    return TokenBatches(LENGTHS[:60], Comm(rank, size), tokens=1500)


def sampler(rank=0, size=1, **options):
    return needed("mpiring.torch").DistributedSampler(range(41), Comm(rank, size), **options)


def in_batches(**options):
    return needed("torch.utils.data").BatchSampler(sampler(**options), 4, False)


def pytorchs_sampler():
    return needed("torch.utils.data.distributed").DistributedSampler(range(30), 2, 1)


def changing_dataset(**options):
    class Dataset(Shuffled):
        def __getitem__(self, i):
            return 100 * self.epoch + i

    return needed("torch.utils.data").DataLoader(Dataset(), 2, **options)


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]
LOADERS = {
    "list": lambda: [[1, 2], [3], [4, 5]],
    "empty": list,
    "set_epoch": Shuffled,
    "hidden": lambda: Plain([1, 2, 3]),
    "TokenBatches": token_batches,
    "dataset": changing_dataset,
    "dataset in workers": lambda: changing_dataset(num_workers=1),
    "IterableDataset": lambda: needed("torch.utils.data").DataLoader(
        type("Stream", (needed("torch.utils.data").IterableDataset,), {
            "__iter__": lambda self: iter(range(9))})(), 2, collate_fn=as_it_is),
    **{f"DataLoader, {name}, {workers}": lambda options=options, workers=workers: data_loader(
        **options, **workers) for workers in WORKERS for name, options in {
            "shuffled": {"shuffle": True, "batch_size": 300},
            "sampler": {"sampler": lambda: Shuffled(20), "batch_size": 3},
            "without batches": {"sampler": lambda: Shuffled(3), "batch_size": None},
            "PyTorch's sampler": {"sampler": pytorchs_sampler, "batch_size": 4},
            "mpiring's sampler": {"sampler": sampler, "batch_size": 4},
            "BatchSampler": {"batch_sampler": in_batches},
            "TokenBatches": {"batch_sampler": token_batches}}.items()},
}


def one_after_the_other(loader, epochs=EPOCHS):
    """Return the batches of each epoch without prefetching."""
    drawn = []
    for epoch in epochs:
        chosen_by = [getattr(loader, name, None) for name in ("dataset", "sampler")]
        batches = getattr(loader, "batch_sampler", None)
        for part in (*chosen_by, batches, getattr(batches, "sampler", None), loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        drawn.append([as_list(batch) for batch in loader])
    return drawn


def as_list(batch):
    return batch.tolist() if hasattr(batch, "tolist") else batch


@pytest.mark.parametrize("name, depth", [
    (name, depth) for name in LOADERS for depth in ([2] if "workers" in name else [1, 4])])
def test_the_batches_are_the_same_as_without(name, depth):
    wanted = one_after_the_other(LOADERS[name]())
    fetched, drawn = prefetch(LOADERS[name](), depth=depth, epochs=EPOCHS), [[], [], []]
    for batch in fetched:
        drawn[fetched.epoch].append(as_list(batch))
    assert drawn == wanted and not fetchers()
    fetched = prefetch(LOADERS[name](), depth=depth, epochs=EPOCHS)
    assert [(epoch, [as_list(batch) for batch in batches])
            for epoch, batches in fetched.by_epoch()] == [*enumerate(wanted)]
    assert not fetchers()
    del fetched
    until(lambda: not multiprocessing.active_children())


def test_on_a_gpu_they_are_also_the_same(monkeypatch):
    simulated_gpu.installed(monkeypatch)
    wanted = [np.full(1000 + i, i) for i in range(9)]
    copies = [x.get() for x in prefetch(wanted, "cuda", epochs=EPOCHS)]
    assert len(copies) == 27
    assert all(np.array_equal(x, wanted[i % 9]) for i, x in enumerate(copies))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_next_epoch_begins_behind_the_last_steps(depth):
    begun = [threading.Event() for _ in EPOCHS]

    class Loader(Shuffled):
        def __iter__(self):
            begun[self.epoch].set()
            return super().__iter__()

    for number in prefetch(Loader(9), depth=depth, epochs=EPOCHS):
        epoch, i = divmod(number, 100)
        if epoch + 1 in EPOCHS and i == 9 - depth:
            # No batch is requested meanwhile.
            assert begun[epoch + 1].wait(SOON_S)
        assert not any(event.is_set() for event in begun[epoch + (2 if i >= 9 - depth else 1):])


def test_each_epoch_is_set_once_and_at_each_iteration():
    loader = Shuffled()
    fetched = prefetch(loader, epochs=range(4, 8, 2))
    assert fetched.epoch is None
    for _ in range(2):
        assert list(fetched) == [*range(400, 407), *range(600, 607)] and fetched.epoch == 6
    assert loader.set == [4, 6, 4, 6]
    assert list(prefetch(loader, epochs=range(0))) == []
    loader.set.clear()
    assert list(prefetch(loader)) and not loader.set, "not without epochs"


def test_a_function_gets_each_epoch():
    def batches(epoch):
        yield from range(10 * epoch, 10 * epoch + 3)

    assert list(prefetch(batches, epochs=range(1, 3))) == [10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize("where", ["set_epoch", "begin", "first", "last"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_an_error_of_the_next_epoch_is_raised_there(where, in_turn):
    class Broken(Shuffled):
        def fail(self, at):
            if at == where and self.epoch == 1:
                raise OSError(f"the disk is gone in epoch {self.epoch}")

        def set_epoch(self, epoch):
            super().set_epoch(epoch)
            self.fail("set_epoch")

        def __iter__(self):
            self.fail("begin")
            return self.batches()

        def batches(self):
            self.fail("first")
            yield from super().__iter__()
            self.fail("last")

    fetched, drawn, failed = prefetch(Broken(), depth=20, epochs=EPOCHS), [], []
    if in_turn:
        for epoch, batches in fetched.by_epoch():
            try:
                drawn += batches
            except OSError:
                failed.append(epoch)
        assert failed == [1]
    else:
        with pytest.raises(OSError, match="gone in epoch 1"):
            drawn.extend(fetched)
    ended = [*range(7), *(range(100, 107) if where == "last" else ())]
    assert drawn == ended + in_turn * [*range(200, 207)] and not fetchers()


@pytest.mark.parametrize("workers, stop", [
    *((None, stop) for stop in (0, 2, 3, 5)), *((workers, 2) for workers in WORKERS)], ids=str)
def test_the_loop_can_be_left_anywhere(workers, stop):
    loader = Shuffled(4) if workers is None else data_loader(
        sampler=lambda: Shuffled(4), batch_size=1, **workers)
    fetched = prefetch(loader, epochs=EPOCHS)
    wanted = [number for epoch in one_after_the_other(loader) for number in epoch]
    for number, batch in enumerate(fetched):
        if number == stop:
            break
    assert not fetchers() and batch == wanted[stop]
    with contextlib.suppress(ZeroDivisionError):
        for number, batch in enumerate(fetched):
            if number == stop:
                1 / 0
    assert batch == wanted[stop]
    until(lambda: not fetchers())
    assert list(fetched) == wanted
    del loader, fetched
    until(lambda: not multiprocessing.active_children())


def test_an_epoch_can_be_left_before_its_end():
    fetched, drawn = prefetch(Endless(), epochs=EPOCHS), []
    for epoch, batches in fetched.by_epoch():
        drawn += [batch for _, batch in zip(range(2 * epoch), batches)]
        assert fetched.epoch == (epoch or None) and len(fetchers()) == 1
    assert drawn == [100, 101, 200, 201, 202, 203] and not list(batches) and not fetchers()


def test_batches_of_a_lost_iteration_raise():
    _, batches = next(prefetch(Endless(), epochs=EPOCHS).by_epoch())
    with pytest.raises(ClosedError, match="keep by_epoch"):
        list(batches)
    assert not fetchers()


def test_a_fork_waits_until_the_program_holds_no_lock():
    """A worker inherits locks; that of PyTorch's random numbers would stop it forever."""
    lock, inherited = threading.Lock(), []

    def fork():
        child = os.fork()
        if not child:
            os._exit(lock.locked())
        inherited.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    class Forking(Shuffled):
        def __iter__(self):
            fork()
            fork()
            return self.batches()

        def batches(self):
            for number in super().__iter__():
                if number % 3 == 0:
                    fork()
                yield number

    fetched, drawn = prefetch(Forking(), epochs=EPOCHS), []
    for number in fetched:
        with lock:
            drawn.append(number)
            # Long enough for a fork that does not wait.
            threading.Event().wait(0.002)
    assert drawn == [100 * epoch + i for epoch in EPOCHS for i in range(7)]
    assert len(inherited) >= 9 and not any(inherited) and not fetchers()


def test_workers_start_while_the_program_draws_random_numbers():
    torch = needed("torch")
    drawn = []
    for batch in prefetch(data_loader(num_workers=2, sampler=lambda: Shuffled(6), batch_size=2),
                          epochs=EPOCHS):
        drawn += batch
        torch.randn(300_000)
    assert drawn == [100 * epoch + i for epoch in EPOCHS for i in range(6)]


# Loaders with a state, for a rank of a number of ranks.
STATEFUL = {
    "TokenBatches": token_batches,
    **{f"{name}, {workers}": lambda rank, size, options=options, workers=workers: data_loader(
        **{key: (lambda value=value: value(rank, size)) if callable(value) else value
           for key, value in options.items()}, **workers)
       for workers in WORKERS[::2] for name, options in {
           "TokenBatches": {"batch_sampler": token_batches},
           "sampler": {"sampler": sampler, "batch_size": 2},
           "BatchSampler": {"batch_sampler": lambda rank, size: in_batches(rank=rank, size=size)},
           "samples": {"sampler": sampler, "batch_size": None}}.items()}}


def fetched_on(size, name, state=None):
    """Return what each rank prefetches."""
    ranks = [prefetch(STATEFUL[name](rank, size), epochs=EPOCHS) for rank in range(size)]
    for fetched in ranks:
        if state is not None:
            fetched.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def samples_of(ranks, steps=10**9):
    """Return the samples of each epoch that all ranks draw in some steps."""
    drawn = {epoch: [] for epoch in EPOCHS}
    for fetched in ranks:
        for step, batch in enumerate(fetched, 1):
            drawn[fetched.epoch] += [batch] if isinstance(batch, int) else batch
            if step == steps:
                break
    return drawn


@pytest.mark.parametrize("name", STATEFUL)
def test_a_stopped_training_resumes_on_other_ranks_with_each_sample_once(name):
    wanted = samples_of(fetched_on(1, name))
    steps = len(STATEFUL[name](0, 2))
    # Near the end of epoch 0 or at it, when the thread is in epoch 1; and in epoch 1.
    for stop in (steps - 1, steps, steps + 2):
        ranks = fetched_on(2, name)
        before = samples_of(ranks, stop)
        states = [fetched.state_dict() for fetched in ranks]
        assert states[0] == states[1] and states[0]["epoch"] == (stop > steps)
        after = samples_of(fetched_on(1, name, states[0]))
        for epoch in EPOCHS:
            # Two ranks repeat a sample of 41 that one rank does not.
            assert set(before[epoch] + after[epoch]) == set(wanted[epoch])
            assert len(before[epoch] + after[epoch]) - len(wanted[epoch]) in (0, 1)


class Numbers:
    """A loader whose state has its epoch, and that has no set_epoch."""

    def __init__(self):
        self.epoch, self.drawn = 0, 0

    def __iter__(self):
        while self.drawn < 5:
            self.drawn += 1
            yield 10 * self.epoch + self.drawn
        self.epoch, self.drawn = self.epoch + 1, 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("loader", [Numbers, token_batches])
def test_epochs_that_were_complete_are_not_repeated(loader):
    """Not even without batches: the program may have saved after its work between epochs."""
    wanted = [*enumerate(one_after_the_other(loader()))]
    fetched = prefetch(loader(), depth=9, epochs=EPOCHS)
    states = [fetched.state_dict()]
    assert states[0]["epoch"] is None
    for _, batches in fetched.by_epoch():
        states.append(fetched.state_dict())
        for batch in batches:
            states.append(fetched.state_dict())
        states.append(fetched.state_dict())
    seen = [0, 0, *range(1, len(wanted[0][1]) + 1)]
    for state, done in zip(states, seen):
        resumed = prefetch(loader(), epochs=EPOCHS)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert [(epoch, [*batches]) for epoch, batches in resumed.by_epoch()] == [
            (0, wanted[0][1][done:]), *wanted[1:]]
    for state in states[len(seen):len(seen) + 2]:
        resumed.load_state_dict(state)
        assert [(epoch, [*batches]) for epoch, batches in resumed.by_epoch()] == wanted[1:]
    resumed.load_state_dict(states[-1])
    assert not list(resumed) and resumed.epoch == 2


def test_without_epochs_a_data_loader_also_has_a_state():
    fetched = prefetch(data_loader(sampler=sampler, batch_size=4), depth=5)
    drawn = [batch for _, batch in zip(range(3), fetched)]
    state = fetched.state_dict()
    assert state["position"] == 12
    other = sampler()
    other.load_state_dict(state)
    assert sum(drawn, []) + list(other) == list(sampler())


def test_what_cannot_be_resumed_is_told():
    torch = needed("torch")

    class Skipping(torch.utils.data.DataLoader):
        def __iter__(self):
            return iter([*super().__iter__()][::2])

    class Sorted(torch.utils.data.BatchSampler):
        pass

    for loader in (
            [1], Skipping(range(41), sampler=sampler()),
            data_loader(batch_sampler=lambda: Sorted(sampler(), 2, False)), data_loader(),
            data_loader(sampler=sampler, num_workers=1, in_order=False)):
        with pytest.raises(ConfigError, match="has no state_dict"):
            prefetch(loader, epochs=EPOCHS).state_dict()
    fetched = prefetch(token_batches(), epochs=EPOCHS)
    with pytest.raises(ConfigError, match="the state of prefetch with epochs lacks over, loader"):
        fetched.load_state_dict(token_batches().state_dict())
    state = {**fetched.state_dict(), "epoch": 3}
    with pytest.raises(ConfigError, match=r"of epoch 3, which is not among epochs=range\(0, 3\)"):
        fetched.load_state_dict(state)


def test_a_sampler_that_is_ahead_refuses_the_position_of_an_earlier_epoch():
    source = sampler()
    iteration = iter(prefetch(data_loader(sampler=lambda: source, batch_size=4), epochs=EPOCHS))
    for _ in range(11):
        next(iteration)
    until(lambda: source.epoch == 1)
    with pytest.raises(ConfigError, match="fewer samples were drawn in epoch 1"):
        source.state_dict(seen=41)
    iteration.close()


def test_wrong_epochs_are_told():
    for epochs in (3, [0, 1], range(-1, 2), range(2, -2, -1), "3"):
        with pytest.raises(ConfigError, match="epochs=.*expected a range from 0"):
            prefetch([1], epochs=epochs)
    for loader in (iter([1]), (number for number in [1]), map(abs, [1])):
        with pytest.raises(ConfigError, match="is an iterator, which has a single epoch"):
            prefetch(loader, epochs=EPOCHS)
    with pytest.raises(TypeError, match=r"len\(loader\) is that of one epoch"):
        len(prefetch([1], epochs=EPOCHS))
    assert list(prefetch([1, 2])) == [1, 2]
