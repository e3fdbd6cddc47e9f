"""Holds every algorithm x p x n x dtype x op against NumPy, on an adversarial network."""

import contract
import numpy as np
import pytest
from cluster import run

from mpiring.collectives import chain, direct, exchange, ring, shared
from mpiring.collectives.agreement import Call, agreed
from mpiring.collectives.select import choose
from mpiring.memory.arrays import chunks_of
from mpiring.memory.reduction import Reduction
from mpiring.transport.base import together
from mpiring.transport.members import Members
from mpiring.transport.simulated import SimulatedNetwork


def by_ring(net, x, op, piece_bytes=ring.PIECE_BYTES):
    """Run allreduce itself."""
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, piece_bytes), x.dtype)
    yield from ring.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size), piece_bytes)


def by_ring_halves(net, x, op, piece_bytes=ring.PIECE_BYTES):
    """Run reduce-scatter, then allgather."""
    chunks = chunks_of(x, net.size)
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, piece_bytes), x.dtype)
    mine = yield from ring.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size), piece_bytes)
    assert mine is chunks[net.rank]
    yield from ring.allgather(net, chunks, piece_bytes)


def by_pieces(net, x, op):
    """Run allreduce in several pieces per chunk, of many dtypes."""
    return by_ring(net, x, op, piece_bytes=24)


def by_members(net, x, op):
    """Run both halves in pieces, around a ring in another order."""
    order = [*range(0, net.size, 2), *range(1, net.size, 2)]
    return by_ring_halves(Members(net, order), x, op, piece_bytes=24)


def by_parts(net, x, op):
    """Run several rings at once, each on a part of the array and a lane of its own."""
    return together(by_ring(net.lane(i), part, op) for i, part in enumerate(chunks_of(x, 3)))


def by_direct(net, x, op):
    """Run allreduce itself."""
    inbox = np.empty(direct.inbox_size(x.size, net.size, x.itemsize), x.dtype)
    yield from direct.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size))


def by_direct_pieces(net, x, op):
    """Run reduce-scatter in very short pieces, then allgather."""
    limits = 8, 40
    chunks = chunks_of(x, net.size)
    inbox = np.empty(direct.inbox_size(x.size, net.size, x.itemsize, limits), x.dtype)
    mine = yield from direct.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size), limits)
    assert mine is chunks[net.rank]
    yield from ring.allgather(net, chunks)


def by_agreed_ring(net, x, op):
    """Run what the communicator runs: the header first."""
    if net.size == 1:
        return (yield from by_ring(net, x, op))
    around = (net.rank - 1) % net.size, (net.rank + 1) % net.size
    return (yield from agreed(lambda: net, None, around, Call("allreduce", op),
                              by_ring(net, x, op)))


ALGORITHMS = {
    "ring": by_ring, "ring halves": by_ring_halves, "agreed ring": by_agreed_ring,
    "ring in pieces": by_pieces, "ring of members": by_members, "rings at once": by_parts,
    "direct": by_direct, "direct pieces": by_direct_pieces}


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allreduce(algorithm, p):
    lengths = sorted({0, 1, p - 1, p, p + 1, 3 * p + 2, 129})
    for op in contract.OPS:
        for seed, dtype in enumerate(contract.OPS_OF[op]):
            # On many ranks each dtype and op meets one length, to save time.
            for n in lengths if p <= 6 else [lengths[(seed + p) % len(lengths)]]:
                xs = [contract.contribution(rank, n, dtype) for rank in range(p)]
                SimulatedNetwork(p, seed=seed).run(
                    lambda net: ALGORITHMS[algorithm](net, xs[net.rank], op))
                contract.check(xs[0], p, op)
                assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


def on_nodes(node_of, n, op, dtype, seed, *, algorithm, in_windows, desk_bytes=512):
    """Run what the communicator runs on a cluster, and return the results of all ranks."""
    def program(collectives):
        x = contract.contribution(collectives.rank, n, dtype)
        y = yield from collectives.empty((n,), dtype)
        if in_windows(collectives.rank):
            y[...], x = x, y
        yield from collectives.allreduce(x, op=op, algorithm=algorithm)
        return x

    return run(node_of, program, seed=seed, desk_bytes=desk_bytes)[0]


IN_WINDOWS = {"all": lambda rank: True, "none": lambda rank: False,
              "some": lambda rank: rank % 2 == 0}


@pytest.fixture
def small_pieces(monkeypatch):
    """Let arrays of this test's sizes take every path, in several blocks and pieces."""
    monkeypatch.setattr(shared, "EAGER_BYTES", 100)
    monkeypatch.setattr(shared, "EAGER_PRIVATE_BYTES", 300)
    monkeypatch.setattr(shared, "BLOCK_BYTES", 128)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("in_windows", IN_WINDOWS)
