"""Runs a benchmark in this MPI job, or in jobs of its own, and reports the results."""

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
    """What benchmarks differ in.

    Attributes:
        name: Of the command.
        cases: How many times `measure` yields, given the options.
        measure: Measures together with all ranks, and yields the measurements that are complete.
        rows: Makes a table's rows out of measurements.
        columns: Of the table; "thread_level" is shown only where there are several.
        lines: Returns rows as lines, of a benchmark whose results are no table of `columns`.
    """

    name: str
    cases: Callable[[Namespace], int]
    measure: Callable[[World, Namespace], Iterator[list[Measurement]]]
    rows: Callable[[Sequence[Measurement], Environment, Namespace], list[Row]]
    columns: Sequence[Column] = ()
    lines: Callable[[Sequence[Row]], list[str]] | None = None


def run(benchmark: Benchmark, options: Namespace) -> int:
    """Measure and report; return the exit status, which is 1 if a contender's sum is wrong.

    A launcher's job is measured as it is. Without one, jobs of `--ranks` ranks are started.

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
    # Other ranks may not see rank 0's disk. The process that started a part has checked already.
    if not options.part:
        world.everywhere(lambda: check_files(options) if shown else None)
    about = results.environment(world)
    reporter = _Reporter(benchmark, options, shown=shown)
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
    reporter = _Reporter(benchmark, options, several_levels=len(options.levels) > 1)
    rows = benchmark.rows(results.pooled(found), about, options)
    reporter.begin(about)
    reporter.case(rows)
    report(benchmark.name, about, rows, options)
    return 0


class _Reporter:
    """Prints the table as it grows; in a job that measures a part, only a beat."""

    def __init__(self, benchmark: Benchmark, options: Namespace, *, several_levels: bool = False,
                 shown: bool = True) -> None:
        self._name, self._is_part = benchmark.name, bool(options.part)
        self._lines = benchmark.lines or self._of_table
        self._columns = [column for column in benchmark.columns
                         if several_levels or column.key != "thread_level"]
        self._progress = Progress(
            f"bench {benchmark.name}", benchmark.cases(options), shown=shown)

    def begin(self, about: Environment) -> None:
        """Print the lines above the table."""
        if not self._is_part:
            self._progress.say(table.about(self._name, about))
            if self._columns:
                self._progress.say(table.head(self._columns))

    def case(self, rows: Sequence[Row]) -> None:
        """Print the rows of a case."""
        for line in [jobs.BEAT] if self._is_part else self._lines(rows):
            self._progress.say(line)
        self._progress.step()

    def _of_table(self, rows: Sequence[Row]) -> list[str]:
        return [table.line(row, self._columns) for row in rows]

    def failed(self, error: WrongAnswerError) -> None:
        """Print that the benchmark has failed."""
        self._progress.say(f"FAILED: {error}")

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.close()
