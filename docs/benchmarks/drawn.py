"""Draws the pictures of figures, with the means of `bench --plot`."""

import measured
from measured import (
    ALONE, CONTENDERS, GLOO, MPI, NARROW, OURS, PARALLEL, STEP_NAMES, allreduces, at_best_level,
    by_size, case_of, hosts_of,
)
from tabulated import LOADERS, LOCAL, best_rate

from benchmarks import plot as studies
from mpiring.tools import plot
from mpiring.tools.picture import (
    COLORS, GRAY, INK, curve_style, label_measured, name_bars, picture,
)
from mpiring.tools.simulate import step_command

_BAR_INCHES, _FRAME_INCHES = 0.29, 1.0
# Most that the text at a bar's end takes, over the length of the longest bar.
_TEXT_WIDTH = 0.15


def plotted(select=lambda rows: rows):
    """Return a `draw` that leaves the picture of some rows to `bench --plot`'s code."""
    return lambda path, result, *_: plot.draw(
        path, result.benchmark, result.about, select(result.rows),
        {**plot.DRAWINGS, **studies.DRAWINGS})


def short_calls(buffer):
    """Return a `draw` of the calls on one kind of buffer."""
    return plotted(lambda rows: [row for row in at_best_level(rows, "test", "bytes", "buffer")
                                 if row["buffer"] == buffer])


def bars(axes, entries, limit=None):
    """Draw horizontal bars: of each its name, value, the text at its end, and whether it is ours.

    Ours are blue, others gray. A limit is a dashed line, which crosses no text.
    """
    names, values, texts, ours = zip(*entries)
    colors = [COLORS[0] if mine else GRAY for mine in ours]
    drawn_bars = axes.barh(range(len(names)), values, color=colors, height=0.7)
    for text, value in zip(axes.bar_label(drawn_bars, texts, padding=4), values):
        if limit and value < limit < value + _TEXT_WIDTH * max(values):
            text.xy = limit, text.xy[1]
    if limit:
        axes.axvline(limit, color=COLORS[1], linestyle="--", linewidth=1.5)
    name_bars(axes, names)
    for label, mine in zip(axes.get_yticklabels(), ours):
        label.set_color(COLORS[0] if mine else INK)
    axes.margins(x=0.25)


def barred(entries, title, label, limit=None):
    """Return a `draw` of horizontal bars.

    Args:
        entries: Function of the results that returns the entries for `bars`.
        title: Title of the picture.
        label: Label of the values.
        limit: Value of a dashed line; None for no line.
    """
    def draw(path, *results):
        found = entries(*results)
        height = _FRAME_INCHES + _BAR_INCHES * len(found)
        with picture(path, [height], 1, title) as ((axes,),):
            bars(axes, found, limit)
            axes.set_xlabel(label)

    return draw


def of_limit(*results):
    """Return times over what the links need, at 16 MiB."""
    found = []
    for result in results:
        for row in result.rows:
            name = CONTENDERS.get(row["contender"])
            if name and row["bytes"] == 16 << 20:
                found.append((f"{name}, {hosts_of(result.about)}", row["this_over_limit"],
                              f"{row['this_over_limit']:.2f}", name == "mpiring"))
    return found


def steps(key="over_compute"):
    """Return what returns training steps over the compute or a bound, or their memory."""
    def entries(result):
        found = []
        for row in result.rows:
            name = STEP_NAMES.get(row["contender"], row["contender"]).replace("`", "")
            value = (measured.over(result.rows, row, contender=ALONE)[0]
                     if key == "over_compute" else row[key])
            text = (f"{row['median_ms']:.0f} ms" if row["contender"] == ALONE else
                    f"{value:.1f}" if key == "node_bytes_per_parameter" else f"× {value:.2f}")
            if value == value:
                found.append((name, value, text, "mpiring" in row["contender"]))
        return found

    return entries


def models(path, result):
    """Draw the steps of several models."""
    names = list(dict.fromkeys(row["model"] for row in result.rows))
    of = {name: [row for row in result.rows if row["model"] == name] for name in names}
    with picture(path, [0.5 + _BAR_INCHES * len(rows) for rows in of.values()], 1,
                 "training step / compute alone, 2 ranks on one node; shorter is better") as grid:
        for (axes,), (name, rows) in zip(grid, of.items()):
            bars(axes, steps()(type(result)("", {}, rows)))
            axes.set_title(f"{name}, {rows[0]['parameters'] / 1e6:.1f} M parameters", loc="left")
            axes.set_xlim(0, 1.5)


def speed(path, training, calls):
    """Draw the picture of README: a training step and an allreduce, with MPI, Gloo and Horovod."""
    about, parameters = training.about, training.rows[0]["parameters"] / 1e6
    caption = (f"{about['cpu']}, {about['cores']} cores, {about['ranks']} ranks; transformer "
               f"of {parameters:.1f} M parameters")
    times = {buffer: by_size(allreduces(buffer)(calls.rows))[64 << 20]
             for buffer in ("empty", "private")}
    names = {("empty", OURS): "mpiring, comm.empty", ("private", OURS): "mpiring, other arrays",
             **{("private", name): CONTENDERS[name] for name in CONTENDERS
                if name in times["private"] and name != OURS}}
    panels = {
        "training step": [
            (STEP_NAMES.get(row["contender"], row["contender"]).replace("`", ""),
             row["median_ms"], f"{row['median_ms']:.0f} ms", "mpiring" in row["contender"])
            for row in training.rows],
        "allreduce of 64 MiB": [
            (name, times[buffer][contender] / 1e3, f"{times[buffer][contender] / 1e3:.3g} ms",
             contender == OURS) for (buffer, contender), name in names.items()]}
    with picture(path, [2.9], 2, caption) as (both,):
        for axes, (title, entries) in zip(both, panels.items()):
            bars(axes, entries)
            axes.set_title(title, loc="left")
            axes.set_xlabel("ms, median; shorter is better")
            axes.margins(x=0.35)


