"""Draws all figures of docs/benchmarks, and the one of README, from the results in its folder data.

`python docs/benchmarks/draw.py` writes the pictures, and the text between the two comments of each
figure on a page: its picture, table, commands, machine, and date.
`python docs/benchmarks/draw.py NAME ...` writes some figures. The file figures.py lists them.
"""

import hashlib
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from figures import FIGURES  # noqa: E402
from measured import result_of  # noqa: E402

WIDTH = 110
_FILES = ("--json", "--csv", "--plot")
_MARK = "data: sha256 "
_SOFTWARE = {"mpiring": "mpiring", "mpi_library": "", "python": "Python", "mpi4py": "mpi4py",
             "numpy": "NumPy", "numba": "numba", "torch": "PyTorch", "cupy-cuda13x": "CuPy",
             "horovod": "Horovod"}
_PRIORITIES = {"SCHED_RR 10": "`chrt -r 10`", "SCHED_OTHER, nice -15": "`nice -n -15`"}


def digest(figure):
    """Return a digest of all rows that a figure may show."""
    whole = b"".join((HERE / "data" / f"{name}.json").read_bytes() for name in figure.results)
    return hashlib.sha256(whole).hexdigest()


def drawn_digest(picture):
    """Return the digest of the rows from which a picture was drawn."""
    return re.search(f"<!-- {_MARK}(\\w+) -->", picture.read_text())[1]


def draw(figure):
    """Write a figure's picture, with the digest of its data."""
    figure.picture.parent.mkdir(exist_ok=True)
    figure.draw(str(figure.picture), *map(result_of, figure.results))
    lines = figure.picture.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("<svg"))
    lines.insert(start, f"<!-- {_MARK}{digest(figure)} -->")
    figure.picture.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def command_of(about):
    """Return the command line that has written a result: launcher, variables and all."""
    words = shlex.split(about["command"])
    for option in _FILES:
        if option in words:
            del words[words.index(option):words.index(option) + 2]
    # Studies were benchmarks of the command when some of the results were measured.
    if words[:4] == ["python", "-m", "mpiring", "bench"] and (
            HERE.parents[1] / "benchmarks" / f"{words[4]}.py").exists():
        words[2:5] = [f"benchmarks.{words[4]}"]
    variables = [f"{name}={value}" for name, value in about.get("variables", {}).items()
                 if name.startswith("MPIRING_") or name == "UCX_RNDV_THRESH"]
    if "lab" in about:
        given = dict(zip(*[iter(shlex.split(about["lab"]))] * 2))
        usual = {"--ranks-per-host": "1", "--rate": "1gbit", "--placement": "block"}
        options = [word for name, value in given.items() if value != usual.get(name)
                   for word in (name, value)]
        words = ["python", "-m", "mpiring", "lab", "run", *options, "--", *words]
    elif about.get("ranks") and "--ranks" not in words:
        words = ["mpirun", "-n", str(about["ranks"]), *words]
    return " ".join([*variables, shlex.join(words)])


def shell(command):
    """Return a command, cut into lines."""
    return " \\\n    ".join(textwrap.wrap(command, 84, break_long_words=False,
                                          break_on_hyphens=False))


def origin(figure):
    """Return when, on what and with what a figure was measured, and links to its results."""
    abouts = [result_of(name).about for name in figure.results]
    # A prediction names no machine.
    machines = [about for about in abouts if "cpu" in about] or abouts

    def either(texts):
        return " or ".join(filter(None, dict.fromkeys(texts)))

    devices = [about.get("device", "") for about in machines] + [
        row.get("device", "") for name in figure.results for row in result_of(name).rows]
    software = filter(None, (
        either(f"{title} {about[key]}".strip() for about in machines if about.get(key))
        for key, title in _SOFTWARE.items()))

    def settings(about):
        threads = about.get("variables", {}).get("OMP_NUM_THREADS")
        return ", ".join(filter(None, [threads and f"`OMP_NUM_THREADS={threads}`",
                                       _PRIORITIES.get(about.get("scheduling"))]))

    folder = os.path.relpath(HERE / "data", (HERE / figure.page).parent)
    links = ", ".join(f"[{name}.json]({folder}/{name}.json)" for name in figure.results)
    facts = [" and ".join(sorted({about["date"][:10] for about in abouts})),
             either(f"{about['cpu']}, {about['cores']} cores" for about in machines
                    if "cpu" in about),
             either(device for device in devices if device.startswith("GPU")),
             ", ".join(software), either(map(settings, machines)), f"Data: {links}"]
    return "\n".join(textwrap.wrap(". ".join(filter(None, facts)) + ".", WIDTH,
                                   break_long_words=False, break_on_hyphens=False))


def text_of(figure):
    """Return the Markdown of a figure."""
    results = [result_of(name) for name in figure.results]
    commands = dict.fromkeys(command_of(result.about) for result in results)
    below = ["", "<!-- parse -->", "```sh", *map(shell, commands), "```", "", origin(figure)]
    return "\n".join([
        *([f"![{figure.alt}]({figure.picture.relative_to(HERE)})", ""] if figure.draw else []),
        *figure.table(*results), *(below if figure.commands else [])])


def between(name):
    """Return a pattern of the part of a page that belongs to a figure."""
    return re.compile(f"(<!-- figure: {name} -->\n).*?(<!-- end of figure -->)", re.DOTALL)


def written(page, figure):
    """Return the text of a page with the current text of a figure."""
    text, count = between(figure.name).subn(
        lambda match: f"{match[1]}{text_of(figure)}\n{match[2]}", page)
    if count != 1:
        raise SystemExit(f"{figure.page} has {count} places for the figure {figure.name}")
    return text


if __name__ == "__main__":
    for each in FIGURES:
        if not sys.argv[1:] or each.name in sys.argv[1:]:
            if each.draw:
                draw(each)
            if each.page:
                there = HERE / each.page
                there.write_text(written(there.read_text(), each))
