"""The command `python -m mpiring`; works without any MPI library."""

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import ConfigError, MpiringError
from .tools.bench import command as bench
from .tools.output import alone, guarded
from .tools.doctor import command as doctor
from .tools.lab import lab
from .tools.simulate import options as simulate
from .tools.trace import options as trace
from .tools.tune import command as tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, do what it says, and return the exit status.

    Args:
        arguments: The words after `python -m mpiring`; by default the process's own.
    """
    return guarded(lambda: _status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    # A benchmark may have to start itself again, under mpiexec.
    options = parser.parse_args(words, argparse.Namespace(words=words))
    if "action" not in options:
        parser.print_help()
        return 0
    try:
        return alone(options.action, options)
    except MpiringError as error:
        # In one write: ranks that say it at once would mix up their lines.
        sys.stderr.write(f"mpiring: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpiring",
        description="Data-parallel training on plain MPI. Write a training script, see README.md, "
                    "and start it with `mpirun -n 8 python train.py` or `srun python train.py`.")
    parser.add_argument("--version", action="version", version=f"mpiring {__version__}")
    commands = parser.add_subparsers(title="commands")
    _add_lab(commands.add_parser("lab", help="a cluster in one machine, with slow links"))
    tune.declare(commands.add_parser("tune", help="measure which algorithm is the fastest here"))
    doctor.declare(commands.add_parser(
        "doctor", help="say what is wrong with a launch or a machine, and how to mend it"))
    bench.declare(commands.add_parser("bench", help="measure mpiring beside MPI, Gloo, Horovod"))
    simulate.declare(commands.add_parser(
        "simulate", help="predict allreduces on a cluster that is not here"))
    trace.declare(commands.add_parser("trace", help="look at what the ranks of a job did"))
    return parser


def _add_lab(parser: argparse.ArgumentParser) -> None:
    """Declare `lab up`, `lab run`, `lab status` and `lab down`."""
    parser.description = lab.__doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="set up a lab that stays until `lab down`")
    run = commands.add_parser(
        "run", help="run a command on ranks across the hosts, of the lab that is up, or of a "
                    "temporary one")
    for command in (up, run):
        command.add_argument("--hosts", type=int, help="how many; default: 2, or all that are up")
        command.add_argument("--rate", help="of each link, each way; default: 1gbit")
    run.add_argument("--ranks-per-host", type=int, default=1)
    run.add_argument("--placement", default="block", choices=lab.PLACEMENTS)
    run.add_argument("--traffic", action="store_true", help="print the links' byte counts after")
    run.add_argument("command", nargs="+", metavar="-- COMMAND")
    up.set_defaults(action=_lab_up)
    run.set_defaults(action=_lab_run)
    commands.add_parser("status", help="print what each host sent and received").set_defaults(
        action=_lab_status)
    commands.add_parser("down", help="end the lab and all processes in it").set_defaults(
        action=_lab_down)


def _wanted(options: argparse.Namespace) -> tuple[int, str]:
    return 2 if options.hosts is None else options.hosts, options.rate or "1gbit"


def _lab_up(options: argparse.Namespace) -> int:
    made = lab.up(*_wanted(options))
    print(f"{made.hosts} hosts are up, with links of {made.rate}")
    return 0


def _lab_run(options: argparse.Namespace) -> int:
    standing = lab.standing()
    if standing is None:
        with lab.temporary(*_wanted(options)) as made:
            return _run_in(made, options)
    if options.rate not in (None, standing.rate):
        raise ConfigError(f"--rate {options.rate}: the lab that is up has links of {standing.rate}")
    return _run_in(standing, options)


def _run_in(made: lab.Lab, options: argparse.Namespace) -> int:
    status = made.run(options.command, hosts=options.hosts, placement=options.placement,
                      ranks_per_host=options.ranks_per_host)
    if options.traffic:
        _print_traffic(made)
    return status


def _lab_status(options: argparse.Namespace) -> int:
    standing = lab.standing()
    if standing is None:
        print("no lab is up")
        return 1
    _print_traffic(standing)
    return 0


def _lab_down(options: argparse.Namespace) -> int:
    standing = lab.standing()
    if standing is not None:
        standing.down()
    print("no lab is up" if standing is None else "the lab is down")
    return 0


def _print_traffic(made: lab.Lab) -> None:
    for host in made.traffic():
        print(f"host {host.host}: sent {host.sent_bytes:,} bytes, "
              f"received {host.received_bytes:,}")


if __name__ == "__main__":
    sys.exit(main())
