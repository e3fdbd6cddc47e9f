"""Runs what the pages under docs/ show.

A comment before a block says how: `<!-- ranks: 3 -->` starts a Python block as a program on three
ranks, `<!-- run -->` a shell block as it stands. Both must succeed, unless the comment goes on:
`<!-- ranks: 2, fails: ConfigError -->` must fail with that text in what it prints. What else is
needed is named, too: `<!-- ranks: 2, needs: torch -->`. Those of clients.md need the extra
`clients`, and are run by tests/clients.
"""

import re
import runpy

import pytest
from launching import ROOT, WITHOUT_STAND_INS, installed, launch, shell

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

PAGES = sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- ([^\n]*) -->\n)?^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(pages):
    for page in pages:
        for number, match in enumerate(_BLOCK.finditer(page.read_text()), 1):
            yield pytest.param(*match.groups(), id=f"{page.relative_to(ROOT)}:{number}")


def options_of(comment):
    assert comment, "a comment before the block says how it is run"
    return dict(re.match(r"(\w+)(?:: (.*))?$", part).groups() for part in comment.split(", "))


def run(comment, language, text, folder):
    options = options_of(comment)
    assert ("ranks" in options) == (language == "python") and options.keys() <= {
        "ranks", "run", "fails", "needs"}
    for module in options.get("needs", "").split():
        installed(module)
    if language == "python":
        program = folder / "program.py"
        program.write_text(text)
        # What is needed may look for the whole of scikit-learn.
        ended = launch(int(options["ranks"]), program,
                       **WITHOUT_STAND_INS if "needs" in options else {})
    else:
        ended = shell(text)
    assert (ended.status == 0) == ("fails" not in options), ended.output
    assert options.get("fails", "") in ended.output


@pytest.mark.parametrize(
    "comment, language, text", [*blocks(page for page in PAGES if page.name != "clients.md")])
def test_block(comment, language, text, tmp_path):
    run(comment, language, text, tmp_path)


def test_pictures_are_those_that_their_source_draws():
    namespace = runpy.run_path(ROOT / "docs" / "pictures" / "draw.py")
    for name, sheet in namespace["PICTURES"].items():
        drawn = (ROOT / "docs" / "pictures" / name).read_text()
        assert namespace["picture"](*sheet) == drawn, "run python docs/pictures/draw.py"


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("C*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
