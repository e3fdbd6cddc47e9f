"""Compares versions, extras and times that several pages state, with the one place of each."""

import re

from environments import requirements, setup_cfg
from every_torch import VERSIONS
from launching import ROOT

INSTALL = (ROOT / "docs" / "install.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# Not CHANGELOG.md, which says what was true.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md"),
         ROOT / "packaging" / "description.md", *(ROOT / "docs").rglob("*.md")]
# Names of packages on pages.
TITLES = {"PyTorch": "torch", "NumPy": "numpy"}
LEAST = {re.split(">=", line)[0]: line.partition(">=")[2]
         for extra in ["", *setup_cfg()["options.extras_require"]] for line in requirements(extra)}
LEAST["Python"] = setup_cfg()["options"]["python_requires"].removeprefix(">=")


def row(name):
    """Return the cells of a row of a table on the page Install."""
    return re.search(rf"^\| {name} \| (.*) \|$", INSTALL, re.MULTILINE)[1].split(" | ")


def test_pages_name_the_least_versions_of_setup_cfg():
    """And the groups for developers, which name some of them once more."""
    versions = [(path.name, name, version) for path in PAGES for name, version in re.findall(
        r"\b(Python|PyTorch|NumPy|mpi4py|numba|xxhash)(?: \|)? (\d[\d.]*\d) or newer",
        path.read_text())]
    versions += [("pyproject.toml", *pair) for pair in re.findall(
        r'"(\w+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()) if pair[0] in LEAST]
    assert len(versions) > 12
    assert not [each for each in versions if each[2] != LEAST[TITLES.get(each[1], each[1])]]


def test_the_page_install_has_the_extras_of_setup_cfg():
    extras = setup_cfg()["options.extras_require"].keys() - {"mpich", "openmpi", "intelmpi"}
    for extra in extras:
        listed = [TITLES.get(name, name) for name in row(f"`{extra}`")[0].split(", ")]
        assert sorted(listed) == sorted(re.split(">=", each)[0] for each in requirements(extra))


def test_the_tested_versions_of_python_are_those_of_the_metadata():
    declared = re.findall(r":: (3\.\d+)$", setup_cfg()["metadata"]["classifiers"], re.MULTILINE)
    assert sorted(re.findall(r"3\.\d+", row("Python")[1])) == sorted(declared)


def test_the_tested_versions_of_pytorch_are_said_once():
    """Other files name the version of CI alone, or all of them."""
    tested = re.findall(r"^\| (\d\.\d+)\.\d, C", INSTALL, re.MULTILINE)
    oldest, ci, newest = tested
    assert oldest == LEAST["torch"] and VERSIONS["ci"].startswith(f"torch=={ci}.")
    for path in ".ci/run", "CONTRIBUTING.md":
        assert {*re.findall(r"torch==[\d.]+\d", (ROOT / path).read_text())} == {VERSIONS["ci"]}
    for path in [*PAGES, ROOT / "mpiring" / "torch" / "private.py"]:
        for listed in re.findall(r"(\d\.\d+(?:, \d\.\d+)*) and\s(\d\.\d+)", path.read_text()):
            if oldest in listed[0]:
                assert [*listed[0].split(", "), listed[1]] == tested, path


def test_times_of_tests_are_those_of_contributing():
    """If another page gives the time of a command of that table, the time is the same."""
    times = dict(re.findall(r"\| `(python [^`]*)` \| (\d+) min \|$", CONTRIBUTING, re.MULTILINE))
    assert len(times) > 8
    paragraphs = [paragraph for path in PAGES if path.name != "CONTRIBUTING.md"
                  for paragraph in re.split(r"\n\s*\n", path.read_text())]
    for command, minutes in times.items():
        assert not [paragraph for paragraph in paragraphs if command in paragraph
                    and {*re.findall(r"(\w+) min", paragraph)} - {minutes}]
