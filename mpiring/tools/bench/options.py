"""Declares the command lines of `python -m mpiring bench`; works without any MPI library."""

import argparse

from ...config import ALGORITHMS
from ...errors import ConfigError
from ..arguments import above_zero, checked, counts, names, not_negative, positive, seeds
from ..units import parse_count, parse_rate, parse_size, parse_sizes
from . import codecs, peers
from .allreduce import ALLREDUCE, BUFFERS
from .command import Benchmark, run
from .contenders import KINDS
from .inputs import DTYPES
from .jobs import LEVELS
from .overlap import COMPUTES, OVERLAP
from .prefetch import PREFETCH
from .reducers import LEARNING_RATES, NAMES, REDUCERS, complete
from .steps import STEPS
from .torch_steps import MODELS, TORCH_STEPS

_DESCRIPTION = """\
Measures mpiring beside MPI's own allreduce, Gloo and Horovod, where installed.

Under a launcher the benchmark measures in that job:
  mpirun -n 4 python -m mpiring bench allreduce
Without one it starts jobs of its own, at one or several thread levels of MPI:
  python -m mpiring bench allreduce --ranks 4

Before each timed call stands a barrier; a call's time is that of its slowest rank.
Contenders use the same arrays and take turns in random order, in several rounds.
A result that is not the sum ends the benchmark with exit status 1."""

