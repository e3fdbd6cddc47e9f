"""Runs what the pages under docs/ show, and follows their links; `pages` says how blocks are run.

Those of docs/how_to/clients.md need the group `clients`, and are run by tests/clients.
"""

import dataclasses
import importlib
import inspect
import re
import runpy

import pages
import pytest
from interface import MODULES, declared
from launching import ROOT, installed

from mpiring import Config
from mpiring.__main__ import parse

REFERENCE = ROOT / "docs" / "reference"
TEXTS = [*pages.PAGES, *ROOT.glob("[CS]*.md"), *ROOT.glob("*/README.md")]


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
    page for page in pages.PAGES[1:] if page != pages.CLIENTS))
def test_example(example, tmp_path):
    example.check(tmp_path)


@pytest.mark.parametrize("page", pages.PAGES[1:], ids=lambda page: page.name)
def test_every_block_is_seen(page):
    """None is hidden by its indentation, or by another name of its language."""
    fences = re.findall(r"^[ \t>]*[`~]{3,}[ ]*\{?(?:code-block)?\}?[ ]*"
                        r"(python|py|pycon|sh|bash|shell|console|zsh|diff)\b",
                        page.read_text(), re.MULTILINE | re.IGNORECASE)
    seen = re.findall(r"^```(?:python|sh|diff)$", page.read_text(), re.MULTILINE)
    assert len(fences) == len(seen), "a block of code is not run: see tests/helpers/pages.py"


@pytest.mark.parametrize("page", pages.PAGES[1:], ids=lambda page: page.name)
def test_a_page_says_whom_it_is_for(page):
    _, _, rest = page.read_text().partition("\n\n")
    assert rest.startswith("*For "), "below the title: *For those who ...*"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = without_code(page.read_text())
    assert "[docs/" not in text, "the text of a link to a page is its title"
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_groups_of_guides_have_the_pages_of_the_sidebar():
    text = (ROOT / "docs" / "how_to" / "index.md").read_text()
    for group in text.split("\n## ")[1:]:
        caption, names = re.search(r":caption: (.*)\n\n(.*?)\n```", group, re.DOTALL).groups()
        assert group.partition("\n")[0] == caption
        assert re.findall(r"^- \[.*?\]\((\w+)\.md\): ", group, re.MULTILINE) == names.split()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_into_its_box(page):
    """At 1280 pixels, the box of a program or an output on the site shows 100 columns."""
    blocks = re.findall(r"^ *(```+[^\n]*\n)(.*?)^ *```+$", page.read_text(), re.M | re.S)
    assert not [line for fence, block in blocks if "{" not in fence
                for line in block.splitlines() if len(line) > 100]


def test_pictures_are_those_that_their_source_draws():
    namespace = runpy.run_path(ROOT / "docs" / "pictures" / "draw.py")
    for name, draw in namespace["PICTURES"].items():
        drawn = (ROOT / "docs" / "pictures" / name).read_text()
        assert draw() == drawn, "run python docs/pictures/draw.py"


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module):
    if module.endswith(".torch"):
        installed("torch")
    text = "".join(page.read_text() for page in REFERENCE.rglob("*.md"))
    exported = importlib.import_module(module)
    for name in exported.__all__:
        # Sphinx lists the functions of a module that a page documents as one.
        listed = f".. automodule:: {module}\n" in text and inspect.isroutine(
            getattr(exported, name))
        assert listed or re.search(rf"\b{module}\.{name}\b", text), name


def missing_arguments(item):
    """Return the names of an item's parameters that its docstring does not explain."""
    parameters = set(inspect.signature(item).parameters) - {"self", "cls"}
    sections = "Args|Attributes" if dataclasses.is_dataclass(item) else "Args"
    for text in re.findall(rf"^(?:{sections}):\n((?: +.*\n|\n)*)", f"{inspect.getdoc(item)}\n",
                           re.MULTILINE):
        for entry in re.findall(r"^ {4}([\w*, ]+):", text, re.MULTILINE):
            parameters -= {name.strip(" *") for name in entry.split(",")}
    return parameters


def test_the_reference_has_every_argument():
    installed("torch")
    incomplete = {}
    for name, item, hidden, members in declared():
        methods = ((f"{name}.{word}", inspect.getattr_static(item, word, None)) for word in members)
        is_made = hidden or getattr(item, "_is_protocol", False)
        for shown, each in [*([] if is_made else [(name, item)]), *methods]:
            if (inspect.isfunction(each) or inspect.isclass(each)) and missing_arguments(each):
                incomplete.setdefault(name, []).append((shown, missing_arguments(each)))
    assert not incomplete


def test_the_reference_has_every_method_that_the_pages_use():
    """If a page calls a method of a public class, some class's entry lists it."""
    installed("torch")
    listed = {word for name, _, _, members in declared()
              for word in [name.rpartition(".")[2], *members]}
    text = "".join(page.read_text() for page in pages.PAGES)
    # A recorder is no object of a public class.
    called = set(re.findall(r"(?<!recorder)\.(\w+)\(", text))
    for _, item, _, _ in declared():
        for cls in item.__mro__ if inspect.isclass(item) else ():
            if cls.__module__.startswith("mpiring"):
                # A page may call the method of a dict that has the same name.
                unlisted = {name for name in vars(cls).keys() - listed - vars(dict).keys()
                            if name in called and not name.startswith("_")}
                assert not unlisted, cls


def test_the_reference_has_every_method_for_the_state():
    """Users who write checkpoints of their own call them, although no page may show each call."""
    installed("torch")
    entries = [(item, members) for _, item, _, members in declared() if inspect.isclass(item)]
    for cls, _ in entries:
        listed = {name for item, members in entries if item in cls.__mro__ for name in members}
        defined = {name for base in cls.__mro__ if base.__module__.startswith("mpiring")
                   for name in vars(base) if name[0] != "_" and name.endswith("state_dict")}
        assert defined <= listed, cls


def test_the_reference_has_every_setting():
    text = (REFERENCE / "settings.md").read_text()
    for name, default in vars(Config()).items():
        (row,) = re.findall(
            rf"^\| `MPIRING_{name.upper()}` `{name}` \| (.*) \| \S.* \|$", text, re.MULTILINE)
        shown = str(int(default)) if isinstance(default, bool) else f"{default}"
        assert row.strip("`") == (shown.removesuffix(".0") or "none")


def test_the_reference_has_every_command(capsys):
    def help_of(*words):
        with pytest.raises(SystemExit):
            parse([*words, "--help"])
        return capsys.readouterr().out

    text, count = (REFERENCE / "commands.md").read_text(), 0
    for command in re.findall(r"^ {4}(\w+)", help_of(), re.MULTILINE):
        further = re.search(r"^usage: \S+ -m mpiring \w+\s+\[-h\]\s+\{([\w,]+)\}", help_of(command))
        for words in [command, *(f"{command} {name}" for name in
                                 (further[1].split(",") if further else []))]:
            assert f" python -m mpiring {words} --help" in text, words
            count += 1
    assert count > 15
    for study in (ROOT / "benchmarks").glob("*.py"):
        if "\ndef declare(" in study.read_text():
            assert f" python -m benchmarks.{study.stem} --help" in text, study
