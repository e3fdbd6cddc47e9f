"""Says which results each figure shows, how it is drawn, and what stands in its table."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mpiring.tools import files, plot
from mpiring.tools.picture import COLOURS, GREY, INK, name_bars, picture
from mpiring.tools.table import significant
from mpiring.tools.units import size_text

HERE = Path(__file__).parent
OURS, PERSISTENT, MPI = "mpiring auto", "mpiring persistent", "MPI_Allreduce"


@dataclass(frozen=True)
class Result:
    """What `bench ... --json` has written."""

    benchmark: str
    about: dict
    rows: list


@lru_cache(None)
def result_of(name):
    """Return a result of the folder data."""
    return Result(*files.read_json(str(HERE / "data" / f"{name}.json")))


@dataclass(frozen=True)
class Figure:
    """A picture and a table.

    Attributes:
        name: Of the picture, and in the comments of the page.
        page: Where it stands; "" for a picture alone.
        results: Names of files in the folder data, without .json.
        alt: What the picture shows, in words.
        table: Returns the lines of the table, given the results.
        draw: Writes the picture, given its path and the results; None: a table alone.
        folder: Of the picture.
    """

    name: str
    page: str
    results: tuple
    alt: str
    table: object
    draw: object
    folder: Path = HERE / "pictures"

    @property
    def picture(self):
        """The path of the picture."""
        return self.folder / f"{self.name}.svg"


def markdown(head, rows):
    """Return the lines of a table: the first column is text, the others are numbers."""
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]


def number(value, digits=3):
    """Return a number with so many significant digits; a dash for none."""
    return "-" if value is None or value != value else significant(value, digits)


def quotient(value):
    """Return a ratio with two digits behind the point, or three digits in all."""
    return "-" if value is None or value != value else f"{value:.2f}" if value < 10 else \
        significant(value, 2)


def at_best_level(rows, *keys):
    """Return rows of the better thread level of each contender and case, in their order."""
    best = {}
    for row in rows:
        case = tuple(row[key] for key in (*keys, "contender"))
        if case not in best or row["median_us"] < best[case]["median_us"]:
            best[case] = {**row, "thread_level": ""}
    return list(best.values())


def drawn(select=None, **options):
    """Return a `draw` that leaves the picture to `bench --plot`'s code."""
    def draw(path, result, *_):
        rows = select(result.rows) if select else result.rows
        plot.draw(path, result.benchmark, result.about, rows, **options)

    return draw


# Allreduces, over size.

def allreduces(buffer):
    """Return what selects the rows of a kind of buffer."""
    return lambda rows: [row for row in at_best_level(rows, "bytes", "buffer", "dtype")
                         if row["buffer"] == buffer]


def by_size(rows, key="median_us"):
    """Return values by contender, by size."""
    found = {}
    for row in rows:
        found.setdefault(row["bytes"], {})[row["contender"]] = row[key]
    return found


def allreduce_table(buffer):
    """Return a table of the times of each contender by size, and of MPI's over ours."""
    def table(result):
        rows = allreduces(buffer)(result.rows)
        shown = {OURS: "mpiring", MPI: "MPI", "Gloo": "Gloo", "Horovod": "Horovod"}
        names = [name for name in shown if any(row["contender"] == name for row in rows)]
        return markdown(
            ["size", *(f"{shown[name]}, µs" for name in names),
             *(f"{shown[name]} / mpiring" for name in names[1:])],
            [[size_text(nbytes), *(number(times[name]) for name in names),
              *(quotient(times[name] / times[OURS]) for name in names[1:])]
             for nbytes, times in sorted(by_size(rows).items())])

    return table


def of_limit_table(*results):
    """Return a table of times over those that the links need, by hosts and size."""
    names = {OURS: "mpiring", MPI: "MPI", "Gloo": "Gloo", "Horovod": "Horovod"}
    rows = []
    for result in results:
        found = [row for row in result.rows if row["contender"] in names]
        for nbytes, ratios in sorted(by_size(found, "this_over_limit").items()):
            limit = next(row["limit_us"] for row in found if row["bytes"] == nbytes)
            rows.append([hosts_of(result.about), size_text(nbytes), number(limit / 1e3),
                         *(quotient(ratios.get(name)) for name in names)])
    return markdown(["hosts × ranks", "size", "limit, ms",
                     *(f"{name} / limit" for name in names.values())], rows)


