"""Holds every algorithm x p x n x dtype x op against NumPy, on an adversarial network."""

import re

import contract
import numpy as np
import pytest
from cluster import run
from schedules import ALGORITHMS, sent

from mpiring import BufferMismatchError
from mpiring.collectives import chain, exchange
from mpiring.collectives.operation import Tuning
from mpiring.memory import reduction
from mpiring.operations.agreement import Call
from mpiring.operations.algorithms import TABLE, Case
from mpiring.simulated.network import SimulatedNetwork

SIZES = *range(1, 9), 13
NODES = {"p=1": [0], "p=2": [0, 1], "p=3": [0, 1, 2], "p=5": [0, 1, 2, 3, 4], "p=8": range(8),
         "one node": [0] * 4, "2 x 2": [0, 0, 1, 1], "round-robin": [0, 1, 0, 1, 0, 1],
         "uneven": [0, 0, 0, 1, 2, 2, 2]}
# Arrays of this test's sizes take every path.
SMALL = Tuning(eager_bytes=300, moved_bytes=75, short_bytes=200)


# Lengths by the number of ranks.
LENGTHS = (lambda p: 0, lambda p: 1, lambda p: p - 1, lambda p: p, lambda p: p + 1,
           lambda p: 3 * p + 2, lambda p: 129)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_allreduce(algorithm):
    for seed, (op, dtype, p, length) in enumerate(contract.cases(SIZES, LENGTHS)):
        xs = [contract.contribution(rank, length(p), dtype) for rank in range(p)]
        SimulatedNetwork(p, seed=seed).run(
            lambda net: ALGORITHMS[algorithm](net, xs[net.rank], op))
        contract.check(xs[0], p, op)
        assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


def on_nodes(node_of, n, op, dtype, seed, *, algorithm, in_windows, slot_bytes=512):
    """Run what the communicator runs on a cluster, and return the results of all ranks."""
    def program(collectives):
        x = contract.contribution(collectives.rank, n, dtype)
        y = yield from collectives.empty((n,), dtype)
        if in_windows(collectives.rank):
            y[...], x = x, y
        yield from collectives.allreduce(x, op=op, algorithm=algorithm)
        return x

    return run(node_of, program, seed=seed, slot_bytes=slot_bytes, tuning=SMALL)[0]


IN_WINDOWS = {"all": lambda rank: True, "none": lambda rank: False,
              "some": lambda rank: rank % 2 == 0}


@pytest.fixture
def small_blocks(monkeypatch):
    """Let arrays of this test's sizes be combined in several blocks."""
    monkeypatch.setattr(reduction, "BLOCK_BYTES", 128)


@pytest.mark.parametrize("in_windows", IN_WINDOWS)
def test_shared_memory(in_windows, small_blocks):
    for seed, (op, dtype, p, length) in enumerate(contract.cases(SIZES, LENGTHS)):
        xs = on_nodes([0] * p, length(p), op, dtype, seed, algorithm="auto",
                      in_windows=IN_WINDOWS[in_windows])
        contract.check(xs[0], p, op)
        assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


def able(row, node_of):
    """Return whether a row of the table can run on a cluster without MPI."""
    case = Case(0, np.dtype("float32"), "sum", len(node_of), len(set(node_of)), SMALL)
    return row.name != "native" and not row.refusal(case)


@pytest.mark.parametrize(("algorithm", "node_of"), [
    pytest.param(row.name, node_of, id=f"{row.name}-{name}")
    for row in TABLE for name, node_of in NODES.items() if able(row, node_of)])
def test_every_row_of_the_table(algorithm, node_of, small_blocks):
    """As the communicator runs them: agreement, the short variants, memory of any kind."""
    p = len(node_of)
    for seed, (op, dtype, n, in_windows) in enumerate(contract.cases(
            (0, 1, p + 1, 60, 257), tuple(IN_WINDOWS.values()))):
        xs = on_nodes(node_of, n, op, dtype, seed, algorithm=algorithm, slot_bytes=2048,
                      in_windows=in_windows)
        contract.check(xs[0], p, op)
        assert all(x.tobytes() == xs[0].tobytes() for x in xs), "bits differ"