_ABOUT_REDUCERS = """\
Trains a transformer on the text of Python's standard library, from the same weights, with
each way to average gradients, and looks at the loss on other text.

  alone      each rank for itself: the compute only
  dense      plain means, of which all others are measured
  fp16, bf16, int8, onebit, topk, powersgd, powersgd4
             those of mpiring.reducers; int8 with error feedback, topk sends 0.1 %,
             powersgd has rank 2, powersgd4 rank 4

Between nodes only is compressed: it takes several hosts, or MPIRING_SHARED_MEMORY=0.

  compressed  bytes of plain means / bytes sent      reached s  training until the target loss
  on wire     the same, by the hosts' own counters   faster     dense's time until then / this one
  encode, wire, decode  in a step, of the slowest rank; buckets overlap, and hide behind compute"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the commands and their options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    allreduce = commands.add_parser("allreduce", help="time blocking allreduces, size by size")
    overlap = commands.add_parser(
        "overlap", help="how much communication hides behind computation")
    steps = commands.add_parser("steps", help="time the training steps of a NumPy or PyTorch model")
    reducers = commands.add_parser(
        "reducers", help="what compressing gradients saves and costs in training (PyTorch)")
    loading = commands.add_parser(
        "prefetch", help="what it costs that data comes from the host (PyTorch)")
    encoders = commands.add_parser(
        "codecs", help="how fast gradients are encoded, on one core or a GPU; needs no MPI")
    plot = commands.add_parser("plot", help="draw what --json has written")
    _declare_allreduce(allreduce)
    _declare_overlap(overlap)
    _declare_steps(steps)
    _declare_prefetch(loading)
    for command, benchmark in ((allreduce, ALLREDUCE), (overlap, OVERLAP), (steps, STEPS),
                               (loading, PREFETCH)):
        _declare_turns(command, benchmark)
        _declare_common(command)
    for command in (allreduce, overlap, steps):
        _declare_contenders(command)
    _declare_reducers(reducers)
    _declare_common(reducers)
    encoders.add_argument("--elements", type=checked(parse_count), default=4_000_000,
                          help="numbers in a vector; default: 4M")
    _declare_device(encoders)
    encoders.add_argument("--json", metavar="FILE", help="write results; -: to stdout alone")
    encoders.set_defaults(action=codecs.run)
    plot.add_argument("results", metavar="FILE.json", help="-: standard input")
    plot.add_argument("plot", metavar="FILE.png")
    plot.set_defaults(action=_plot)


def _declare_turns(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """Declare what the benchmarks share in which contenders take turns."""
    parser.set_defaults(action=lambda options: run(_completed(benchmark, options), options),
                        contenders=None)
    levels = LEVELS if benchmark is ALLREDUCE else LEVELS[:1]
    parser.add_argument("--rounds", type=positive, default=6, help="default: 6")
    parser.add_argument("--seed", type=int, default=1, help="of the random orders")
    parser.add_argument("--levels", type=names(LEVELS), default=list(levels), metavar="A,B",
                        help=f"MPI's thread levels, in jobs of its own; default: "
                             f"{','.join(levels)}")
    parser.add_argument("--without-peers", action="store_true", help=argparse.SUPPRESS)


def _declare_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contenders", type=names(KINDS), metavar="A,B",
                        help=f"of {', '.join(KINDS)}; default: all that are installed")
    parser.add_argument("--interface", metavar="NAME", help="network interface for Gloo")


def _declare_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE",
                        help="write results and environment; -: to stdout alone")
    parser.add_argument("--csv", metavar="FILE",
                        help="write results and environment; -: to stdout alone")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.add_argument("--ranks", type=positive,
                        help="of jobs of its own, where there is no launcher; default: 2")
    parser.add_argument("--part", help=argparse.SUPPRESS)


def _declare_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="where arrays lie; cuda: on GPUs, which ranks take in turn")


def _declare_allreduce(parser: argparse.ArgumentParser) -> None:
    _declare_device(parser)
    parser.add_argument("--sizes", type=checked(parse_sizes), default=parse_sizes("8..64M"),
                        help="a list, 8,1K,64M, or a range in factors of 4, cut to whole "
                             "numbers, at least one; default: 8..64M")
    parser.add_argument("--algorithms", type=names(ALGORITHMS), metavar="A,B",
                        help=f"of mpiring; default: {','.join(ALGORITHMS)}; auto always")
    parser.add_argument("--buffers", type=names(BUFFERS), default=["empty"], metavar="A,B",
                        help="empty (comm.empty) or private (numpy.empty); on a GPU, ranks open "
                             "the former to each other, and stage the latter; default: empty")
    parser.add_argument("--dtypes", type=names(DTYPES), default=["float32"], metavar="A,B",
                        help=f"of {', '.join(DTYPES)}; default: float32")
    parser.add_argument("--budget", type=above_zero, default=0.3, metavar="SECONDS",
                        help="per contender and case, over all rounds; default: 0.3")
    _declare_link(parser)


def _declare_link(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--link-rate", type=checked(parse_rate), metavar="RATE",
                        help="of each node's network link, as 1gbit: gives the limit")
    parser.add_argument("--goodput", type=above_zero, default=1448 / 1514, metavar="SHARE",
                        help="of the link's bits that are data; default: 0.956, TCP on Ethernet")


def _declare_overlap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=checked(parse_size), default=20_000_000,
                        help="of all buckets together; default: 20MB")
    parser.add_argument("--bucket", type=checked(parse_size), default=5_000_000,
                        help="of one bucket; default: 5MB")
    parser.add_argument("--ratio", type=above_zero, default=1.8,
                        help="compute / communication; default: 1.8")
    parser.add_argument("--computes", type=names(COMPUTES), default=list(COMPUTES),
                        metavar="A,B", help=f"default: {','.join(COMPUTES)}")


def _declare_steps(parser: argparse.ArgumentParser) -> None:
    _declare_device(parser)
    parser.add_argument("--framework", choices=("numpy", "torch"), default="numpy",
                        help="default: numpy")
    parser.add_argument("--batch", type=positive,
                        help="per rank; default: 64, with PyTorch one for each model")
    parser.add_argument("--bucket", type=checked(parse_size),
                        help="bytes that are fused into a message; default: 4MiB, with PyTorch "
                             "what DataParallel and DDP have by themselves")
    parser.add_argument("--calls", type=positive, default=5, help="steps per round; default: 5")
    numpy = parser.add_argument_group("with --framework numpy: a multilayer perceptron")
    numpy.add_argument("--width", type=positive, default=1024, help="default: 1024")
    numpy.add_argument("--layers", type=positive, default=3, help="default: 3")
    torch = parser.add_argument_group("with --framework torch")
    _declare_models(torch)
    _declare_link(torch)


def _declare_models(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--models", type=names(MODELS), default=[MODELS[0]], metavar="A,B",
                        help=f"of {', '.join(MODELS)}; default: {MODELS[0]}")
    parser.add_argument("--parameters", type=counts, default=[13_000_000], metavar="N,M",
                        help="about how many each model has, as 3M,13M,50M; default: 13M")


def _declare_prefetch(parser: argparse.ArgumentParser) -> None:
    _declare_device(parser)
    _declare_models(parser)
    parser.add_argument("--batch", type=positive, help="per rank; default: one for each model")
    parser.add_argument("--calls", type=positive, default=20, help="steps per round; default: 20")
    parser.add_argument("--depth", type=positive, default=2,
                        help="batches that are fetched ahead; default: 2")


def _declare_reducers(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT_REDUCERS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(action=lambda options: run(REDUCERS, complete(options)),
                        rounds=None, levels=list(LEVELS[:1]))
    parser.add_argument("--reducers", type=names(NAMES), default=list(NAMES), metavar="A,B",
                        help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--parameters", type=checked(parse_count), default=13_000_000,
                        metavar="N", help="about how many the transformer has; default: 13M")
    parser.add_argument("--steps", type=positive, default=100, help="default: 100")
    parser.add_argument("--batch", type=positive, default=4, metavar="TEXTS",
                        help="of 64 bytes, per rank; default: 4")
    parser.add_argument("--optimizer", choices=tuple(LEARNING_RATES), default="adamw",
                        help="default: adamw; sgd has no momentum")
    parser.add_argument("--learning-rate", type=above_zero, metavar="RATE",
                        help="default: " + ", ".join(
                            f"{rate:g} with {name}" for name, rate in LEARNING_RATES.items()))
    parser.add_argument("--warmup-steps", type=not_negative, metavar="N",
                        help="for reducers that begin gently; not timed with any; "
                             "default: a tenth of the steps")
    parser.add_argument("--seeds", type=seeds, default=[1], metavar="A,B",
                        help="of the choice of texts, a training each; default: 1")
    parser.add_argument("--validate-every", type=positive, metavar="STEPS",
                        help="default: a twentieth of the steps")
    parser.add_argument("--validation-texts", type=positive, default=128, metavar="TEXTS",
                        help="of 64 bytes; default: 128")
    parser.add_argument("--target-loss", type=above_zero, metavar="BITS",
                        help="per byte; default: what dense reaches after 80%% of its steps, "
                             "rounded up to a hundredth")
    parser.add_argument("--time-limit", type=above_zero, metavar="SECONDS",
                        help="of training, validation not counted, for each method and seed")


def _completed(benchmark: Benchmark, options: argparse.Namespace) -> Benchmark:
    """Return the benchmark that is meant; complete the options that depend on others.

    Raises:
        ConfigError: Some of them do not go together.
    """
    if benchmark is STEPS:
        benchmark = _of_framework(options)
    # To overlap is measured in host memory only.
    device = getattr(options, "device", "cpu")
    known = _able(benchmark, device)
    for name in options.contenders or ():
        if name not in known:
            raise ConfigError(f"--contenders {name}: here, with --device {device}, "
                              f"expected some of {', '.join(known)}")
    if options.without_peers:
        options.contenders = [name for name in options.contenders or known
                              if name not in peers.NAMES]
    return benchmark


def _able(benchmark: Benchmark, device: str) -> tuple[str, ...]:
    """Return the kinds of contenders that can take part."""
    if benchmark is TORCH_STEPS:
        return ("mpiring", *peers.NAMES) if device == "cpu" else ("mpiring", "gloo")
    return ("mpiring", "mpi", *peers.NAMES) if device == "cpu" else ("mpiring", "mpi", "nccl")


def _of_framework(options: argparse.Namespace) -> Benchmark:
    """Return the benchmark of training steps, and give its options their defaults."""
    if options.framework == "torch":
        return TORCH_STEPS
    if options.device != "cpu":
        raise ConfigError("--device cuda needs --framework torch")
    options.batch = options.batch or 64
    options.bucket = options.bucket or 4 << 20
    return STEPS


def _plot(options: argparse.Namespace) -> int:
    from ..plot import draw
    from ..files import read_json
    draw(options.plot, *read_json(options.results))
    return 0