def in_short(path, *results):
    """Draw the picture of README: training steps with mpiring and with Gloo."""
    names = {"mpiring": PARALLEL, "Gloo + DDP": GLOO}
    titles = "2 ranks on one node", "2 hosts, 1 Gbit/s"
    with picture(path, [1.8], 2, "PyTorch training step / its computation alone, with 95 % "
                 "intervals; shorter is better") as (both,):
        for axes, result, title in zip(both, results, titles):
            ratios = [measured.over(result.rows, row, contender=ALONE) for key in names.values()
                      for row in result.rows if row["contender"] == key]
            bars(axes, [(name, value, "", name == "mpiring")
                        for name, (value, *_) in zip(names, ratios)])
            for place, (value, low, high) in enumerate(ratios):
                axes.errorbar(value, place, xerr=[[value - low], [high - value]],
                              color=COLORS[1], capsize=4)
                axes.text(high + 0.1, place, f"{value:.2f} ({low:.2f} to {high:.2f})",
                          va="center")
            axes.axvline(1, color=INK, linestyle="--", linewidth=1.5)
            axes.set(title=title, xlim=(0, 4.6), xticks=[0, 1, 2, 3],
                     xlabel="dashed: computation alone")


def sixteen_bits(result):
    """Return times of 16-bit numbers over that of as many in float32."""
    ratios = [(f"{count:,} {narrow}", times[narrow] / times["float32"])
              for count, times in measured.sixteen_bits(result).items() for narrow in NARROW]
    return [(name, ratio, f"{ratio:.2f}", ratio < 1) for name, ratio in ratios]


def memory(*results):
    """Return the memory of the gradients' communication."""
    found = []
    for result in results:
        about = result.about
        where = hosts_of(about) if "lab" in about else f"1 × {about['ranks']}"
        for row in result.rows:
            if row["contender"] in (PARALLEL, f"{MPI} after backward"):
                ours = row["contender"] == PARALLEL
                name = about["variables"]["MPIRING_ALGORITHM"] if ours else "MPI"
                found.append((f"{name}, {where}", row["extra_MiB"], f"{row['extra_MiB']:.1f}",
                              ours))
    return found


def reducers(result):
    """Return steps with each Reducer."""
    ratios = {row["reducer"]: measured.over(result.rows, row, reducer="alone")[0]
              for row in result.rows}
    return [(row["reducer"], ratios[row["reducer"]], f"{row['median_ms']:.0f} ms"
             if row["reducer"] == "alone" else f"× {ratios[row['reducer']]:.2f}",
             row["reducer"] not in ("alone", "dense")) for row in result.rows]


def codecs(result):
    """Return numbers encoded per second."""
    return [(row["codec"], row["encode"], f"{row['encode']:.1f}", True) for row in result.rows]


def updates(result):
    """Return the rates of optimizers."""
    return [(row["optimizer"], row["of_a_copy"], f"{row['of_a_copy']:.2f}", True)
            for row in result.rows]


def local_losses(result):
    """Return losses after equally many steps."""
    return [(LOCAL[row["method"]].replace("`", ""), row["bits_per_byte"],
             f"{row['bits_per_byte']:.2f}", row["method"] != "dense") for row in result.rows]


def stragglers(_, asleep):
    """Return rates with sleeping ranks."""
    return [(LOCAL[row["method"]].replace("`", ""), row["samples_per_s"],
             f"{row['samples_per_s']:.0f}", row["method"] != "dense") for row in asleep.rows]


def prefetch(*results):
    """Return steps over those on data in memory."""
    found = []
    for result in results:
        for row in result.rows:
            if row["contender"] != "data on the device":
                ours = row["contender"].startswith("mpiring")
                faster = ", 0.2 ms" if row["switch_interval_s"] < 0.005 else ""
                name = f"{LOADERS[row['loader']]}{faster}: {'prefetch' if ours else 'in the step'}"
                found.append((name, row["over_resident"], f"{row['over_resident']:.2f}", ours))
    return found


def predictions(_, result):
    """Return predicted over measured times."""
    return [(f"{row['contender']}, {row['size']}", row["ratio"], f"{row['ratio']:.2f}",
             row["contender"] != MPI) for row in result.rows]


def predicted_steps(*results):
    """Return predicted over measured steps."""
    return [(case_of(result.about, row), row["ratio"], f"{row['ratio']:.2f}", True)
            for result in results for row in result.rows]


def scaled_steps(path, result):
    """Draw the predicted steps of each strategy over the number of nodes."""
    plot.draw(path, result.benchmark, result.about, result.rows, step_command.DRAWINGS)


def large_batches(path, *results):
    """Draw the best score of each method over the batch."""
    labels = ("test accuracy", "bits per byte (less is better)")
    with picture(path, [3.0], 2, "best of seven rates, mean of three seeds") as (both,):
        for axes, result, label in zip(both, results, labels):
            sign = 1 if label == labels[0] else -1
            cases = sorted({row["batch"] for row in result.rows})
            for i, method in enumerate(dict.fromkeys(row["method"] for row in result.rows)):
                scores = [best_rate([row for row in result.rows if row["method"] == method
                                     and row["batch"] == batch], sign)[0] for batch in cases]
                axes.plot(cases, scores, label=method, **curve_style(i))
            label_measured(axes, cases, str, "batch")
            axes.set_title(f"{result.rows[0]['task']}: {label}", loc="left")