def test_shared_memory(p, in_windows, small_pieces):
    for n in sorted({0, 1, p + 1, 129}):
        for op in contract.OPS:
            for seed, dtype in enumerate(contract.OPS_OF[op]):
                xs = on_nodes([0] * p, n, op, dtype, seed, algorithm="auto",
                              in_windows=IN_WINDOWS[in_windows])
                contract.check(xs[0], p, op)
                assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


@pytest.mark.parametrize("node_of", [[0] * 3, [0, 0, 1, 1], [0, 1, 0, 1, 1]])
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "direct", "ring"])
def test_several_allreduces_in_one_operation(node_of, algorithm, small_pieces):
    """As in a reducer that sums two factors: the second must not overtake the first."""
    p = len(node_of)
    if algorithm == "hierarchical" and len(set(node_of)) == 1:
        algorithm = "shared"
    if algorithm == "auto" and len(set(node_of)) > 1:
        algorithm = "hierarchical"

    def program(collectives):
        # Not amid the others: it has barriers of its own.
        window = yield from collectives.empty((300,), "float32")
        for i, n in enumerate((4, 6, 100, 5, 300, 100, 8, 10, 9, 11)):
            x = window[:n]
            if collectives.rank >= i // 2 % 3:
                x = np.empty(n, "float32")
            x[...] = 100 * i + collectives.rank
            yield from collectives.allreduce(x, algorithm=algorithm)
            assert (x == p * 100 * i + p * (p - 1) / 2).all()

    for seed in range(60):
        run(node_of, program, seed=seed, desk_bytes=4096)


@pytest.mark.parametrize("node_of", [[0] * 4, [0, 0, 1, 1], [0, 1, 2], [0, 1, 0]])
def test_a_barrier_holds_anywhere_in_an_operation(node_of):
    came = []

    def program(collectives):
        for number in range(3):
            came.append(number)
            yield from collectives.barrier()
            assert came.count(number) == len(node_of)

    for seed in range(60):
        came.clear()
        run(node_of, program, seed=seed)


