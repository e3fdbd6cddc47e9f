"""Lets several schedules meet on networks that deliver late, and in odd orders."""

import contract
import numpy as np
from schedules import by_agreed_ring, by_direct_pieces, by_members, by_pieces, sent

from mpiring.collectives import chain, exchange, ring
from mpiring.simulated.network import SimulatedNetwork


class Deliveries:
    """Schedules of random sizes for one network: each method returns one, and its check.

    The check is given what each rank has returned.
    """

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.p, self.n = int(random.integers(1, 9)), int(random.integers(0, 40))
        self.root, self.op = int(random.integers(self.p)), list(contract.OPS)[seed % 5]
        self.in_flight = 1 + seed % 3
        self.chosen = random.choice(list(self.KINDS), 3, replace=False)

    def allreduce(self, by, dtype, op):
        xs = [contract.contribution(rank, self.n, dtype) for rank in range(self.p)]

        def check():
            contract.check_all(xs, op)

        return lambda net: by(net, xs[net.rank], op), check

    def broadcast(self):
        xs = [np.full(self.n, rank) for rank in range(self.p)]

        def check():
            assert all((x == self.root).all() for x in xs)

        return lambda net: chain.broadcast(net, xs[net.rank], self.root, piece_bytes=32), check

    def all_to_all(self):
        rows = [[sent(rank, dest, self.p) for dest in range(self.p)] for rank in range(self.p)]
        columns = [[np.empty_like(row[rank]) for row in rows] for rank in range(self.p)]

        def check():
            for rank, column in enumerate(columns):
                for source, x in enumerate(column):
                    assert np.array_equal(x, sent(source, rank, self.p))
                    assert np.array_equal(rows[source][rank], x), "an input was changed"

        return lambda net: exchange.exchange(
            net, dict(enumerate(rows[net.rank])), dict(enumerate(columns[net.rank])),
            self.in_flight), check

    def allgather(self):
        right = [sent(rank, 0, self.p) for rank in range(self.p)]
        columns = [[x if rank == place else np.empty_like(x) for place, x in enumerate(right)]
                   for rank in range(self.p)]

        def check():
            for column in columns:
                assert all(map(np.array_equal, column, right))

        return lambda net: ring.allgather(net, columns[net.rank], 24), check

    def barrier(self):
        came = []

        def program(net):
            came.append(net.rank)
            yield from chain.barrier(net)
            assert len(came) == self.p

        return program, lambda: None

    KINDS = {
        "ring": lambda self: self.allreduce(by_agreed_ring, "float32", self.op),
        "members": lambda self: self.allreduce(by_members, "int16", "sum"),
        "pieces": lambda self: self.allreduce(by_pieces, "int32", "sum"),
        "direct": lambda self: self.allreduce(by_direct_pieces, "float16", self.op),
        "broadcast": broadcast, "all-to-all": all_to_all, "allgather": allgather,
        "barrier": barrier}


def test_thousands_of_adversarial_deliveries():
    """Three schedules at once, at random sizes, under as many different networks."""
    for seed in range(1_500):
        case = Deliveries(seed)
        schedules, checks = zip(*(case.KINDS[kind](case) for kind in case.chosen))
        SimulatedNetwork(case.p, seed=seed, node_of=case.in_flight).run(*schedules)
        for check in checks:
            check()
