"""Tests that replicas which differ are found, named, and stopped or mended, on real MPI."""

import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import ReplicaError
from mpiring.memory.digest import digest
from mpiring.numpy import DataParallel, LossScaler, MasterWeights
from mpiring.training import replicas

pytestmark = pytest.mark.mpi

RATE, EVERY = np.float32(0.1), 3


@pytest.fixture(scope="module", params=["stop", "restore"])
def checked(request):
    """A communicator of which each rank is a node, so that all bytes are counted."""
    config = mpiring.Config(digest_steps=EVERY, digest_action=request.param, shared_memory=False,
                            tuning=False)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
        yield communicator


class Run:
    """A model with momentum, in 16 bits and 32."""

    def __init__(self, comm):
        dice = np.random.default_rng(comm.rank)
        self.params = {"w": dice.random((30, 4)).astype(np.float16),
                       "b": dice.random(4).astype(np.float32), "s": np.zeros((), np.float64)}
        self.comm, self.dp = comm, DataParallel(self.params, comm)
        self.masters = MasterWeights(self.dp)
        self.velocity = {name: np.zeros_like(x) for name, x in self.masters.items()}
        self.clock = {"steps": 0, "rates": (0.1, [0.5])}
        self.dp.watch(masters=self.masters, velocity=self.velocity, clock=self.clock)

    def step(self, before_wait=lambda: None):
        number = self.dp.steps
        for name, grad in self.dp.grads.items():
            grad[...] = np.random.default_rng([number, self.comm.rank]).random(grad.shape)
            self.dp.ready(name)
        before_wait()
        self.dp.wait()
        for name, master in self.masters.items():
            self.velocity[name] *= np.float32(0.9)
            self.velocity[name] += self.dp.grads[name].astype(master.dtype)
            master -= RATE * self.velocity[name]
        self.masters.round_off()
        self.clock["steps"] += 1

    def bits(self):
        return b"".join(x.tobytes() for tree in (self.params, self.masters, self.velocity)
                        for x in tree.values()) + repr(self.clock).encode()


def flip(x, bit):
    """Flip one bit of an array, in place, as failing memory does."""
    x.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8


def test_one_check_costs_sixteen_bytes(checked):
    pair = checked.split(None if checked.rank > 1 else 0)
    if pair is None:
        return
    run, costs = Run(pair), []
    # The first time, ranks also agree on a hash.
    run.dp.compare_replicas()
    # What every operation sends besides, to find out that all ranks make the same call.
    before = pair.statistics.bytes_sent
    pair.barrier()
    call = pair.statistics.bytes_sent - before
    for _ in range(2 * EVERY):
        before = pair.statistics
        run.step()
        cost = pair.statistics - before
        costs.append((cost.operations, cost.bytes_sent))
    (operations, nbytes), check = costs[1], (1, call + 16) if pair.size == 2 else (0, 0)
    for number in range(1, 2 * EVERY):
        more = check if (number + 1) % EVERY == 0 else (0, 0)
        assert costs[number] == (operations + more[0], nbytes + more[1])
    pair.close()


SPOTS = {"w": lambda run: run.params["w"], "b": lambda run: run.params["b"],
         "s": lambda run: run.params["s"], "masters['w']": lambda run: run.masters["w"],
         "velocity['b']": lambda run: run.velocity["b"]}


@pytest.mark.parametrize("name", SPOTS)
def test_a_flipped_bit_is_found_at_the_next_check(checked, caplog, name):
    dice = np.random.default_rng(list(name.encode()))    # the same on all ranks
    odd, step = dice.integers(checked.size), EVERY - 1 - list(SPOTS).index(name) % 2
    run, undisturbed = Run(checked), Run(checked)
    bit = dice.integers(8 * SPOTS[name](run).nbytes)
    caught = None
    for number in range(EVERY):
        def spoil():
            if checked.rank == odd and number == step:
                flip(SPOTS[name](run), bit)

        try:
            run.step(spoil)
        except ReplicaError as error:
            caught = str(error)
            assert number == EVERY - 1
        if caught is None:
            undisturbed.step()
    if checked.size == 1:
        assert caught is None and not caplog.records
    elif checked.size == 2:
        # Nobody knows which of two is right, and both are told.
        assert "ranks 0 on " in caught and "without a majority" in caught and name in caught
    elif checked.config.digest_action == "stop":
        assert caught.startswith(f"rank {checked.rank}: after {EVERY} steps, rank {odd} on ")
        assert name in caught
    else:
        assert caught is None
        assert len(set(checked.allgather_object(run.bits()))) == 1, "not mended"
        # A flip right before the check leaves no trace: gradients were computed without it.
        assert step < EVERY - 1 or run.bits() == undisturbed.bits()
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == (checked.rank == 0)
        if logged:
            assert f"rank {odd} on " in logged[0] and name in logged[0]


