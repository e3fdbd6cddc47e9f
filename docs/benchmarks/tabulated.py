"""Makes the tables of figures: each function returns lines of Markdown, given results."""

import statistics

import measured
from measured import (
    ALONE, CONTENDERS, GLOO, MPI, NARROW, OURS, PARALLEL, PERSISTENT, STEP_NAMES, allreduces,
    at_best_level, by_size, case_of, hosts_of,
)

from mpiring.tools.table import significant
from mpiring.tools.units import size_text

# Names that differ from those of the OSU benchmarks.
OUR_NAMES = {"bcast": "broadcast"}


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


def ratio(found):
    """Return a ratio of `measured.over`, in italics if its interval includes 1."""
    if found is None:
        return "-"
    value, low, high = found
    if low is None or low != low or low == high:
        return quotient(value)
    text = f"{quotient(value)} ({quotient(low)} to {quotient(high)})"
    return f"*{text}*" if low <= 1 <= high else text


def allreduces_on_node(buffer):
    """Return a table of the times of each contender by size, and of MPI's over ours."""
    def table(result):
        rows = allreduces(buffer)(result.rows)
        names = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
        return markdown(
            ["size", *(f"{CONTENDERS[name]}, µs" for name in names),
             *(f"{CONTENDERS[name]} / mpiring" for name in names[1:])],
            [[size_text(nbytes), *(number(times[name]) for name in names),
              *(quotient(times[name] / times[OURS]) for name in names[1:])]
             for nbytes, times in sorted(by_size(rows).items())])

    return table


def allreduces_on_gpu(*results):
    """Return a table of the times of each contender on GPUs by buffer, ranks and size."""
    names = ("naive", "naive, pinned", OURS)
    rows = []
    for buffer, words in (("empty", "`comm.empty`"), ("private", "private")):
        for result in results:
            found = [row for row in result.rows if row["buffer"] == buffer]
            limits = by_size(found, "limit_us")
            for nbytes, times in sorted(by_size(found).items()):
                limit = limits[nbytes][OURS]
                rows.append([f"{words}, {result.about['ranks']} ranks", size_text(nbytes),
                             *(number(times[name]) for name in names), number(limit),
                             quotient(times["naive"] / times[OURS]), quotient(limit / times[OURS])])
    return markdown(["", "size", "naive, µs", "naive, pinned, µs", "mpiring, µs", "limit, µs",
                     "naive / mpiring", "limit / mpiring"], rows)


def allreduces_of_libraries(*results):
    """Return a table of the times of several MPI libraries and ours over each, by size."""
    tables = [[by_size(allreduces(buffer)(result.rows)) for buffer in ("private", "empty")]
              for result in results]
    sizes = sorted(set.intersection(*(set(times) for table in tables for times in table)))
    return markdown(
        ["MPI library", "size", "private: MPI, µs", "mpiring, µs", "MPI / mpiring",
         "`comm.empty`: MPI, µs", "mpiring, µs", "MPI / mpiring"],
        [[result.about["mpi_library"], size_text(nbytes),
          *(cell for times in table for cell in (
              number(times[nbytes][MPI]), number(times[nbytes][OURS]),
              quotient(times[nbytes][MPI] / times[nbytes][OURS])))]
         for result, table in zip(results, tables) for nbytes in sizes])


def headlines(node, hosts, calls):
    """Return README's table: a few results, each over its baseline, with the interval if known."""
    rows = []
    for result, words in (node, "one node"), (hosts, "two hosts, 1 Gbit/s"):
        steps = {row["contender"]: row for row in result.rows}
        ours = steps[PARALLEL]
        rows.append([f"[PyTorch step](docs/benchmarks/training_steps.md), {words}",
                     *(f"{number(steps[name]['median_ms'])} ms" for name in (PARALLEL, GLOO)),
                     *(ratio(measured.over(result.rows, ours, contender=name))
                       for name in (GLOO, ALONE))])
    times = by_size(allreduces("private")(calls.rows))[64 << 20]
    rows.append(["[allreduce](docs/benchmarks/allreduce.md) of 64 MiB, one node",
                 *(f"{number(times[name] / 1e3)} ms" for name in (OURS, "Gloo")),
                 quotient(times[OURS] / times["Gloo"]), "-"])
    return markdown(["2 ranks", "mpiring", "Gloo", "mpiring / Gloo", "mpiring / compute"], rows)


