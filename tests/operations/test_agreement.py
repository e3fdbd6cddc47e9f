"""Tests that ranks which disagree raise, and that no wrong result ever comes out."""

import re

import numpy as np
import pytest
from cluster import run
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.collectives import chain, ring
from mpiring.operations.agreement import HEADER_BYTES, Call, agreed
from mpiring.errors import BufferMismatchError
from mpiring.memory.reduction import Reduction
from mpiring.simulated.network import SimulatedNetwork


def compared(net, call, schedule):
    """Run a schedule as on nodes of one rank each."""
    left, right = (net.rank - 1) % net.size, (net.rank + 1) % net.size
    return agreed(lambda: net, None, (left, right), call, schedule)


def allreduce(net, n=12, dtype="float32", op="sum"):
    x = np.full(n, 1 + net.rank, dtype)
    inbox = np.empty(ring.inbox_size(n, net.size, np.dtype(dtype).itemsize), dtype)
    schedule = ring.allreduce(net, x, inbox, Reduction(op, dtype, net.size))
    yield from compared(net, Call("allreduce", f"{op} of {dtype} ({n},)"), schedule)
    return x


def broadcast(net, n=12, root=0):
    x = np.full(n, net.rank, "float32")
    schedule = chain.broadcast(net, x, root)
    yield from compared(net, Call("broadcast", f"of float32 ({n},) from root {root}"), schedule)
    return x


VARIANTS = {
    "usual": allreduce,
    "shorter": lambda net: allreduce(net, n=11),
    "much shorter": lambda net: allreduce(net, n=0),
    "other dtype": lambda net: allreduce(net, dtype="int32"),
    "other op": lambda net: allreduce(net, op="max"),
    "other collective": broadcast,
    "other root": lambda net: broadcast(net, root=1),
}


@settings(deadline=None, max_examples=500)
@given(seed=st.integers(0, 2**32),
       choices=st.lists(st.sampled_from(list(VARIANTS)), min_size=2, max_size=7))
def test_disagreement_is_found_and_never_gives_a_result(seed, choices):
    results = SimulatedNetwork(len(choices), seed=seed).run(
        lambda net: VARIANTS[choices[net.rank]](net), return_errors=True)
    if len(set(choices)) == 1:
        assert not any(isinstance(result, Exception) for result in results)
        return
    assert any(isinstance(result, BufferMismatchError) for result in results)
    for rank, result in enumerate(results):
        if choices[rank] != choices[rank - 1]:
            assert isinstance(result, BufferMismatchError)
        # A root may finish its broadcast to ranks that agree with it; a sum needs all.
        if not isinstance(result, Exception):
            assert "root" in choices[rank] or choices[rank] == "other collective"
            root = 1 if choices[rank] == "other root" else 0
            assert (result == root).all()


def test_the_error_names_both_ranks_and_both_calls():
    with pytest.raises(BufferMismatchError) as caught:
        SimulatedNetwork(4).run(lambda net: allreduce(net, n=11 if net.rank == 2 else 12))
    assert "rank 2 called allreduce sum of float32 (11,)" in str(caught.value)
    assert "rank 1 called allreduce sum of float32 (12,)" in str(caught.value)
    assert "every rank must call the same collectives" in str(caught.value)


@pytest.mark.parametrize("node_of", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 0]])
def test_the_error_names_ranks_of_the_communicator(node_of):
    """Also within nodes, and where the ring visits the ranks in another order."""
    def call(rank):
        return Call("allreduce", "sum" if rank == 2 else "max")

    results, _ = run(node_of, lambda collectives: collectives.barrier(), call=call,
                     return_errors=True)
    errors = " ".join(map(str, results))
    assert re.search(r"rank 2 called allreduce sum, but rank \d called allreduce max", errors)
    assert re.search(r"rank \d called allreduce max, but rank 2 called allreduce sum", errors)
    assert "every rank must call the same collectives" in errors


def test_a_schedule_without_messages_is_compared_too():
    def program(net, detail):
        def nothing():
            return "done"
            yield
        return (yield from compared(net, Call("test", detail), nothing()))

    assert SimulatedNetwork(3, seed=1).run(lambda net: program(net, "")) == ["done"] * 3
    with pytest.raises(BufferMismatchError):
        SimulatedNetwork(3, seed=1).run(lambda net: program(net, str(net.rank)))


def test_headers_have_one_length_and_tell_long_texts_apart():
    texts = ["x" * 1000 + end for end in "ab"]
    first, second = (Call("reduce", "", text) for text in texts)
    assert len(first.header) == len(second.header) == HEADER_BYTES
    assert first.header != second.header and first.digest != second.digest
    again = Call("reduce", "", texts[0])
    assert first.digest == again.digest < 2**63