@pytest.mark.parametrize("p", range(1, 17))
def test_broadcast(p):
    for root in {0, p // 2, p - 1}:
        for n in (0, 1, 100):
            xs = [np.arange(n, dtype="float32") + 1000 * rank for rank in range(p)]
            SimulatedNetwork(p, seed=n).run(
                lambda net: chain.broadcast(net, xs[net.rank], root, piece_bytes=64))
            assert all(np.array_equal(x, np.arange(n) + 1000 * root) for x in xs)


def sent(source, dest, p):
    """What rank `source` has for rank `dest`: another length and content for each pair."""
    return np.arange((3 * source + dest) % (p + 2), dtype="int32") + 1000 * source + dest


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("in_flight", [1, 4])
def test_all_to_all(p, in_flight):
    inputs = [[sent(source, dest, p) for dest in range(p)] for source in range(p)]
    outputs = [[np.full_like(inputs[source][dest], -1) for source in range(p)]
               for dest in range(p)]
    SimulatedNetwork(p, seed=p).run(lambda net: exchange.all_to_all(
        net, inputs[net.rank], outputs[net.rank], in_flight))
    for dest in range(p):
        for source in range(p):
            assert np.array_equal(outputs[dest][source], sent(source, dest, p))
            assert np.array_equal(inputs[source][dest], sent(source, dest, p))


@pytest.mark.parametrize("p", range(1, 17))
def test_gather_and_scatter(p):
    for root in {0, p // 2, p - 1}:
        mine = [sent(rank, root, p) for rank in range(p)]
        parts = [np.full_like(x, -1) for x in mine]
        SimulatedNetwork(p, seed=root).run(lambda net: exchange.gather(
            net, mine[net.rank], parts if net.rank == root else (), root))
        assert all(map(np.array_equal, parts, mine))

        parts = [sent(root, rank, p) for rank in range(p)]
        mine = [np.full_like(x, -1) for x in parts]
        SimulatedNetwork(p, seed=root).run(lambda net: exchange.scatter(
            net, parts if net.rank == root else (), mine[net.rank], root))
        assert all(map(np.array_equal, mine, parts))


PLACES = {"one node": lambda rank: 0, "nodes of 2": lambda rank: rank // 2,
          "round-robin": lambda rank: rank % 3, "own nodes": lambda rank: rank}


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("place", PLACES)
def test_out_of_place(p, place):
    """As PyTorch needs them: inputs are left alone, and results go to any memory."""
    node_of = [PLACES[place](rank) for rank in range(p)]
    n, root = 5, p // 2
    cases = [(op, dtype) for op in contract.OPS for dtype in contract.OPS_OF[op][::4]]
    # On many ranks few of them, to save time.
    for seed, (op, dtype) in enumerate(cases if p <= 4 else cases[p % 8::8]):
        whole = [contract.contribution(rank, p * n, dtype) for rank in range(p)]

        def program(collectives):
            r, mine = collectives.rank, whole[collectives.rank].copy()
            chunks = [mine[k * n:][:n] for k in range(p)]
            chunks[r] = chunks[r].copy()
            yield from collectives.reduce_scatter_chunks(chunks, op=op)
            assert np.array_equal(mine, whole[r]), "an input was changed"
            gathered = [np.zeros(n, dtype) for _ in range(p)]
            gathered[r][...] = chunks[r]
            yield from collectives.allgather_chunks(gathered)
            yield from collectives.reduce(mine, root, op=op)
            assert r == root or np.array_equal(mine, whole[r]), "an input was changed"
            return np.concatenate(gathered), mine

        found = run(node_of, program, seed=seed)[0]
        for gathered, _ in found:
            contract.check(gathered, p, op)
        contract.check(found[root][1], p, op)


@pytest.mark.parametrize("p", range(1, 17))
def test_objects(p):
    texts = [np.frombuffer(b"x" * (rank * 37 % 50), np.uint8) for rank in range(p)]
    for root in {0, p // 2, p - 1}:
        found = SimulatedNetwork(p, seed=root).run(
            lambda net: chain.broadcast_bytes(net, texts[net.rank], root))
        assert all(np.array_equal(text, texts[root]) for text in found)
    for found in SimulatedNetwork(p, seed=p).run(
            lambda net: ring.allgather_bytes(net, texts[net.rank])):
        assert all(map(np.array_equal, found, texts))


@pytest.mark.parametrize("p", range(1, 17))
def test_nobody_leaves_a_barrier_before_the_last_has_come(p):
    came = []

    def program(net):
        came.append(net.rank)
        yield from chain.barrier(net)
        assert len(came) == p

    for seed in range(20):
        came.clear()
        SimulatedNetwork(p, seed=seed).run(program)


def test_ten_thousand_adversarial_deliveries():
    """All schedules at once, at random sizes, under 10,000 different networks."""
    for seed in range(10_000):
        random = np.random.default_rng(seed)
        p, n = int(random.integers(2, 6)), int(random.integers(0, 40))
        root, op = int(random.integers(p)), list(contract.OPS)[seed % 5]
        xs = [contract.contribution(rank, n, "float32") for rank in range(p)]
        zs = [contract.contribution(rank, n, "int16") for rank in range(p)]
        vs = [contract.contribution(rank, n, "int32") for rank in range(p)]
        hs = [contract.contribution(rank, n, "float16") for rank in range(p)]
        ys = [np.full(n, rank) for rank in range(p)]
        texts = [np.full(rank * n % 7, rank, np.uint8) for rank in range(p)]
        rows = [[sent(rank, dest, p) for dest in range(p)] for rank in range(p)]
        columns = [[np.empty_like(row[rank]) for row in rows] for rank in range(p)]
        found = SimulatedNetwork(p, seed=seed, ranks_per_node=1 + seed % 3).run(
            lambda net: by_agreed_ring(net, xs[net.rank], op),
            lambda net: by_members(net, zs[net.rank], "sum"),
            lambda net: by_pieces(net, vs[net.rank], "sum"),
            lambda net: by_direct_pieces(net, hs[net.rank], op),
            lambda net: chain.broadcast(net, ys[net.rank], root, piece_bytes=32),
            lambda net: exchange.all_to_all(net, rows[net.rank], columns[net.rank], 1 + seed % 3),
            lambda net: chain.broadcast_bytes(net, texts[net.rank], root),
            lambda net: ring.allgather_bytes(net, texts[net.rank]),
            lambda net: chain.barrier(net))
        contract.check(xs[0], p, op)
        contract.check(zs[0], p, "sum")
        contract.check(vs[0], p, "sum")
        contract.check(hs[0], p, op)
        for results in (xs, zs, vs, hs):
            assert all(x.tobytes() == results[0].tobytes() for x in results)
        assert all((y == root).all() for y in ys)
        for rank, column in enumerate(columns):
            assert all(np.array_equal(x, row[rank]) for x, row in zip(column, rows))
        for *_, text, gathered, _ in found:
            assert np.array_equal(text, texts[root])
            assert all(map(np.array_equal, gathered, texts))
