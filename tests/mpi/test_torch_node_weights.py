"""Tests weights that lie once per node, on real MPI: in training, and written by users."""

import errno
import gc

import mpiring
import pytest
from launching import needed
from mpi4py import MPI
from mpiring import ConfigError, ReplicaError

torch = needed("torch")
from odd_modules import OddWithBuffers, bits, equal_on_all, train, wrapped  # noqa: E402
from mpiring.torch import DataParallel, Sharded  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi


def sharded(comm, weights, dtype=torch.float32, **settings):
    model = wrapped(comm, dtype, OddWithBuffers)
    return model, Sharded(torch.optim.AdamW, model, lr=0.01, weights=weights, **settings)


@pytest.mark.parametrize(("dtype", "overlap"), [
    (torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_the_training_is_that_of_weights_on_each_rank(comm, dtype, overlap):
    each, node = sharded(comm, "rank", dtype), sharded(comm, "node", dtype, overlap=overlap)
    for steps in (range(2), range(2, 4), range(4, 8)):
        for model, optimizer in (each, node):
            model.first.requires_grad_(steps.start != 2)
            model.last.weight.requires_grad_(steps.start == 0)
            train(model, optimizer, comm, steps)
        assert bits(each[0].parameters()) == bits(node[0].parameters())
        # A step without a trace: no gradient is finite.
        train(*node, comm, [9], factor=float("nan"))
        assert bits(each[0].parameters()) == bits(node[0].parameters())
    assert equal_on_all(node[0].parameters(), comm)


@pytest.mark.parametrize(("weights", "overlap"), [("rank", True), ("node", False), ("node", True)])
def test_ranks_weigh_as_much_as_they_have_tokens(comm, weights, overlap):
    """As if the loss were scaled; a rank that has none may have the loss NaN."""
    plain, model = (wrapped(comm, make=OddWithBuffers) for _ in range(2))
    scaled = plain, torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = Sharded(torch.optim.SGD, model, lr=0.1, weights=weights, overlap=overlap)
    for step in range(5):
        tokens = [(2 * rank + step) % 3 + (rank == step % comm.size) for rank in range(comm.size)]
        own_tokens = tokens[comm.rank]
        train(*scaled, comm, [step], factor=own_tokens * comm.size / sum(tokens))
        model.weigh(own_tokens)
        train(model, optimizer, comm, [step], factor=1 if own_tokens else float("nan"))
        assert model.finite
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_node_has_one_copy(comm):
    model, optimizer = sharded(comm, "node")
    train(model, optimizer, comm, range(3))
    leader = next(ranks[0] for ranks in comm.memory_groups if comm.rank in ranks)
    comm.barrier()
    if comm.rank == leader:
        model.first.bias.data.fill_(leader + 50)
    comm.barrier()
    assert (model.first.bias == leader + 50).all()
    comm.barrier()
    optimizer.close()
    model.first.bias.data.fill_(comm.rank)
    comm.barrier()
    assert (model.first.bias == comm.rank).all(), "after close(), each rank has a copy again"


def test_what_is_written_outside_of_the_optimizer_is_refused(comm):
    model, optimizer = sharded(comm, "node")
    train(model, optimizer, comm, range(3))
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(ReplicaError, match=r"last.weight were written outside .*writing_weights"):
        train(model, optimizer, comm, [3])
    optimizer.zero_grad()
    with optimizer.writing_weights():
        pass
    train(model, optimizer, comm, [3])
    model.first.weight.data = torch.zeros(33, 6)
    with pytest.raises(ReplicaError, match="first.weight were written"):
        train(model, optimizer, comm, [4])


@pytest.mark.parametrize("weights", ["rank", "node"])
def test_weights_are_written_in_a_block(comm, weights):
    model, optimizer = sharded(comm, weights)
    train(model, optimizer, comm, range(3))
    before = [p.detach().clone() for p in model.parameters()]
    comm.barrier()
    with optimizer.writing_weights(), torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        model.first.bias.data = torch.full((33,), 7.0)
        comm.barrier()
    for name, p, x in zip(dict(model.named_parameters()), model.parameters(), before):
        assert torch.equal(p, torch.full((33,), 7.0) if "first.bias" in name else 2 * x)
    where = model.scale.data_ptr()
    with pytest.raises(ZeroDivisionError), optimizer.writing_weights():
        1 / 0
    assert model.scale.data_ptr() == where
    train(model, optimizer, comm, range(3))
    assert equal_on_all(model.parameters(), comm)


def test_a_model_is_loaded_as_ever(comm):
    model, optimizer = sharded(comm, "node")
    train(model, optimizer, comm, range(3))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    train(model, optimizer, comm, range(3, 5))

    def as_part(state):
        outer = nn.Sequential(model)
        assert outer.state_dict().keys() == {f"0.{name}" for name in state}
        outer.load_state_dict({f"0.{name}": x for name, x in state.items()})

    for loads in (model.load_state_dict, model.module.load_state_dict, as_part):
        loads(state)
        assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
        train(model, optimizer, comm, range(2))
    with optimizer.writing_weights():
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    train(model, optimizer, comm, range(2))


def loaded(model):
    """Load the model, with its own weights."""
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})


def assert_private(model, comm):
    """Check that each rank writes its own weights."""
    comm.barrier()
    with torch.no_grad():
        model.first.bias.fill_(comm.rank)
    comm.barrier()
    assert (model.first.bias == comm.rank).all()


def test_loading_follows_the_buckets_of_the_optimizer(comm):
    """Whenever a rank collects garbage; and ends with the optimizer, not before."""
    model, optimizer = sharded(comm, "node", overlap=True)
    gc.disable()
    try:
        for step in range(3):
            model.first.bias.requires_grad_(step != 1)
            train(model, optimizer, comm, [step])
            if comm.rank:
                gc.collect()
            loaded(model)
            assert equal_on_all(model.parameters(), comm)
        optimizer.close()
        loaded(model)
        assert_private(model, comm)
        assert not model.module._load_state_dict_pre_hooks
        again = Sharded(torch.optim.AdamW, model, lr=0.01, weights="node")
        loaded(model)
        train(model, again, comm, [0])
        net = model.module
        # Nobody has closed it: ranks share these weights nevertheless.
        del model, optimizer, again
        if comm.rank:
            gc.collect()
        loaded(net)
        gc.collect()
        model = DataParallel(net, comm, bucket_bytes=400)
        optimizer = Sharded(torch.optim.AdamW, model, lr=0.01, weights="node")
        loaded(model)
        train(model, optimizer, comm, range(2))
        assert equal_on_all(model.parameters(), comm)
    finally:
        gc.enable()


def test_a_model_is_loaded_after_its_communicator_was_closed(comm):
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(tuning=False)) as own:
        model, optimizer = sharded(own, "node")
        train(model, optimizer, own, range(2))
    loaded(model)
    assert_private(model, comm)