KINDS = {"usual": (40, "float32", "sum"), "shorter": (39, "float32", "sum"),
         "empty": (0, "float32", "sum"), "other dtype": (40, "int32", "sum"),
         "other op": (40, "float32", "max")}


@pytest.mark.parametrize(("algorithm", "node_of"), [
    pytest.param(row.name, node_of, id=f"{row.name}-{name}")
    for row in TABLE for name, node_of in NODES.items()
    if able(row, node_of) and len(node_of) > 1])
def test_where_ranks_disagree_no_row_of_the_table_gives_a_result(algorithm, node_of):
    for seed in range(40):
        random = np.random.default_rng(seed)
        two = random.choice(list(KINDS), 2, replace=False)
        kinds = two[random.permutation([0, 1, *random.integers(0, 2, len(node_of) - 2)])]

        def program(collectives):
            n, dtype, op = KINDS[kinds[collectives.rank]]
            return collectives.allreduce(np.ones(n, dtype), op=op, algorithm=algorithm)

        results, _ = run(node_of, program, seed=seed, slot_bytes=2048, tuning=SMALL,
                         return_errors=True, call=lambda rank: Call("allreduce", kinds[rank]))
        assert all(isinstance(result, Exception) for result in results), "a result came out"
        assert any(isinstance(result, BufferMismatchError) for result in results)


@pytest.mark.parametrize("node_of", [[0] * 3, [0, 0, 1, 1], [0, 1, 0, 1, 1]])
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "direct", "ring"])
def test_several_allreduces_in_one_operation(node_of, algorithm, small_blocks):
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

    for seed in range(25):
        run(node_of, program, seed=seed, slot_bytes=4096, tuning=SMALL)


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


