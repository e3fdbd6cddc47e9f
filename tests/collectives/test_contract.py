"""Holds every algorithm x p x n x dtype x op against NumPy, on an adversarial network."""

import re

import contract
import numpy as np
import pytest
from cluster import IN_WINDOWS, run
from cluster import NODES as PLACES
from schedules import sent

from mpiring import BufferMismatchError
from mpiring.collectives.operation import Tuning
from mpiring.memory import reduction
from mpiring.memory.arrays import bounds_of
from mpiring.operations.agreement import Call
from mpiring.operations.algorithms import TABLE, Case

SIZES = *range(1, 9), 13
NODES = {**{f"p={p}": range(p) for p in (1, 2, 3, 4, 5, 8, 13)},
         "one node": [0] * 4, "one node of 7": [0] * 7, "2 x 2": [0, 0, 1, 1],
         "round-robin": [0, 1, 0, 1, 0, 1], "uneven": [0, 0, 0, 1, 2, 2, 2]}
# Arrays of this test's sizes take every path.
SMALL = Tuning(eager_bytes=300, moved_bytes=75, short_bytes=200, slice_bytes=48, chunk_bytes=1,
               ring_bytes=24, direct_bytes=(8, 40), direct_nodes=2, gathered_bytes=600)


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


@pytest.fixture
def small_blocks(monkeypatch):
    """Let arrays of this test's sizes be combined in several blocks."""
    monkeypatch.setattr(reduction, "BLOCK_BYTES", 128)


def able(row, node_of):
    """Return whether a row of the table can run on a cluster without MPI."""
    case = Case(0, np.dtype("float32"), "sum", len(node_of), len(set(node_of)), SMALL)
    return row.name != "native" and not row.refusal(case)


@pytest.mark.parametrize(("algorithm", "node_of"), [
    pytest.param(row.name, node_of, id=f"{row.name}-{name}")
    for row in TABLE for name, node_of in NODES.items() if able(row, node_of)])
def test_every_row_of_the_table(algorithm, node_of, small_blocks):
    """As the communicator runs them: agreement, the short variants, memory of any kind."""
    for seed, (op, dtype, n, in_windows) in enumerate(contract.cases(
            (0, 1, len(node_of) + 1, 60, 257), tuple(IN_WINDOWS.values()))):
        xs = on_nodes(node_of, n, op, dtype, seed, algorithm=algorithm, slot_bytes=2048,
                      in_windows=in_windows)
        contract.check_all(xs, op)


KINDS = {"usual": (40, "float32", "sum"), "shorter": (39, "float32", "sum"),
         "much shorter": (4, "float32", "sum"), "empty": (0, "float32", "sum"),
         "other dtype": (40, "int32", "sum"), "half": (40, "float16", "sum"),
         "other op": (40, "float32", "max"), "other algorithm": (40, "float32", "sum")}
OTHER_CALLS = "reduce_scatter", "allgather", "allgather_once"


def called(collectives, call, kind):
    """Return the schedule of an allreduce by a row of the table, or of another call."""
    n, dtype, op = KINDS[kind]
    x = np.ones(n, dtype)
    if call in ("allgather", "allgather_once"):
        return getattr(collectives, call)(x, bounds=bounds_of(n, collectives.size))
    if call == "reduce_scatter":
        return collectives.reduce_scatter(x, op=op)
    if call == "broadcast":
        return collectives.broadcast(x, 0)
    return collectives.allreduce(x, op=op, algorithm="ring" if kind == "other algorithm" else call)


@pytest.mark.parametrize(("call", "node_of"), [
    *(pytest.param(row.name, node_of, id=f"{row.name}-{name}")
      for row in TABLE for name, node_of in NODES.items()
      if able(row, node_of) and len(node_of) > 1),
    *(pytest.param(call, NODES[name], id=f"{call}-{name}")
      for call in OTHER_CALLS for name in ("p=3", "one node", "2 x 2", "uneven")),
    # Between few nodes, a root has its result before all are known to agree.
    pytest.param("broadcast", NODES["p=13"], id="broadcast-p=13")])