def hosts_of(about):
    """Return hosts × ranks, and that ranks are dealt out where they are."""
    dealt = ", dealt" if "round-robin" in about["lab"] else ""
    return f"{about['nodes']} × {about['ranks'] // about['nodes']}{dealt}"


def bars(axes, names, values, texts, ours=()):
    """Draw horizontal bars with texts at their ends; those of ours are blue, others grey."""
    colours = [COLOURS[0] if name in ours else GREY for name in names]
    drawn_bars = axes.barh(range(len(names)), values, color=colours, height=0.7)
    axes.bar_label(drawn_bars, texts, padding=4)
    name_bars(axes, names)
    for label, colour in zip(axes.get_yticklabels(), colours):
        label.set_color(COLOURS[0] if colour == COLOURS[0] else INK)
    axes.margins(x=0.3)


def of_limit_bars(path, *results):
    """Draw times over those that the links need, at the largest size."""
    shown = {OURS: "mpiring", "Gloo": "Gloo", MPI: "MPI"}
    names, values = [], []
    for result in results:
        for contender, name in shown.items():
            names.append(f"{name}, {hosts_of(result.about)}")
            values.append(next(row["this_over_limit"] for row in result.rows
                               if row["contender"] == contender and row["bytes"] == 16 << 20))
    with picture(path, [0.9 + 0.24 * len(names)], 1, "allreduce of 16 MiB, hosts × ranks, links "
                 "of 1 Gbit/s") as ((axes,),):
        bars(axes, names, values, [f"{value:.2f}" for value in values],
             [name for name in names if name.startswith("mpiring")])
        axes.axvline(1, color=COLOURS[1], linestyle="--", linewidth=1.5)
        axes.set_xlabel("time / what the bytes need on the links (dashed: 1)")


# Short calls.

def latency_table(buffer):
    """Return a table of the calls of each collective, by size."""
    def table(result):
        rows = [row for row in at_best_level(result.rows, "test", "bytes", "buffer")
                if row["buffer"] == buffer]
        sizes = sorted({row["bytes"] for row in rows})
        lines = []
        for test in dict.fromkeys(row["test"] for row in rows):
            of_test = [row for row in rows if row["test"] == test]
            native = next(row["contender"] for row in of_test if row["contender"][:4] == "MPI_")
            for name, label in ((native, native), (OURS, f"`comm.{OUR_NAMES[test]}`"),
                                (PERSISTENT, "persistent")):
                times = {row["bytes"]: row["median_us"] for row in of_test
                         if row["contender"] == name}
                lines.append([label, *(number(times[nbytes], 2) for nbytes in sizes)])
        return markdown(["µs", *map(size_text, sizes)], lines)

    return table


OUR_NAMES = {"allreduce": "allreduce", "iallreduce": "iallreduce", "allgather": "allgather",
             "bcast": "broadcast", "reduce_scatter": "reduce_scatter"}


def short_calls(buffer):
    """Return a `draw` of the calls on one kind of buffer."""
    return drawn(lambda rows: [row for row in at_best_level(rows, "test", "bytes", "buffer")
                               if row["buffer"] == buffer])


# Training steps.

ALONE, PARALLEL, BACK_END = "compute only", "mpiring DataParallel", "mpiring + PyTorch's DDP"
GLOO = "Gloo + PyTorch's DDP"
STEP_NAMES = {ALONE: "compute alone", PARALLEL: "mpiring `DataParallel`",
              "mpiring Sharded": "`Sharded`",
              "mpiring Sharded overlap": "`Sharded`, `overlap=True`",
              "mpiring Sharded node": "`Sharded`, `weights=\"node\"`",
              BACK_END: "mpiring back end + DDP", GLOO: "Gloo + DDP", "Horovod": "Horovod"}