def test_numbers_in_what_is_watched_count_too(checked):
    run = Run(checked)
    run.clock["steps"] += checked.rank == checked.size - 1 > 1
    if checked.size > 2 and checked.config.digest_action == "stop":
        with pytest.raises(ReplicaError, match=r"in clock\['steps'\]\."):
            run.dp.compare_replicas()
    else:
        run.dp.compare_replicas()
        assert run.clock == {"steps": 0, "rates": (0.1, [0.5])}


def test_each_part_has_its_own_majority(checked):
    if checked.size < 3:
        return
    run = Run(checked)
    before = run.bits()
    for rank, name in enumerate(["b", "w", "velocity['b']"]):
        if checked.rank == rank:
            flip(SPOTS[name](run), 3)
    if checked.config.digest_action == "stop":
        with pytest.raises(ReplicaError, match=(
                r"rank 0 on \S+ differs from ranks 1, 2.* in b; rank 2 on .* in velocity\['b'\]; "
                r"rank 1 on .* in w\.")):
            run.dp.compare_replicas()
    else:
        run.dp.compare_replicas()
        assert run.bits() == before


def test_what_only_some_ranks_have_does_not_count(checked):
    run = Run(checked)
    if checked.rank == 0:
        run.dp.watch(own=np.ones(3))
    run.dp.compare_replicas()
    # Bits, not values.
    run.params["b"][0] = np.nan
    run.params["s"][...] = -0.0 if checked.rank == 0 and checked.size == 2 else 0.0
    if checked.size == 2:
        with pytest.raises(ReplicaError, match="without a majority, in s"):
            run.dp.compare_replicas()
    else:
        run.dp.compare_replicas()


def test_arrays_of_any_kind_are_restored(checked):
    if checked.size < 3 or checked.config.digest_action == "stop":
        return
    arrays = {"turned": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
              "strided": np.arange(20, dtype=np.int16)[::2], "empty": np.zeros((0, 3)),
              "flag": np.array(True), "long": np.array([1, 2], np.longdouble),
              "record": np.zeros(2, [("a", np.int8), ("b", np.float32)])}
    run = Run(checked)
    run.dp.watch(arrays=list(arrays.values()))
    kept = [x.copy() for x in arrays.values()]
    if checked.rank == 1:
        for x in arrays.values():
            x[...] = np.zeros((), x.dtype) if x.dtype.names is None else (1, 2)
    run.dp.compare_replicas()
    for x, before in zip(arrays.values(), kept):
        assert (x == before).all()


def test_what_cannot_be_watched_is_refused(checked):
    run = Run(checked)
    for wrong in (3, "text", LossScaler(run.dp)):
        with pytest.raises(mpiring.ConfigError, match=r"watch\(x=...\) is a .*; pass an array"):
            run.dp.watch(x=wrong)
    with pytest.raises(mpiring.ConfigError, match="Python objects"):
        run.dp.watch(x={"y": np.array([None])})


def test_a_model_is_freed_at_once(checked):
    dp = DataParallel({"w": np.zeros(3)}, checked)
    dp.watch(velocity=np.zeros(3))
    dp.compare_replicas()
    reference = weakref.ref(dp)
    del dp
    assert reference() is None


@pytest.mark.parametrize("all_have", [False, True])
def test_a_rank_without_xxhash_compares_equal_bits(checked, monkeypatch, all_have):
    used = []
    monkeypatch.setattr(replicas, "has_xxh3", lambda: all_have or checked.rank > 0)
    monkeypatch.setattr(replicas, "digest", lambda pieces, fast=False: used.append(fast) or digest(
        pieces, fast=fast))
    dp = DataParallel({"w": np.arange(3.0)}, checked)
    dp.compare_replicas()
    assert checked.size == 1 or used == [all_have, False]


def test_never(comm):
    """With digest_steps=0; and by default, not before the thousandth step."""
    for config in (mpiring.Config(digest_steps=0, tuning=False), comm.config):
        with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
            params = {"w": np.zeros(3)}
            dp = DataParallel(params, communicator)
            params["w"] += communicator.rank
            for _ in range(5):
                dp.ready("w")
                dp.wait()