def test_without_memory(comm, monkeypatch):
    """An error that can be caught: weights on each rank may fit."""
    def no_memory():
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model = wrapped(comm, make=OddWithBuffers)
    with monkeypatch.context() as full:
        full.setattr("mpiring.transport.windows.window.create", no_memory)
        if comm.local_size > 1 and comm.config.shared_memory:
            with pytest.raises(ConfigError, match="cannot allocate .* that its node shares"):
                Sharded(torch.optim.AdamW, model, lr=0.01, weights="node")
    optimizer = Sharded(torch.optim.AdamW, model, lr=0.01)
    loaded(model)
    train(model, optimizer, comm, range(2))
    assert equal_on_all(model.parameters(), comm)
    optimizer.close()
    train(model, Sharded(torch.optim.AdamW, model, lr=0.01, weights="node"), comm, range(2))


def test_ranks_that_share_no_memory_have_a_copy_each_and_are_restored(comm):
    config = mpiring.Config(digest_steps=1, digest_action="restore", shared_memory=False,
                            tuning=False)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as apart:
        model, optimizer = sharded(apart, "node")
        train(model, optimizer, apart, range(3))
        if apart.size > 2 and apart.rank == 1:
            # Behind PyTorch's back, as a broken memory does.
            model.first.weight.detach().numpy()[...] += 1
        train(model, optimizer, apart, range(3, 6))
        assert equal_on_all(model.parameters(), apart)
        each = sharded(comm, "rank")
        train(*each, comm, range(3))