def step_table(*titles):
    """Return a table of training steps, with chosen columns."""
    columns = {
        "step, ms": lambda row: number(row["median_ms"]),
        "/ compute": lambda row: quotient(row["over_compute"]),
        "/ Gloo": lambda row: quotient(row["over_gloo"]),
        "/ bound": lambda row: quotient(row["over_bound"]),
        "hidden %": lambda row: number(row["hidden_percent"], 2),
        "extra MiB": lambda row: number(row["extra_MiB"], 2),
        "B/p": lambda row: number(row["node_bytes_per_parameter"]),
        "formula": lambda row: number(row["formula_bytes_per_parameter"])}

    def table(result):
        return markdown(["", *titles], [
            [STEP_NAMES.get(row["contender"], row["contender"]),
             *(columns[title](row) for title in titles)] for row in result.rows])

    return table


def models_table(result):
    """Return a table of each model's steps over its compute."""
    models = list(dict.fromkeys(row["model"] for row in result.rows))
    names = [name for name in dict.fromkeys(row["contender"] for row in result.rows)
             if name != ALONE]
    found = {(row["model"], row["contender"]): row for row in result.rows}
    head = ["step / compute", *(
        f"{model}, {found[model, ALONE]['parameters'] / 1e6:.1f} M" for model in models)]
    return markdown(head, [
        ["compute alone, ms", *(number(found[model, ALONE]["median_ms"]) for model in models)],
        *([STEP_NAMES[name], *(quotient(found[model, name]["over_compute"]) for model in models)]
          for name in names)])


def plain(name):
    """Return a name without Markdown."""
    return name.replace("`", "")


def step_bars(title):
    """Return a `draw` of the steps of one model, over those that only compute."""
    def draw(path, result):
        with picture(path, [0.9 + 0.3 * len(result.rows)], 1, title) as ((axes,),):
            _step_panel(axes, result.rows)
            axes.set_xlabel("step / compute alone (median over rounds)")

    return draw


def _step_panel(axes, rows):
    names = [plain(STEP_NAMES.get(row["contender"], row["contender"])) for row in rows]
    bars(axes, names, [row["over_compute"] for row in rows], [
        f"{row['median_ms']:.0f} ms" if row["contender"] == ALONE else
        f"× {row['over_compute']:.2f}" for row in rows],
        [name for name in names if "mpiring" in name or "Sharded" in name])


def speed(path, steps, calls):
    """Draw README's picture: a training step, and an allreduce, beside MPI, Gloo and Horovod."""
    about, parameters = steps.about, steps.rows[0]["parameters"] / 1e6
    with picture(path, [2.9], 2, f"{about['cpu']}, {about['cores']} cores, {about['ranks']} ranks; "
                 f"transformer of {parameters:.1f} M parameters") as ((left, right),):
        _step_panel(left, steps.rows)
        left.set_xticks([])
        left.spines["bottom"].set_visible(False)
        left.set_title("training step", loc="left")
        times = by_size(allreduces("empty")(calls.rows))[64 << 20]
        shown = {OURS: "mpiring", MPI: "MPI", "Gloo": "Gloo", "Horovod": "Horovod"}
        bars(right, list(shown.values()), [times[name] / 1e3 for name in shown],
             [f"{times[name] / 1e3:.3g} ms" for name in shown], ["mpiring"])
        right.set_xticks([])
        right.spines["bottom"].set_visible(False)
        right.set_title("allreduce of 64 MiB", loc="left")


# Which results stand where.

DOCS = HERE.parent
FIGURES = [
    Figure("speed", "", ("steps_2", "allreduce_horovod_2"), "", None, speed, DOCS / "pictures"),
    *(Figure(f"allreduce_{ranks}_{buffer}", "allreduce.md", (f"allreduce_{ranks}",),
             f"Time and bandwidth over size, {ranks} ranks, {words}",
             allreduce_table(buffer), drawn(allreduces(buffer)))
      for ranks in (2, 4)
      for buffer, words in (("empty", "comm.empty"), ("private", "private memory"))),
    *(Figure(f"allreduce_horovod_{ranks}", "allreduce.md", (f"allreduce_horovod_{ranks}",),
             f"The same with Horovod, {ranks} ranks", allreduce_table("empty"),
             drawn(allreduces("empty"))) for ranks in (2,)),
]
