"""Options that several benchmarks share."""

import argparse
from collections.abc import Sequence

from ...errors import ConfigError
from ..arguments import above_zero, checked, counts, names, positive
from ..results import declare_files
from ..units import parse_rate
from . import peers
from .contenders import KINDS
from .benchmark import LEVELS

MODELS = ("transformer", "convnet", "mlp")


def declare_jobs(parser: argparse.ArgumentParser) -> None:
    """Declare where results go, and how many ranks a benchmark starts by itself."""
    declare_files(parser, "results and environment")
    parser.add_argument("--ranks", type=positive,
                        help="of jobs of its own, where there is no launcher; default: 2")
    parser.add_argument("--part", help=argparse.SUPPRESS)


def declare_turns(parser: argparse.ArgumentParser, levels: Sequence[str] = LEVELS[:1]) -> None:
    """Declare the options of benchmarks whose contenders take turns.

    Args:
        levels: MPI's thread levels to measure by default.
    """
    parser.add_argument("--rounds", type=positive, default=6, help="default: 6")
    parser.add_argument("--seed", type=int, default=1, help="of the random orders")
    parser.add_argument("--levels", type=names(LEVELS), default=list(levels), metavar="A,B",
                        help=f"MPI's thread levels, in jobs of its own; default: "
                             f"{','.join(levels)}")
    parser.add_argument("--without-peers", action="store_true", help=argparse.SUPPRESS)
    declare_jobs(parser)


def declare_contenders(parser: argparse.ArgumentParser) -> None:
    """Declare which contenders take part."""
    parser.add_argument("--contenders", type=names(KINDS), metavar="A,B",
                        help=f"of {', '.join(KINDS)}; default: all that are installed")
    parser.add_argument("--interface", metavar="NAME", help="network interface for Gloo")


def settle_contenders(options: argparse.Namespace, device: str, on_cpu: Sequence[str],
                      on_gpu: Sequence[str]) -> None:
    """Refuse contenders that cannot take part; in a job without peers, leave these out.

    Args:
        on_cpu, on_gpu: The kinds that can take part there.

    Raises:
        ConfigError: A kind was asked for that cannot.
    """
    known = on_cpu if device == "cpu" else on_gpu
    for name in options.contenders or ():
        if name not in known:
            raise ConfigError(f"--contenders {name}: here, with --device {device}, "
                              f"expected some of {', '.join(known)}")
    if options.without_peers:
        options.contenders = [name for name in options.contenders or known
                              if name not in peers.NAMES]


def declare_device(parser: argparse.ArgumentParser) -> None:
    """Declare where arrays lie."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="where arrays lie; cuda: on GPUs, which ranks take in turn")


def declare_link(parser: argparse._ActionsContainer) -> None:
    """Declare what a node's network link carries."""
    parser.add_argument("--link-rate", type=checked(parse_rate), metavar="RATE",
                        help="of each node's network link, as 1gbit: gives the limit")
    parser.add_argument("--goodput", type=above_zero, default=1448 / 1514, metavar="SHARE",
                        help="of the link's bits that are data; default: 0.956, TCP on Ethernet")


def declare_models(parser: argparse._ActionsContainer) -> None:
    """Declare which PyTorch models are trained."""
    parser.add_argument("--models", type=names(MODELS), default=[MODELS[0]], metavar="A,B",
                        help=f"of {', '.join(MODELS)}; default: {MODELS[0]}")
    parser.add_argument("--parameters", type=counts, default=[13_000_000], metavar="N,M",
                        help="about how many each model has, as 3M,13M,50M; default: 13M")