def test_where_ranks_disagree_no_call_gives_a_result(call, node_of):
    for seed in range(20):
        random = np.random.default_rng(seed)
        two = random.choice(list(KINDS), 2, replace=False)
        # Any rank differs, or whole nodes that agree within.
        group_of = node_of if seed % 2 and len(set(node_of)) > 1 else range(len(node_of))
        others = random.integers(0, 2, len(set(group_of)) - 2)
        of_groups = two[random.permutation([0, 1, *others])]
        kinds = [of_groups[group] for group in group_of]
        results, _ = run(node_of, lambda collectives: called(
            collectives, call, kinds[collectives.rank]), seed=seed, slot_bytes=2048, tuning=SMALL,
            return_errors=True, call=lambda rank: Call("a call", kinds[rank]))
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

    for seed in range(10):
        run(node_of, program, seed=seed, slot_bytes=4096, tuning=SMALL)


@pytest.mark.parametrize("node_of", [[0] * 4, [0, 0, 1, 1], [0, 1, 2], [0, 1, 0]])
def test_a_barrier_holds_anywhere_in_an_operation(node_of):
    came = []

    def program(collectives):
        for number in range(3):
            came.append(number)
            yield from collectives.barrier()
            assert came.count(number) == len(node_of)

    for seed in range(20):
        came.clear()
        run(node_of, program, seed=seed)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_out_of_place(p, place):
    """As PyTorch needs them: inputs are left alone, and results go to any memory."""
    node_of = PLACES[place](p)
    n, root = 5, p // 2
    cases = [(op, dtype) for op in contract.OPS for dtype in contract.OPS_OF[op][::4]]
    # On many ranks few of them, to save time.
    for seed, (op, dtype) in enumerate(cases if p <= 4 else cases[p % 8::8]):
        inputs = [contract.contribution(rank, p * n, dtype) for rank in range(p)]

        def program(collectives):
            r, x = collectives.rank, inputs[collectives.rank].copy()
            chunks = [x[k * n:][:n] for k in range(p)]
            chunks[r] = chunks[r].copy()
            yield from collectives.reduce_scatter_chunks(chunks, op=op)
            assert np.array_equal(x, inputs[r]), "an input was changed"
            gathered = [np.zeros(n, dtype) for _ in range(p)]
            gathered[r][...] = chunks[r]
            yield from collectives.allgather_chunks(gathered)
            yield from collectives.reduce(x, root, op=op)
            assert r == root or np.array_equal(x, inputs[r]), "an input was changed"
            return np.concatenate(gathered), x

        outputs = run(node_of, program, seed=seed, slot_bytes=2048)[0]
        for gathered, _ in outputs:
            contract.check(gathered, p, op)
        contract.check(outputs[root][1], p, op)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("place", PLACES)
def test_copies(place, p):
    """On a node over slots, in several rounds: none may write what another still reads."""
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

        for seed in range(2):
            run(PLACES[place](p), program, seed=seed, tuning=SMALL)


@pytest.mark.parametrize("kind, finder", [("gather", 0), ("scatter", 1), ("all_to_all", 2)])
def test_another_length_is_named(kind, finder):
    """Rank 1 sends, or expects, a byte more than agreed with rank 0, or 2."""
    def program(collectives):
        r = collectives.rank
        odd = [np.zeros(5 + (r == 1), np.uint8) for _ in range(3)]
        plain = [np.zeros(5, np.uint8) for _ in range(3)]
        if kind == "gather":
            yield from collectives.gather(odd[0], plain if r == 0 else (), 0)
        elif kind == "scatter":
            yield from collectives.scatter(plain if r == 0 else (), odd[0], 0)
        else:
            odd[:2] = plain[:2]
            yield from collectives.all_to_all(odd, plain)

    errors, _ = run([0] * 3, program, return_errors=True)
    assert isinstance(errors[finder], BufferMismatchError)
    assert re.search("expected [56] bytes from rank [01], got [56]", str(errors[finder]))


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_objects(p, place):
    node_of = PLACES[place](p)
    texts = [np.frombuffer(b"x" * (rank * 37 % 50), np.uint8) for rank in range(p)]

    def program(collectives):
        for root in {0, p // 2, p - 1}:
            received = yield from collectives.broadcast_bytes(texts[collectives.rank], root)
            assert np.array_equal(received, texts[root])
        received = yield from collectives.allgather_bytes(texts[collectives.rank])
        assert all(map(np.array_equal, received, texts))

    run(node_of, program, seed=p)