def of_limit_table(*results):
    """Return a table of times over those that the links need, by hosts and size."""
    names = [name for name in CONTENDERS if any(
        row["contender"] == name for result in results for row in result.rows)]
    rows = []
    for result in results:
        found = [row for row in result.rows if row["contender"] in names]
        for nbytes, ratios in sorted(by_size(found, "this_over_limit").items()):
            limit = next(row["limit_us"] for row in found if row["bytes"] == nbytes)
            rows.append([hosts_of(result.about), size_text(nbytes), number(limit / 1e3),
                         *(quotient(ratios.get(name)) for name in names)])
    return markdown(["hosts × ranks", "size", "limit, ms",
                     *(f"{CONTENDERS[name]} / limit" for name in names)], rows)


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
            for name, label in ((native, native), (OURS, f"`comm.{OUR_NAMES.get(test, test)}`"),
                                (PERSISTENT, "persistent")):
                times = {row["bytes"]: row["median_us"] for row in of_test
                         if row["contender"] == name}
                lines.append([label, *(number(times[nbytes], 2) for nbytes in sizes)])
        return markdown(["µs", *map(size_text, sizes)], lines)

    return table


def with_and_without(without, compiled):
    """Return a table of calls without and with compiled code, by size, and of MPI's over them."""
    lines = {}
    for result, words in (without, "without numba"), (compiled, "with numba"):
        for row in result.rows:
            if row["contender"] == OURS:
                name = OUR_NAMES.get(row["test"], row["test"])
                lines.setdefault((name, words), []).append(
                    f"{number(row['median_us'], 2)} ({quotient(row['native_over_this'])})")
    sizes = sorted({row["bytes"] for row in without.rows})
    names = dict.fromkeys(name for name, _ in lines)
    return markdown(["µs (MPI / mpiring)", *map(size_text, sizes)], [
        [f"`{name}`, {words}", *cells] for each in names
        for (name, words), cells in lines.items() if name == each])


def step_table(*titles):
    """Return a table of training steps, with chosen columns."""
    columns = {
        "step, ms": lambda row: number(row["median_ms"]),
        "/ bound": lambda row: quotient(row["over_bound"]),
        "hidden, %": lambda row: number(row["hidden_percent"], 2),
        "extra, MiB": lambda row: number(row["extra_MiB"], 2),
        "bytes per parameter": lambda row: number(row["node_bytes_per_parameter"]),
        "formula": lambda row: number(row["formula_bytes_per_parameter"])}

    others = {"/ compute": ALONE, "/ Gloo": GLOO}

    def cell(rows, row, title):
        if title in others:
            return ratio(measured.over(rows, row, contender=others[title]))
        return columns[title](row)

    def table(result):
        return markdown(["", *titles], [
            [STEP_NAMES.get(row["contender"], row["contender"]),
             *(cell(result.rows, row, title) for title in titles)] for row in result.rows])

    return table


def models(result):
    """Return a table of each model's steps over its compute."""
    found = {(row["model"], row["contender"]): row for row in result.rows}
    names = dict.fromkeys(model for model, _ in found)
    head = ["step / compute", *(
        f"{name}, {found[name, ALONE]['parameters'] / 1e6:.1f} M" for name in names)]
    return markdown(head, [
        ["compute alone, ms", *(number(found[name, ALONE]["median_ms"]) for name in names)],
        *([STEP_NAMES[contender],
           *(ratio(measured.over(result.rows, found[name, contender], contender=ALONE))
             for name in names)]
          for contender in dict.fromkeys(contender for _, contender in found)
          if contender != ALONE)])


def overlap(result):
    """Return a table of what of communication was hidden."""
    return markdown(
        ["", "compute", "hidden, %", "total / max(compute, communication) (median of ratios)"],
        [[CONTENDERS.get(row["contender"], "MPI"), {"numpy": "NumPy", "python": "Python"}[
            row["compute"]], number(row["overlap_percent"], 2),
          quotient(row["total_over_longest"])] for row in result.rows])


