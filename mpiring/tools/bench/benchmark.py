"""Runs benchmarks in this MPI job or in new jobs, reports results, and declares options."""

import json
import math
import shlex
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...progress import Progress
from ...provisional import launch
from ..arguments import UsageError, checked, counts, names, not_negative, positive, ranks, share
from ..output import OutputError
from ..plot import DRAWINGS, Drawing
from ..results import check_files, declare_files, write_files
from ..table import Column, Environment, Row
from ..units import parse_rate
from .inputs import WrongAnswerError
from .matrix import Matrix, Report
from .world import World

_DEFAULT_RANKS = 2
LEVELS = ("multiple", "serialized")
MODELS = ("transformer", "convnet", "mlp")
# A job that a benchmark has started prints this line after each case.
BEAT = "case done"


def declare_jobs(parser: ArgumentParser) -> None:
    """Declare the result files, and the number of ranks of the jobs to start."""
    declare_files(parser, "results and environment")
    parser.add_argument("--ranks", type=ranks, metavar="N",
                        help="number of ranks of jobs that start without a launcher (default: 2)")
    parser.add_argument("--part", help=SUPPRESS)


def declare_turns(parser: ArgumentParser, levels: Sequence[str] = LEVELS[:1],
                  rounds: int = 6) -> None:
    """Declare the options of benchmarks whose contenders take turns, with these defaults."""
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N",
                        help=f"number of rounds, each in a random order (default: {rounds})")
    parser.add_argument("--seed", type=not_negative, default=1, metavar="N",
                        help="seed of the random orders (default: 1)")
    parser.add_argument("--levels", type=names(LEVELS), default=list(levels), metavar="A,B",
                        help=f"thread levels of MPI to measure, without a launcher (default: "
                             f"{','.join(levels)})")
    parser.add_argument("--without-peers", action="store_true", help=SUPPRESS)
    declare_jobs(parser)


def declare_device(parser: ArgumentParser) -> None:
    """Declare the device of the arrays."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="device of the arrays, the CPU or GPUs, which are assigned to ranks "
                             "in turn (default: cpu)")


def declare_link(parser: _ActionsContainer) -> None:
    """Declare the rate of a node's network link."""
    parser.add_argument("--link-rate", type=checked(parse_rate), metavar="RATE",
                        help="data rate of each node's network link, as 1gbit, for the limit")
    parser.add_argument("--goodput", type=share, default=1448 / 1514, metavar="SHARE",
                        help="share of the link's bits that are data, 0 to 1 (default: 0.956, "
                             "TCP on Ethernet)")


def declare_models(parser: _ActionsContainer) -> None:
    """Declare which PyTorch models are trained."""
    parser.add_argument("--models", type=names(MODELS), default=[MODELS[0]], metavar="A,B",
                        help=f"models, some of {', '.join(MODELS)} (default: {MODELS[0]})")
    parser.add_argument("--parameters", type=counts, default=[13_000_000], metavar="N,M",
                        help="approximate number of parameters of each model, as 3M,13M,50M "
                             "(default: 13M)")


class Measurement(NamedTuple):
    """The readings of one contender in one case, labeled with both.

    Readings are times in seconds, by kind; empty if the contender does not support the case.
    """

    labels: dict[str, Any]
    readings: dict[str, list[float]]

    def case(self, *keys: str) -> tuple[Any, ...]:
        """Return the labels with these keys."""
        return tuple(self.labels[key] for key in keys)