@pytest.mark.parametrize("p", SIZES)
def test_broadcast(p):
    for root in {0, p // 2, p - 1}:
        for n in (0, 1, 100):
            xs = [np.arange(n, dtype="float32") + 1000 * rank for rank in range(p)]
            SimulatedNetwork(p, seed=n).run(
                lambda net: chain.broadcast(net, xs[net.rank], root, piece_bytes=64))
            assert all(np.array_equal(x, np.arange(n) + 1000 * root) for x in xs)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("in_flight", [1, 4])
def test_all_to_all(p, in_flight):
    inputs = [[sent(source, dest, p) for dest in range(p)] for source in range(p)]
    outputs = [[np.full_like(inputs[source][dest], -1) for source in range(p)]
               for dest in range(p)]
    SimulatedNetwork(p, seed=p).run(lambda net: exchange.exchange(
        net, dict(enumerate(inputs[net.rank])), dict(enumerate(outputs[net.rank])), in_flight))
    for dest in range(p):
        for source in range(p):
            assert np.array_equal(outputs[dest][source], sent(source, dest, p))
            assert np.array_equal(inputs[source][dest], sent(source, dest, p))


@pytest.mark.parametrize("p", SIZES)
def test_gather_and_scatter(p):
    for root in {0, p // 2, p - 1}:
        mine = [sent(rank, root, p) for rank in range(p)]
        parts = [np.full_like(x, -1) for x in mine]
        SimulatedNetwork(p, seed=root).run(lambda net: exchange.exchange(
            net, {root: mine[net.rank]}, dict(enumerate(parts)) if net.rank == root else {}))
        assert all(map(np.array_equal, parts, mine))

        parts = [sent(root, rank, p) for rank in range(p)]
        mine = [np.full_like(x, -1) for x in parts]
        SimulatedNetwork(p, seed=root).run(lambda net: exchange.exchange(
            net, dict(enumerate(parts)) if net.rank == root else {}, {root: mine[net.rank]}))
        assert all(map(np.array_equal, mine, parts))


PLACES = {"one node": lambda rank: 0, "nodes of 2": lambda rank: rank // 2,
          "round-robin": lambda rank: rank % 3, "own nodes": lambda rank: rank}


@pytest.mark.parametrize("p", SIZES)
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

        found = run(node_of, program, seed=seed, slot_bytes=2048)[0]
        for gathered, _ in found:
            contract.check(gathered, p, op)
        contract.check(found[root][1], p, op)


@pytest.mark.parametrize("p", SIZES[1:])
def test_copies_over_slots(p):
    """One after the other, in several rounds: none may write what another still reads."""
    texts = [np.arange(50 * rank % 400, dtype="uint8") + rank for rank in range(p)]
    for root in {0, p // 2, p - 1}:
        def program(collectives):
            r = collectives.rank
            for n in (300, 10, 5):
                x = np.arange(n, dtype="float32") + 1000 * r
                yield from collectives.broadcast(x, root)
                assert np.array_equal(x, np.arange(n) + 1000 * root)
            parts = [np.full_like(text, 255) for text in texts]
            yield from collectives.gather(texts[r], parts if r == root else (), root)
            assert r != root or all(map(np.array_equal, parts, texts))
            parts = [np.full_like(text, 255) for text in texts]
            yield from collectives.scatter(texts if r == root else (), parts[r], root)
            assert np.array_equal(parts[r], texts[r])
            sends = [sent(r, dest, p) for dest in range(p)]
            received = [np.full_like(sent(source, r, p), -1) for source in range(p)]
            yield from collectives.all_to_all(sends, received)
            assert all(np.array_equal(y, sent(source, r, p)) for source, y in enumerate(received))
            parts[r][...] = texts[r]
            yield from collectives.allgather_chunks(parts)
            assert all(map(np.array_equal, parts, texts))

        for seed in range(5):
            run([0] * p, program, seed=seed, tuning=SMALL)


@pytest.mark.parametrize("kind, finder", [("gather", 0), ("scatter", 1), ("all_to_all", 2)])
def test_another_length_in_a_slot_is_named(kind, finder):
    """Rank 1 sends, or expects, a byte more than agreed with rank 0, or 2."""
    def program(collectives):
        r = collectives.rank
        mine = [np.zeros(5 + (r == 1), np.uint8) for _ in range(3)]
        plain = [np.zeros(5, np.uint8) for _ in range(3)]
        if kind == "gather":
            yield from collectives.gather(mine[0], plain if r == 0 else (), 0)
        elif kind == "scatter":
            yield from collectives.scatter(plain if r == 0 else (), mine[0], 0)
        else:
            mine[:2] = plain[:2]
            yield from collectives.all_to_all(mine, plain)

    errors, _ = run([0] * 3, program, return_errors=True)
    assert isinstance(errors[finder], BufferMismatchError)
    assert re.search("rank [012]: receiving [56] bytes from rank [01]: it sent [56]",
                     str(errors[finder]))


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_objects(p, place):
    node_of = [PLACES[place](rank) for rank in range(p)]
    texts = [np.frombuffer(b"x" * (rank * 37 % 50), np.uint8) for rank in range(p)]

    def program(collectives):
        for root in {0, p // 2, p - 1}:
            found = yield from collectives.broadcast_bytes(texts[collectives.rank], root)
            assert np.array_equal(found, texts[root])
        found = yield from collectives.allgather_bytes(texts[collectives.rank])
        assert all(map(np.array_equal, found, texts))

    run(node_of, program, seed=p)


@pytest.mark.parametrize("p", SIZES)
def test_nobody_leaves_a_barrier_before_the_last_has_come(p):
    came = []

    def program(net):
        came.append(net.rank)
        yield from chain.barrier(net)
        assert len(came) == p

    for seed in range(20):
        came.clear()
        SimulatedNetwork(p, seed=seed).run(program)