def sixteen_bits(result):
    """Return a table of the time of 16-bit numbers over that of as many in float32."""
    return markdown(
        ["numbers", "float32, ms", *(f"{narrow}, ms" for narrow in NARROW),
         *(f"{narrow} / float32" for narrow in NARROW)],
        [[f"{count:,}", *map(number, times.values()),
          *(quotient(times[narrow] / times["float32"]) for narrow in NARROW)]
         for count, times in measured.sixteen_bits(result).items()])


def sharded(result):
    """Return a table of steps, and of memory with its formula."""
    bound = any(row["over_bound"] == row["over_bound"] for row in result.rows)
    return step_table("step, ms", "/ compute", *["/ bound"] * bound, "/ Gloo",
                      "bytes per parameter", "formula")(result)


def memory(*results):
    """Return a table of what the gradients' communication takes beyond the gradients."""
    rows = []
    for result in results:
        extra = {row["contender"]: row["extra_MiB"] for row in result.rows}
        about = result.about
        rows.append([
            f"`{about['variables']['MPIRING_ALGORITHM']}`",
            hosts_of(about) if "lab" in about else f"1 × {about['ranks']}",
            number(extra[PARALLEL], 2), number(extra[f"{MPI} after backward"], 2)])
    return markdown(["algorithm", "hosts × ranks", "`DataParallel`, MiB", "MPI, MiB"], rows)


def reducers(result):
    """Return a table of steps with each Reducer."""
    return markdown(
        ["", "step, ms", "/ dense", "/ alone", "compressed", "on wire", "encode, ms", "wire, ms",
         "decode, ms"],
        [[f"`{row['reducer']}`", number(row["median_ms"]),
          *(ratio(measured.over(result.rows, row, reducer=other)) for other in ("dense", "alone")),
          number(row["compression_ratio"]),
          number(row["wire_ratio"]),
          *("-" if row["reducer"] in ("alone", "dense") else number(row[f"{key}_ms"], 2)
            for key in ("encode", "wire", "decode"))] for row in result.rows])


def codecs(result):
    """Return a table of numbers encoded and decoded per second; on a GPU, of shares of a copy."""
    keys = ("encode", "encode + lost", "decode", "add")
    on_gpu = "copy_GBps" in result.about
    unit = "rate / that of a copy" if on_gpu else "1e9 numbers per second"
    return markdown([unit, *keys], [
        [row["codec"], *(number(row.get(key)) for key in keys)] for row in result.rows])


def updates(result):
    """Return a table of the rates of optimizers."""
    head = ["", "bytes per number", "GB/s (median)", "/ rate of a copy (median of ratios)"]
    return markdown(head, [
        [row["optimizer"], str(row["bytes"]), number(row["GBps"]), quotient(row["of_a_copy"])]
        for row in result.rows])


_METHODS = {"plain": "plain", "fused": "fused", "overlapped": "overlapped",
            "hierarchical": "hierarchical", "bits16": "16 bits", "powersgd": "PowerSGD"}
# Published gains over Horovod or the like in %, by network and number of nodes.
_PUBLISHED = {
    ("TCP 25 Gb/s", 4): "85 (Swin)", ("TCP 30 Gb/s", 2): "85.5", ("TCP 30 Gb/s", 4): "43.7",
    ("TCP 100 Gb/s", 2): "85.5", ("TCP 100 Gb/s", 4): "52.1", ("RDMA 100 Gb/s", 2): "8.5",
    ("RDMA 100 Gb/s", 4): "11.4"}


def clusters(result):
    """Return a table of simulated steps, in milliseconds."""
    return markdown(["model, network, nodes", "compute", *_METHODS.values()], [
        [f"{row['model']}, {row['network']}, {row['nodes']}",
         *(number(row[f"{name}_ms"]) for name in ("compute", *_METHODS))] for row in result.rows])


