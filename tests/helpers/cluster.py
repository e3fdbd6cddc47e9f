"""Runs programs on a simulated cluster of nodes, composed as the communicator composes them."""

from dataclasses import replace

from mpiring.operations.agreement import Call, agreed
from mpiring.collectives.operation import Tuning
from mpiring.operations.collectives import Collectives
from mpiring.operations.resources import alone
from mpiring.launch.topology import neighbors, node_order, ranks_of_nodes
from mpiring.simulated.network import SimulatedNetwork
from mpiring.simulated.node import SimulatedMemory

# The node of each of p ranks.
NODES = {
    "one": lambda p: [0] * p, "of one": lambda p: list(range(p)),
    "of two": lambda p: [rank // 2 for rank in range(p)],
    "in turn": lambda p: [rank % 3 for rank in range(p)],
    "uneven": lambda p: [1 if rank in (0, p - 1) else rank % 4 // 3 * 2 for rank in range(p)]}
# Ranks whose arrays are in windows.
IN_WINDOWS = {"all": lambda rank: True, "none": lambda rank: False,
              "some": lambda rank: rank % 2 == 0}


def order_of(node_of):
    return node_order([node_of.index(node) for node in node_of])


def run(node_of, program, *, call=lambda rank: Call("test"), order=None, seed=None,
        slot_bytes=512, barrier_s=0.0, return_errors=False, network=None, algorithm="auto",
        tuning=Tuning()):
    """Run a program on every rank, given the collectives of its operation.

    Args:
        node_of: The node of each rank.
        program: Function from a Collectives to a schedule.
        call: Call of each rank.
        algorithm: Algorithm that "auto" stands for; "native" is not available.
        tuning: Lengths and counts; copies in one piece always fit into a slot.
    """
    tuning = replace(tuning, eager_bytes=min(tuning.eager_bytes, 4 * slot_bytes),
                     moved_bytes=min(tuning.moved_bytes, slot_bytes))
    node_of = list(node_of)
    network = network or SimulatedNetwork(len(node_of), node_of=node_of, seed=seed)
    memory = SimulatedMemory(network, barrier_s=barrier_s, slot_bytes=slot_bytes)
    leaders = [node_of.index(node) for node in node_of]
    order = order or node_order(leaders)
    nodes = ranks_of_nodes(leaders, order)

    def operation(net):
        rank = net.rank
        shares = node_of.count(node_of[rank]) > 1
        node = memory.node(rank, header=call(rank).header) if shares else None
        collectives = Collectives(
            alone(net, nodes, order=order, algorithm=algorithm, tuning=tuning), node, 0)
        between = neighbors(rank, nodes)
        return agreed(lambda: collectives.net, node, between, call(rank), program(collectives))

    return network.run(operation, return_errors=return_errors), network
