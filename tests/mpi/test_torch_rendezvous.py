"""Tests where ranks of PyTorch meet, and who else can, over real MPI."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from launching import needed

pytestmark = pytest.mark.mpi

torch = needed("torch")
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def meeting(monkeypatch):
    """Return the store of `init_method="mpi://"`, this rank and the number of ranks."""
    from mpiring.torch.rendezvous import rendezvous
    before = dict(os.environ)
    for name in "LOCAL_RANK", "GLOO_SOCKET_IFNAME":
        os.environ.pop(name, None)
    yield next(rendezvous("mpi://", TIMEOUT))
    os.environ.clear()
    os.environ.update(before)


def listening(port):
    """Return the addresses of this host that listen on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") if Path("/proc/net", name).exists()
             for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines
            if line[3] == "0A" and int(line[1].partition(":")[2], 16) == port]


def test_the_store_listens_where_the_ranks_are_and_hides_its_keys(comm, meeting):
    store, rank, size = meeting
    assert (rank, size) == (comm.rank, comm.size)
    store.set(f"key {rank}", f"value {rank}")
    keys = [f"key {rank}" for rank in range(size)]
    store.wait(keys, TIMEOUT)
    assert [store.get(key).decode() for key in keys] == [f"value {rank}" for rank in range(size)]
    plain = store.underlying_store
    if comm.num_nodes == 1:
        (address,) = listening(plain.port)
        assert bytes.fromhex(address)[::-1] == socket.inet_aton("127.0.0.1")
    other = torch.distributed.TCPStore(plain.host, plain.port, is_master=False, timeout=TIMEOUT)
    assert not other.check(["key 0"]), "another user would find it"
    comm.barrier()
    other.set("key 0", "another user's")
    comm.barrier()
    assert store.get("key 0") == b"value 0"
    # The store is in rank 0's process.
    comm.barrier()


def test_nccl_finds_its_gpu_and_gloo_its_interface(comm, meeting):
    """PyTorch makes the back end after `next`."""
    assert os.environ["LOCAL_RANK"] == str(comm.local_rank)
    # The name of a host, which Gloo would look up, may have an address that no other host reaches.
    assert (os.environ["GLOO_SOCKET_IFNAME"] == "lo") == (comm.num_nodes == 1)


def test_an_interface_that_the_user_has_set_is_kept(comm, meeting):
    from mpiring.torch import export_environment
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    export_environment(comm)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_an_exported_port_is_kept_for_pytorch(comm, meeting):
    from mpiring.torch import export_environment
    export_environment(comm)
    port = int(os.environ["MASTER_PORT"])
    if comm.rank == 0:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((os.environ["MASTER_ADDR"], port))
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
    comm.barrier()
