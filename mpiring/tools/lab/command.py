"""The command `mpiring lab`: sets up a lab, runs commands in it, and ends it."""

import argparse
from contextlib import nullcontext

from ... import ConfigError
from ..arguments import Parser, positive, ranks
from . import lab


def declare(parser: Parser) -> None:
    """Declare `lab up`, `lab run`, `lab status` and `lab down`."""
    parser.description = lab.__doc__
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="set up a lab that stays until `lab down`")
    run = commands.add_parser(
        "run", help="run a command on the hosts of the lab that is up, or of a temporary lab")
    for command in (up, run):
        command.add_argument("--hosts", type=positive, metavar="N", help=(
            "number of hosts (default: 2, or all hosts of the lab that is up)"))
        command.add_argument("--rate", help=(
            "data rate of each link in each direction, such as 100mbit or 1gbit (default: 1gbit)"))
    run.add_argument("--ranks-per-host", type=ranks, default=1, metavar="N",
                     help="number of ranks on each host (default: 1)")
    run.add_argument("--placement", default="block", choices=lab.PLACEMENTS,
                     help="order in which ranks are assigned to hosts (default: block)")
    run.add_argument("--traffic", action="store_true",
                     help="print at the end how many bytes each link carried")
    run.add_argument("command", nargs="+", metavar="-- COMMAND",
                     help="words of the command, after --")
    run.advice = "(write -- before the words of the command)"
    status = commands.add_parser("status", help="print what each host sent and received")
    down = commands.add_parser("down", help="end the lab and all processes in it")
    for command, action in (up, _up), (run, _run), (status, _status), (down, _down):
        command.set_defaults(action=action)


def _size(options: argparse.Namespace) -> tuple[int, str]:
    """Return the number of hosts and the data rate of a new lab."""
    return 2 if options.hosts is None else options.hosts, options.rate or "1gbit"


def _up(options: argparse.Namespace) -> int:
    cluster = lab.up(*_size(options))
    print(f"{cluster.hosts} hosts are up, with links of {cluster.rate}")
    return 0


def _run(options: argparse.Namespace) -> int:
    running = lab.running_lab()
    if running and options.rate not in (None, running.rate):
        raise ConfigError(f"--rate {options.rate}: the lab that is up has links of {running.rate}")
    with nullcontext(running) if running else lab.temporary(*_size(options)) as cluster:
        status = cluster.run(options.command, hosts=options.hosts, placement=options.placement,
                             ranks_per_host=options.ranks_per_host)
        if options.traffic:
            _print_traffic(cluster)
    return status


def _status(options: argparse.Namespace) -> int:
    running = lab.running_lab()
    if running is None:
        print("no lab is up")
        return 1
    _print_traffic(running)
    return 0


def _down(options: argparse.Namespace) -> int:
    running = lab.running_lab()
    if running is not None:
        running.down()
    print("no lab is up" if running is None else "the lab is down")
    return 0


def _print_traffic(cluster: lab.Lab) -> None:
    for host, sent_bytes, received_bytes in cluster.traffic():
        print(f"host {host}: sent {sent_bytes:,} bytes, received {received_bytes:,}")
