"""Tests which address of rank 0 its store listens on, and what `mpi://` accepts, without MPI."""

import socket
from datetime import timedelta

import pytest
from launching import needed
from threads import ThreadComm, on_ranks

from mpiring import Config, ConfigError
from mpiring.errors import TransportError

ADDRESSES = {"a": "127.0.0.2", "b": "127.0.0.3"}


class OnNodes(ThreadComm):
    """Ranks, each on a node of its own."""

    num_nodes = 2


@pytest.fixture
def rendezvous(monkeypatch):
    """Return the module, on a host with two addresses."""
    needed("torch")
    from mpiring.torch import rendezvous
    monkeypatch.setattr(rendezvous, "ipv4_addresses", lambda: ADDRESSES)
    return rendezvous


def blocked(rendezvous, monkeypatch, *addresses):
    """Let a firewall close some addresses."""
    reaches = rendezvous._reaches
    monkeypatch.setattr(rendezvous, "_reaches", lambda address, *rest: (
        address[0] not in addresses and reaches(address, *rest)))


@pytest.mark.parametrize("closed, expected", [([], "127.0.0.2"), (["127.0.0.2"], "127.0.0.3")])
def test_the_store_listens_on_one_address_that_all_ranks_reach(
        rendezvous, monkeypatch, closed, expected):
    blocked(rendezvous, monkeypatch, *closed)
    (*first, listener), (*second, none) = on_ranks(2, rendezvous._agree_on_address, OnNodes)
    with listener:
        assert first == second == list(listener.getsockname()) and none is None
        assert first[0] == expected
        for address in {*ADDRESSES.values(), "127.0.0.1"} - {expected}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, first[1]), timeout=10)


def test_addresses_that_are_not_reached_are_named(rendezvous, monkeypatch):
    blocked(rendezvous, monkeypatch, *ADDRESSES.values())
    with pytest.raises(TransportError, match=r"listens on \[\('127.0.0.2', \d+\), .*rank 0 reaches "
                       r"\[\]; does a firewall close the ports\?"):
        on_ranks(2, rendezvous._agree_on_address, OnNodes)


@pytest.mark.parametrize("query", ["rank=0", "world_size=3", "rank=1&world_size=2"])
def test_a_rank_or_size_other_than_in_mpi_is_an_error_on_all_ranks(rendezvous, query):
    def refused(comm):
        with pytest.raises(ConfigError, match="in MPI; leave (rank|world_size) out: MPI knows it"):
            rendezvous._check_url(f"mpi://?{query}", comm)

    on_ranks(2, refused)
    on_ranks(2, lambda comm: rendezvous._check_url(f"mpi://?rank={comm.rank}&world_size=2", comm))
    on_ranks(2, lambda comm: rendezvous._check_url("mpi://?rank=-1", comm))


def test_the_timeout_also_limits_the_start(rendezvous, monkeypatch):
    class Started(Exception):
        """MPI would start now."""

    def init(*, config):
        raise Started(config.stall_timeout_s)

    monkeypatch.setattr(rendezvous, "init", init)
    usual_s = Config().stall_timeout_s
    for options, limit_s in (((), usual_s), ((timedelta(minutes=30),), usual_s),
                             ((timedelta(hours=1),), 3600.0)):
        with pytest.raises(Started) as started:
            next(rendezvous.rendezvous("mpi://", *options))
        assert started.value.args == (limit_s,)