def pooled(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Merge the measurements that have equal labels, in the order of their first occurrence."""
    joined: dict[str, Measurement] = {}
    for measurement in measurements:
        key = json.dumps(measurement.labels, sort_keys=True)
        known = joined.setdefault(key, Measurement(measurement.labels, {}))
        for name, values in measurement.readings.items():
            known.readings.setdefault(name, []).extend(values)
    return list(joined.values())


def with_case(measurements: Sequence[Measurement], *keys: str,
              ) -> Iterator[tuple[Measurement, dict[str, Measurement]]]:
    """Yield each measurement, with all of its case by contender; `keys` identify a case."""
    cases: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for measurement in measurements:
        cases.setdefault(measurement.case(*keys), {})[measurement.labels["contender"]] = measurement
    for measurement in measurements:
        yield measurement, cases[measurement.case(*keys)]


def least_by_case(measurements: Iterable[Measurement], keys: Sequence[str],
                  seconds: Callable[[Measurement], float]) -> dict[tuple[Any, ...], float]:
    """Return the shortest time of each case, ignoring NaN; `keys` of labels identify a case."""
    least: dict[tuple[Any, ...], float] = {}
    for measurement in measurements:
        case, value = measurement.case(*keys), seconds(measurement)
        if value == value:
            least[case] = min(value, least.get(case, value))
    return least


@dataclass(frozen=True)
class Benchmark:
    """The properties in which benchmarks differ.

    Attributes:
        cases: Returns how many times `measure` yields, given the options.
        measure: Measures together with all ranks, and yields the measurements that are complete.
        layout: Columns of the table, or a function that puts results side by side. The column
            "thread_level" is shown only if there are several levels.
        title: Returns the title of a row's table.
        drawings: Drawings of results, by name of the benchmark.
    """

    name: str
    cases: Callable[[Namespace], int]
    measure: Callable[[World, Namespace], Iterator[list[Measurement]]]
    rows: Callable[[Sequence[Measurement], Environment, Namespace], list[Row]]
    layout: Sequence[Column] | Matrix
    title: Callable[[Row], str] | None = None
    drawings: Mapping[str, Drawing] = field(default_factory=lambda: DRAWINGS)

    def report(self, say: Callable[[str], None], levels: Sequence[str] = ()) -> Report:
        """Return a Report, which prints results as they arrive."""
        return Report(self.name, self.layout, self.title, say, has_levels=len(levels) > 1)


def run(benchmark: Benchmark, options: Namespace) -> int:
    """Measure and report; return the exit status, which is 1 if a contender's sum is wrong.

    Under a launcher, the benchmark runs in that job. Without one, it starts jobs of `--ranks`
    ranks.

    Raises:
        UsageError: `--ranks` is given in a job of several ranks.
        ConfigError: A file cannot be written.
    """
    size, source = launch.launched_size()
    launched = launch.launcher_of() != "" and (size > 1 or launch.launcher_of() != "WORLD_SIZE")
    if options.part or launched and options.ranks is None:
        return _run_here(benchmark, options)
    if launched and size > 1:
        raise UsageError(f"--ranks {options.ranks}: this is a job of {size} ranks already, as "
                         f"{source} says; leave out --ranks, or the launcher")
    return _run_jobs(benchmark, options)


def _run_here(benchmark: Benchmark, options: Namespace) -> int:
    world = World()
    shown, part = world.rank == 0, options.part
    # Other ranks may not see the disk of rank 0. The parent of a part has checked the files.
    if not part:
        world.call_on_all(lambda: check_files(options) if shown else None)
    with Progress(f"bench {benchmark.name}", benchmark.cases(options), shown=shown) as progress:
        results = _Results(benchmark, options, progress)

        def write_part(content: Any) -> None:
            if shown:
                with open(part, "a") as file:
                    file.write(json.dumps(content) + "\n")
            progress.say(BEAT)

        if warning := world.busy_warning():
            progress.say(f"{warning}\n")
        add = write_part if part else results.add
        try:
            add(world.environment())
            for group in benchmark.measure(world, options):
                add(group)
        except WrongAnswerError as error:
            # All ranks raise it, so all of them can exit normally.
            progress.say(f"FAILED: {error}")
            return 1
    if shown and not part:
        results.write()
    world.close()
    return 0


def _run_jobs(benchmark: Benchmark, options: Namespace) -> int:
    """Run one or more jobs, and report the results of all of them."""
    check_files(options)
    jobs = plan(options.levels, options.rounds)
    mpiexec = launch.required_mpiexec()
    cases = sum(benchmark.cases(Namespace(**vars(options) | {"rounds": job.rounds}))
                for job in jobs)
    with (tempfile.TemporaryDirectory() as folder,
          Progress(f"bench {benchmark.name}", cases) as progress):
        results = _Results(benchmark, options, progress, options.levels)
        for number, job in enumerate(jobs):
            part = Path(folder, f"part-{number}.json")
            part.touch()
            with open(part) as lines:
                status = _run_job(
                    ["env", f"MPI4PY_RC_THREAD_LEVEL={job.level}", mpiexec, "-n",
                     str(options.ranks or _DEFAULT_RANKS), sys.executable, *options.words,
                     *job.words(), "--part", str(part)],
                    lambda: results.add(json.loads(lines.readline()),
                                        is_last=number == len(jobs) - 1))
            if status:
                return status
    results.write()
    return 0


class _Results:
    """The results of one or more jobs; each case is printed when the last job completes it.

    The levels are those of the jobs that this process starts; none in a job of a launcher.
    """

    def __init__(self, benchmark: Benchmark, options: Namespace, progress: Progress,
                 levels: Sequence[str] = ()) -> None:
        self._benchmark, self._options, self._progress = benchmark, options, progress
        self._levels, self._report = levels, benchmark.report(progress.say, levels)
        self._about: Environment = {}
        self._measurements: list[Measurement] = []

    def add(self, content: Any, *, is_last: bool = True) -> None:
        """Add the environment of a job, or the measurements of a case."""
        if isinstance(content, dict):
            # The command and the levels are those of all jobs; the rest is that of the first job.
            self._about = self._about or content | ({
                "thread_level": " and ".join(self._levels),
                "command": shlex.join(["python", *self._options.words])} if self._levels else {})
            if is_last:
                self._report.begin(self._about)
            return
        group = [Measurement(*measurement) for measurement in content]
        self._measurements += group
        if is_last and group:
            cases = {_case_of(measurement) for measurement in group}
            self._report.add(self._rows(measurement for measurement in self._measurements
                                        if _case_of(measurement) in cases))
        self._progress.step()

    def write(self) -> None:
        """Write the files."""
        write_files(self._benchmark.name, self._about, self._rows(self._measurements),
                    self._options, self._benchmark.drawings)

    def _rows(self, measurements: Iterable[Measurement]) -> list[Row]:
        return self._benchmark.rows(pooled(measurements), self._about, self._options)


def _case_of(measurement: Measurement) -> str:
    """Return the labels that identify a case, as text."""
    return json.dumps({key: value for key, value in measurement.labels.items()
                       if key not in ("contender", "thread_level")}, sort_keys=True)


class BenchmarkJob(NamedTuple):
    """An MPI job of a benchmark that was started without a launcher.

    The `rounds` are None for benchmarks without rounds. With `peers`, Gloo and Horovod take part.
    They do not depend on MPI's thread level, and are measured at one level only.
    """

    level: str
    rounds: int | None
    peers: bool

    def words(self) -> list[str]:
        """Return the job's own options."""
        rounds = [] if self.rounds is None else ["--rounds", str(self.rounds)]
        return rounds if self.peers else ["--without-peers", *rounds]


def plan(levels: Sequence[str], rounds: int | None) -> list[BenchmarkJob]:
    """Return a job for a single level, or two jobs per level: in order, then in reverse order.

    This way, other programs on the machine disturb all levels equally.
    """
    if len(levels) == 1 or rounds is None:
        return [BenchmarkJob(levels[0], rounds, peers=True)]
    half = math.ceil(rounds / 2)
    return [BenchmarkJob(level, half, peers=level == levels[0])
            for level in (*levels, *reversed(levels))]


def _run_job(command: Sequence[str], beat: Callable[[], None]) -> int:
    """Run a job and forward its output, but call `beat` for each line that is BEAT."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        try:
            for line in job.stdout or ():
                if line.strip() == BEAT:
                    beat()
                else:
                    print(line, end="", flush=True)
        except OutputError:
            # Nobody would see its results.
            job.terminate()
            raise
    return job.returncode
