"""Tests that the figures of docs/benchmarks are those of their data."""

import re
import sys

import pytest
from launching import ROOT, needed

HERE = ROOT / "docs" / "benchmarks"
sys.path.insert(0, str(HERE))
import draw  # noqa: E402
import drawn  # noqa: E402
import english  # noqa: E402
from figures import FIGURES  # noqa: E402
from measured import BACK_END, GLOO, PARALLEL, result_of  # noqa: E402

AGAIN = "run python docs/benchmarks/draw.py"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_shows_its_data(figure):
    """Its table is compared word for word; its picture, which varies with matplotlib, by digest."""
    if figure.draw:
        assert draw.drawn_digest(figure.picture) == draw.digest(figure), AGAIN
    if figure.page:
        page = (HERE / figure.page).read_text()
        assert draw.written(page, figure) == page, AGAIN
        assert not re.search(r"\bnan\b", draw.text_of(figure))


def test_pictures_of_bars_tell_which_is_better():
    for figure in FIGURES:
        if figure.draw:
            texts = re.findall(">([^<>]+)</t", figure.picture.read_text())
            has_curves = {"array size", "nodes", "batch", "time of training (s)"} & {*texts}
            assert has_curves or any(re.search("(shorter|longer) is better|exact prediction", text)
                                     for text in texts), figure.name


def test_a_limit_crosses_no_text():
    axes = needed("matplotlib.figure").Figure().subplots()
    lengths = (0.5, 0.95, 1.2)
    drawn.bars(axes, [("", length, f"{length}", True) for length in lengths], limit=1)
    assert [text.xy[0] for text in axes.texts] == [0.5, 1, 1.2]


def test_every_file_is_shown():
    shown = {name for figure in FIGURES for name in figure.results}
    assert {path.stem for path in (HERE / "data").iterdir()} == shown
    pictures = {figure.picture.name for figure in FIGURES if figure.folder == HERE / "pictures"
                and figure.draw}
    assert {path.name for path in (HERE / "pictures").iterdir()} == pictures
    for page in HERE.glob("*.md"):
        named = re.findall("<!-- figure: (.*) -->", page.read_text())
        assert set(named) == {figure.name for figure in FIGURES if figure.page == page.name}


def numbers(text):
    """Return the numbers in a text, without those in code and in the targets of links."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return re.findall(r"(?<![\w.,/])(?:\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+|\d\d+)(?![\w./]|,\d)", text)


def test_other_pages_quote_the_figures_of_the_pages_that_they_name():
    """In each sentence, list or row of a table with a link to a page of benchmarks."""
    lost, quoted = [], 0
    for page in english.files([ROOT / "README.md", ROOT / "slurm", ROOT / "docs"]):
        if page.suffix != ".md" or page.parent == HERE:
            continue
        # Code is of no interest, and a table of README is drawn from the data.
        text = re.sub(r"<!-- figure.*?end of figure -->|<!--.*?-->|^( *)(`{3,}).*?^ *\2", "",
                      page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for block in re.split(r"\n\s*\n|\n(?=[|*-])", text):
            for sentence in english.sentences(" ".join(block.split())):
                named = re.findall(r"\]\((?:[^)]*/)?benchmarks/(\w+\.md)", sentence)
                there = {number for name in named if (HERE / name).exists()
                         for number in numbers((HERE / name).read_text())}
                if there:
                    quoted += len(numbers(sentence))
                    lost += [f"{page.name}: {number} in: {sentence}"
                             for number in numbers(sentence) if number not in there]
    assert quoted > 1
    assert not lost, "\n".join(lost)


def over_compute(name, contender):
    """Return the interval of a contender's step over compute."""
    row, = (row for row in result_of(name).rows if row["contender"] == contender)
    return row["over_compute_low"], row["over_compute_high"]


def is_less(name, contender, other):
    """Return whether a contender's interval is below that of another."""
    return over_compute(name, contender)[1] < over_compute(name, other)[0]


def ratios(*names):
    return [row["ratio"] for name in names for row in result_of(name).rows]


# Comparisons in words: the page, the words, and whether the data say so.
WORDS = [
    ("how_to/pytorch.md", "On one node, steps of both take [about equally long]", lambda: not (
        is_less("steps_2", PARALLEL, BACK_END) or is_less("steps_2", BACK_END, PARALLEL))),
    ("how_to/pytorch.md", "Between hosts, steps with the wrapper are [shorter]",
     lambda: is_less("steps_hosts_2", PARALLEL, BACK_END)),
    ("how_to/from_ddp.md", "its steps take [about equally long]", lambda: not (
        is_less("steps_2", PARALLEL, BACK_END) or is_less("steps_2", BACK_END, PARALLEL))),
    ("how_to/from_ddp.md", "between hosts, they are [shorter]",
     lambda: is_less("steps_hosts_2", PARALLEL, BACK_END)),
    ("explanation/comparison.md", "Between hosts, a step is [shorter than with Gloo]",
     lambda: is_less("steps_hosts_2", PARALLEL, GLOO)),
    ("how_to/predict_steps.md", "within 10 % of the measured step in seven of eight cases",
     lambda: [abs(ratio - 1) <= 0.1 for ratio in ratios(
         "steps_against_node", "steps_against_1gbit", "steps_against_100mbit")].count(True) == 7),
]


@pytest.mark.parametrize(("page", "words", "holds"), WORDS)
def test_comparisons_in_words_are_those_of_the_data(page, words, holds):
    assert words in " ".join((HERE.parent / page).read_text().split())
    assert holds()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_results_tell_how_they_were_measured(figure):
    for name in figure.results:
        about = result_of(name).about
        assert about["command"].startswith("python ") and "/tmp" not in about["command"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", about["date"])


def test_a_command_is_that_which_was_typed():
    about = {"command": "python -m mpiring bench allreduce --sizes 8 --json x.json", "ranks": 4,
             "variables": {"MPIRING_ALGORITHM": "ring", "OMP_NUM_THREADS": "1"}}
    assert draw.command_of(about) == (
        "MPIRING_ALGORITHM=ring mpirun -n 4 python -m mpiring bench allreduce --sizes 8")
    study = {"command": "python -m mpiring bench local --seeds 1 --json x.json", "ranks": 4}
    assert draw.command_of(study) == "mpirun -n 4 python -m benchmarks.local --seeds 1"
    about["lab"] = "--hosts 2 --ranks-per-host 2 --rate 1gbit --placement block"
    assert draw.command_of(about).partition("ring ")[2] == (
        "python -m mpiring lab run --hosts 2 --ranks-per-host 2 -- "
        "python -m mpiring bench allreduce --sizes 8")
