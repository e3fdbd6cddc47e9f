"""Runs a benchmark in this MPI job, or in jobs of its own, and reports what came out."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ...launch.environment import launched_size, launcher_of
from ...progress import Progress
from .. import table
from ..files import Environment, Row
from ..reporting import check_files, report
from ..table import Column
from . import jobs, results
from .inputs import WrongAnswerError
from .results import Measurement
from .world import World

_DEFAULT_RANKS = 2


@dataclass(frozen=True)
class Benchmark:
    """What the commands differ in.

    Attributes:
        name: Of the command.
        cases: Returns how many cases the options ask for.
        measure: Measures case after case, together with all ranks.
        rows: Makes a table's rows out of measurements.
        columns: Returns the columns, given whether there are several thread levels.
    """

    name: str
    cases: Callable[[Namespace], int]
    measure: Callable[[World, Namespace], Iterator[list[Measurement]]]
    rows: Callable[[Sequence[Measurement], Environment, Namespace], list[Row]]
    columns: Callable[[bool], list[Column]]


def run(benchmark: Benchmark, options: Namespace) -> int:
    """Measure and report; return the exit status, which is 1 if a contender's sum is wrong.

    A launcher's job is measured as it is. Without one, jobs of `--ranks` ranks are started.

    Args:
        options: As `options.declare` has declared them.

    Raises:
        ConfigError: `--ranks` in a launcher's job of several ranks, or a file cannot be written.
    """
    size, source = launched_size()
    launched = launcher_of() != "" and (size > 1 or launcher_of() != "WORLD_SIZE")
    if options.part or launched and options.ranks is None:
        return _run_here(benchmark, options)
    if launched and size > 1:
        raise ConfigError(f"--ranks {options.ranks}: this is a job of {size} ranks already, as "
                          f"{source} says; leave out --ranks, or the launcher")
    return _run_jobs(benchmark, options)


def _run_here(benchmark: Benchmark, options: Namespace) -> int:
    world = World()
    shown = world.rank == 0
    # The others may not see rank 0's disk. Whoever has started a part of a benchmark has looked.
    if not options.part:
        world.everywhere(lambda: None if world.rank else check_files(options))
    about = results.environment(world)
    reporter = _Reporter(benchmark, options, several_levels=False, shown=shown)
    found: list[Measurement] = []
    try:
        reporter.begin(about)
        for group in benchmark.measure(world, options):
            found += group
            reporter.case(benchmark.rows(group, about, options))
    except WrongAnswerError as error:
        # Raised on all ranks alike, so that all can leave in order.
        reporter.failed(error)
        return 1
    finally:
        reporter.close()
    if shown and options.part:
        jobs.write_part(options.part, about, found)
    elif shown:
        report(benchmark.name, about, benchmark.rows(found, about, options), options)
    world.close()
    return 0


def _run_jobs(benchmark: Benchmark, options: Namespace) -> int:
    check_files(options)
    ranks = _DEFAULT_RANKS if options.ranks is None else options.ranks
    planned = jobs.plan(options.levels, options.rounds)
    progress = Progress(f"bench {benchmark.name}", len(planned) * benchmark.cases(options))
    with contextlib.closing(progress):
        status, about, found = jobs.run_all(planned, ranks, options.words, progress.step)
    if status:
        return status
    several = len(options.levels) > 1
    reporter = _Reporter(benchmark, options, several_levels=several)
    rows = benchmark.rows(results.pooled(found), about, options)
    reporter.begin(about)
    reporter.case(rows)
    report(benchmark.name, about, rows, options)
    return 0


class _Reporter:
    """Prints the table as it grows; in a job of another benchmark's process, only a beat."""

    def __init__(self, benchmark: Benchmark, options: Namespace, *, several_levels: bool,
                 shown: bool = True) -> None:
        self._name, self._beat = benchmark.name, bool(options.part)
        self._columns = benchmark.columns(several_levels)
        self._progress = Progress(
            f"bench {benchmark.name}", benchmark.cases(options), shown=shown)

    def begin(self, about: Environment) -> None:
        """Print what stands above the table."""
        if not self._beat:
            self._progress.say(table.about(self._name, about))
            self._progress.say(table.head(self._columns))

    def case(self, rows: Sequence[Row]) -> None:
        """Print the rows of a case."""
        for row in rows if not self._beat else ():
            self._progress.say(table.line(row, self._columns))
        if self._beat:
            self._progress.say(jobs.BEAT)
        self._progress.step()

    def failed(self, error: WrongAnswerError) -> None:
        """Say that the benchmark has failed."""
        self._progress.say(f"FAILED: {error}")

    def close(self) -> None:
        """Take the bar away."""
        self._progress.close()