def clusters_published(result):
    """Return a table of published gains next to simulated gains over the overlapped ring."""
    def gains(network, nodes, name):
        return [f"{100 * (row['overlapped_ms'] / row[f'{name}_ms'] - 1):.1f}"
                for row in result.rows if (row["network"], row["nodes"]) == (network, nodes)]

    models = [*dict.fromkeys(row["model"] for row in result.rows)]
    return markdown(["network, nodes", "published, %", "method", *models], [
        [f"{network}, {nodes}", published, _METHODS[name], *gains(network, nodes, name)]
        for (network, nodes), published in _PUBLISHED.items()
        for name in ("hierarchical", "bits16", "powersgd")])


def local_times(result):
    """Return a table of trainings on a slow network."""
    ends = sorted({step for row in result.rows for step in row["curve_steps"]})
    looks = (ends[2 * len(ends) // 3 - 1], ends[-1]) if len(ends) > 2 else ends[-1:]
    target = result.rows[0]["target_bits"]
    head = ["", "step, ms", "exposed, ms", "traffic reduction", f"time to {target} bits, s",
            "speedup", *(f"bits, {step} steps" for step in looks)]
    rows = [[LOCAL[row["method"]], number(row["step_ms"]), number(row["exposed_ms"]),
             number(row["fewer_bytes"]), number(row["seconds_to_target"]),
             quotient(row["times_faster"]),
             *(f"{row['curve_bits'][row['curve_steps'].index(step)]:.3f}"
               if step in row["curve_steps"] else "-" for step in looks)] for row in result.rows]
    # A run without a target, or without a dense one to compare with, has no such columns.
    measured_columns = [column for column in zip(head, *rows) if set(column[1:]) != {"-"}]
    head, *rows = zip(*measured_columns)
    return markdown(head, rows)


LOCAL = {"alone": "each rank alone", "dense": "dense", "powersgd": "`PowerSGD(4)`",
         "localsgd": "`LocalSGD`", "diloco": "`DiLoCo`", "streaming": "streaming `DiLoCo`",
         "server": "`AsyncDataParallel`", "pairs": "`PairAveraging`"}


def local_losses(result):
    """Return a table of losses after equally many steps."""
    return markdown(
        ["", "bits per byte", "above dense", "spread of seeds", "traffic reduction",
         "learning rate"],
        [[LOCAL[row["method"]], f"{row['bits_per_byte']:.3f}", f"{row['bits_over_dense']:.2f}",
          f"{row['spread_of_seeds']:.3f}", number(row["fewer_bytes"], 2),
          f"{row['learning_rate']:g}"] for row in result.rows])


def stragglers(awake, asleep):
    """Return a table of rates without sleeping ranks, and with them."""
    rates = {row["method"]: row["samples_per_s"] for row in awake.rows}
    dense = next(row["samples_per_s"] for row in asleep.rows if row["method"] == "dense")
    return markdown(
        ["", "samples/s without delays", "samples/s with delays", "/ dense", "bits per byte"],
        [[LOCAL[row["method"]], number(rates.get(row["method"])), number(row["samples_per_s"]),
          quotient(row["samples_per_s"] / dense), f"{row['bits_per_byte']:.3f}"]
         for row in asleep.rows])


def batches(result):
    """Return a table of ways to share samples of unequal lengths."""
    return markdown(
        ["", "padding, %", "largest batch of a rank", "tokens/s", "/ `DistributedSampler`",
         "idle, %"],
        [[row["contender"], number(row["padding_percent"], 2), f"{row['largest']:,}",
          number(row["tokens_per_s"]), quotient(row["over_distributed"]),
          number(row["idle_percent"], 2)] for row in result.rows])


def prefetch(*results):
    """Return a table of steps over those on data in memory."""
    found = {}
    for result in results:
        for row in result.rows:
            key = (LOADERS[row["loader"]] + (
                f", switch interval {row['switch_interval_s']:g} s"
                if row["switch_interval_s"] != 0.005 else ""))
            found.setdefault(key, {})[row["contender"]] = row["over_resident"]
    return markdown(["loader", "`prefetch`", "in the step"], [
        [name, quotient(ratios["mpiring.data.prefetch"]), quotient(ratios["loaded in the step"])]
        for name, ratios in found.items()])


def prefetch_on_gpu(result):
    """Return a table of steps with data on the device, and with data that is copied to it."""
    return markdown(["", "step, ms", "/ data on the device"], [
        [f"{row['model']}, {row['contender']}", number(row["median_ms"]),
         ratio(tuple(row[f"over_resident{end}"] for end in ("", "_low", "_high")))]
        for row in result.rows])


LOADERS = {"sleep": "sleeps", "zlib": "decompresses (zlib)", "numpy": "sorts (NumPy)",
           "python": "computes in Python"}


def scaling(result):
    """Return a table of the predicted times of each algorithm."""
    by_nodes = {}
    for row in result.rows:
        by_nodes.setdefault(row["nodes"], {})[row["algorithm"]] = row
    names = list(dict.fromkeys(row["algorithm"] for row in result.rows))
    return markdown(["nodes", "byte limit, ms", *(f"`{name}`, ms" for name in names)], [
        [str(nodes), number(next(iter(rows.values()))["limit_ms"]),
         *(number(rows[name]["ms"]) if name in rows else "-" for name in names)]
        for nodes, rows in sorted(by_nodes.items())])


def predictions(_, result):
    """Return a table of predicted over measured times."""
    found = {}
    for row in result.rows:
        found.setdefault(row["contender"], {})[row["bytes"]] = row["ratio"]
    sizes = sorted({row["bytes"] for row in result.rows})
    return markdown(["predicted / measured", *map(size_text, sizes)], [
        [f"`{name}`", *(quotient(ratios.get(nbytes)) for nbytes in sizes)]
        for name, ratios in found.items()])


def predicted_steps(*results):
    """Return a table of predicted and measured steps."""
    return markdown(["hosts × ranks, links", "predicted, ms", "measured, ms",
                     "predicted / measured"],
                    [[case_of(result.about, row), number(row["step_ms"]),
                      number(row["measured_ms"]), quotient(row["ratio"])]
                     for result in results for row in result.rows])


def scaled_steps(result):
    """Return a table of the predicted steps of each strategy, in ms."""
    nodes = sorted({row["nodes"] for row in result.rows})
    steps = {(row["strategy"], row["nodes"]): row["step_ms"] for row in result.rows}
    return markdown(["step in ms, by nodes", *map(str, nodes)], [
        [f"`{name}`", *(number(steps.get((name, count))) for count in nodes)]
        for name in dict.fromkeys(row["strategy"] for row in result.rows)])


def large_batches(*results):
    """Return a table of the best rate of each method, as examples/compare_optimizers.py does."""
    runs, rows = [row for result in results for row in result.rows], []
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in runs):
        of_case = [row for row in runs if (row["task"], row["batch"]) == (task, batch)]
        sign = 1 if task == "digits" else -1
        best = {method: best_rate([row for row in of_case if row["method"] == method], sign)
                for method in dict.fromkeys(row["method"] for row in of_case)}
        first, its_spread, *_ = max(best.values(), key=lambda found: sign * found[0])
        text = (lambda x: f"{x:.2%}") if sign > 0 else (lambda x: f"{x:.3f}")
        rows += [[task, str(batch), str(of_case[0]["samples"] // batch), method, text(mean),
                  text(spread), "yes" if abs(mean - first) <= max(spread, its_spread) else "",
                  rate, f"{near:.0%}"] for method, (mean, spread, rate, near) in best.items()]
    return markdown(["task", "batch", "steps", "method", "best", "deviation", "best or tied",
                     "rate", "runs within 1 %"], rows)


def best_rate(rows, sign):
    """Return the best rate's mean and deviation, the rate, and how many runs come near."""
    scores = {}
    for row in rows:
        scores.setdefault(row["rate"], []).append(row["score"])
    means = {rate: statistics.fmean(its) for rate, its in scores.items()}
    rate = max(means, key=lambda rate: sign * means[rate])
    near = [abs(row["score"] - means[rate]) <= 0.01 * means[rate]
            or sign * row["score"] > sign * means[rate] for row in rows]
    edge = " (edge)" if rate in (min(means), max(means)) else ""
    return means[rate], statistics.stdev(scores[rate]), f"{rate:.2g}{edge}", sum(near) / len(near)
