"""Runs what the README shows, as readers see it, and checks that they can read it quickly."""

import re
import textwrap

import pages
import pytest
from launching import ROOT, installed, launch, needed, python, shell

import mpiring

README = ROOT / "README.md"
COMMANDS = [line for example in pages.examples(README) if example.language == "sh"
            for line in example.shown.splitlines()]
MAX_WORDS, SCREEN_LINES, SCREEN_COLUMNS = 900, 45, 100


def tokens():
    """Return the blocks of the page as Markdown's own parser sees them."""
    return needed("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table").parse(
        README.read_text())


def visible(token):
    """Return the text of a block that readers see: no comments, no targets of links."""
    return token.content if token.type == "fence" else "".join(
        "\n" if child.type == "softbreak" else child.content for child in token.children or ()
        if child.type in ("text", "code_inline", "softbreak"))


@pytest.mark.parametrize("example", [each for each in pages.parameters([README])
                                     if each.values[0].language == "sh"])
def test_commands(example, tmp_path):
    example.check(tmp_path)


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_a_program_runs_as_rendered(package, tmp_path):
    """It is copied from the page, without hidden lines before or after it."""
    installed(package)
    program, = (token.content for token in tokens()
                if token.type == "fence" and f"from mpiring.{package} import" in token.content)
    assert len(program.splitlines()) <= 22
    (tmp_path / "train.py").write_text(program)
    ended = launch(3, "train.py", cwd=tmp_path)
    assert ended.status == 0, ended.output
    lines = re.findall(r"(\d+), rank (\d): ([\d.]+), weights \[+(.*?)\]+$", ended.output, re.M)
    assert len(lines) == len(ended.output.splitlines()), ended.output
    last = max(int(step) for step, *_ in lines)
    weights = {text for step, _, _, text in lines if int(step) == last}
    assert len(weights) == 1 and {rank for _, rank, *_ in lines} == {"0", "1", "2"}
    assert [float(number) for number in weights.pop().split(", ")] == pytest.approx(
        [1, 2], abs=0.05)
    for each in "012":
        losses = [float(loss) for _, rank, loss, _ in lines if rank == each]
        assert losses[-1] < losses[0] / 10
    # Each rank reads its own share.
    assert len({loss for step, _, loss, _ in lines if step == "0"}) == 3


@pytest.mark.launch
@pytest.mark.any_mpi
def test_the_first_command_trains():
    """The part behind `pip install … &&`; CI runs the whole of it in a fresh environment."""
    command = COMMANDS[0].split("&&")[1].split()
    assert command[:4] == ["mpirun", "-n", "4", "python"]
    ended = launch(4, *command[4:])
    assert ended.status == 0, ended.output
    accuracy = float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1])
    assert accuracy >= 97
    shown, = (token.content for token in tokens() if token.info == "text")
    assert form_of(shown) == form_of(ended.output.splitlines()[-1])


def form_of(line):
    """Return a line of output without its numbers, which vary."""
    return re.sub(r"[\d.,]+", "0", line).split()


def test_the_second_command_finds_all_tests_without_pytorch():
    """Files that need PyTorch are skipped as a whole; anything else they import must be found."""
    ended = python("-c", 'import sys; sys.modules["torch"] = None; import pytest\n'
                   'sys.exit(pytest.main(["--collect-only", "-q", "tests"]))',
                   CI="", PYTEST_ADDOPTS="")
    assert ended.returncode == 0 and " tests collected" in ended.stdout, ended.stdout[-5000:]
    assert "tests/test_real_mpi.py::" in ended.stdout


def test_ci_cuts_its_commands_out_of_the_page():
    script = (ROOT / ".ci" / "run").read_text()
    variable, = re.findall(r"^two_at_a_time=.*$", script, re.M)
    first, last = re.findall(r"^(grep .*README\.md.*) >", script, re.M)
    assert shell(first).output == f"{COMMANDS[0]}\n"
    assert shell(f"{variable}; {last}").output.splitlines() == COMMANDS[-2:]


def test_it_is_short():
    text = " ".join(visible(token) for token in tokens() if token.type in ("inline", "fence"))
    assert len(text.split()) <= MAX_WORDS


def test_the_first_screen_says_what_it_is_for_whom_and_what_to_type():
    screen = []
    for token in tokens():
        if token.type in ("inline", "fence"):
            screen += [line for shown in visible(token).splitlines()
                       for line in textwrap.wrap(shown, SCREEN_COLUMNS)] + [""]
    screen = screen[:SCREEN_LINES]
    for text in ("Train PyTorch, NumPy, and CuPy models", "Use it if", "Do not use it if",
                 COMMANDS[0], "test accuracy"):
        assert any(text in line for line in screen), text
    assert not any("comm.empty" in visible(token) for token in tokens())


def test_what_others_read_of_the_project_agrees():
    """Version and license stand in README, in the package and in the file for citations."""
    cited = dict(re.findall(r"^([a-z-]+): \"?(.*?)\"?$", (ROOT / "CITATION.cff").read_text(), re.M))
    settings = (ROOT / "setup.cfg").read_text()
    assert cited["version"] == mpiring.__version__
    assert f"\nlicense_expression = {cited['license']}\n" in settings
    assert f"Version {cited['version']} (alpha). {cited['license']}." in README.read_text()
