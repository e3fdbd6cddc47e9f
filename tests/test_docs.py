"""Runs what the pages under docs/ show, and follows their links; `pages` says how blocks are run.

Those of docs/how_to/clients.md need the group `clients`, and are run by tests/clients.
"""

import importlib
import re
import runpy

import pages
import pytest
from launching import ROOT, installed

from mpiring import Config
from mpiring.__main__ import parse

REFERENCE = ROOT / "docs" / "reference"
CLIENTS = ROOT / "docs" / "how_to" / "clients.md"
TEXTS = [*pages.PAGES, *ROOT.glob("C*.md"), *ROOT.glob("*/README.md")]


def without_code(text):
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    named = re.findall(r"^\((\S+)\)=$", page.read_text(), re.MULTILINE)
    return {*named, *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                      for heading in headings)}


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize("example", pages.parameters(
    page for page in pages.PAGES[1:] if page != CLIENTS))
def test_example(example, tmp_path):
    example.check(tmp_path)


@pytest.mark.parametrize("page", pages.PAGES[1:], ids=lambda page: page.name)
def test_every_block_is_seen(page):
    """None is hidden by its indentation, or by another name of its language."""
    fences = re.findall(r"^[ \t>]*[`~]{3,}[ ]*\{?(?:code-block)?\}?[ ]*"
                        r"(python|py|pycon|sh|bash|shell|console|zsh|diff)\b",
                        page.read_text(), re.MULTILINE | re.IGNORECASE)
    seen = re.findall(r"^```(?:python|sh|diff)$", page.read_text(), re.MULTILINE)
    assert len(fences) == len(seen), "a block of code is not run: see tests/pages.py"


@pytest.mark.parametrize("page", pages.PAGES[1:], ids=lambda page: page.name)
def test_a_page_says_whom_it_is_for(page):
    _, _, rest = page.read_text().partition("\n\n")
    assert rest.startswith("*For "), "below the title: *For those who ...*"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = without_code(page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_pictures_are_those_that_their_source_draws():
    namespace = runpy.run_path(ROOT / "docs" / "pictures" / "draw.py")
    for name, draw in namespace["PICTURES"].items():
        drawn = (ROOT / "docs" / "pictures" / name).read_text()
        assert draw() == drawn, "run python docs/pictures/draw.py"


@pytest.mark.parametrize("module", ["", ".asynchronous", ".data", ".elastic", ".numpy", ".optim",
                                    ".horovod", ".horovod.torch", ".reducers", ".resilience",
                                    ".torch"])
def test_the_reference_has_every_public_name(module):
    if module.endswith(".torch"):
        installed("torch")
    text = "".join(page.read_text() for page in REFERENCE.rglob("*.md"))
    for name in importlib.import_module(f"mpiring{module}").__all__:
        assert re.search(rf"\bmpiring{module}\.{name}\b", text), name


def test_the_reference_has_every_setting():
    text = (REFERENCE / "settings.md").read_text()
    for name, default in vars(Config()).items():
        (row,) = re.findall(
            rf"^\| `{name}` \| `MPIRING_{name.upper()}` \| (.*) \|$", text, re.MULTILINE)
        shown = str(int(default)) if isinstance(default, bool) else f"{default}"
        assert shown.removesuffix(".0") in row


def test_the_reference_has_every_command(capsys):
    def help_of(*words):
        with pytest.raises(SystemExit):
            parse([*words, "--help"])
        return capsys.readouterr().out

    text, found = (REFERENCE / "commands.md").read_text(), 0
    for command in re.search(r"\{([\w,]+)\}", help_of())[1].split(","):
        further = re.search(r"^usage: \S+ -m mpiring \w+\s+\[-h\]\s+\{([\w,]+)\}", help_of(command))
        for words in [command, *(f"{command} {name}" for name in
                                 (further[1].split(",") if further else []))]:
            assert f" python -m mpiring {words} --help" in text, words
            found += 1
    assert found > 15
    for study in (ROOT / "benchmarks").glob("*.py"):
        if "\ndef declare(" in study.read_text():
            assert f" python -m benchmarks.{study.stem} --help" in text, study
