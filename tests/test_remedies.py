"""Tests that commands that install, in messages and on pages, name what exists.

tests/test_sdist.py runs those of extras, after pip has installed mpiring.
"""

import ast
import json
import re
import shlex
import shutil
import sys

import pytest
from environments import requirements, setup_cfg
from launching import ROOT, needed

from mpiring import remedies
from mpiring.__main__ import _COMMANDS

SOURCE = [*(ROOT / "mpiring").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
# Including the files that users copy. Not the text on a package index: it names mpiring itself,
# and CONTRIBUTING.md says how the name is checked before.
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "packaging").glob("*/*"),
         *(ROOT / "packaging").glob("README.md"), *(ROOT / "slurm").iterdir()]
EXTRAS = setup_cfg()["options.extras_require"].keys()
CHECKOUT = re.compile(r"(/\S+|\.)(?:\[(.+)\])?")


def printed():
    """Return all commands that the package and the studies can print."""
    calls = {ast.unparse(node) for path in SOURCE if path.name != "remedies.py"
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
             and ast.unparse(node.func) in ("pip_install", "pip_install_cupy", "get_mpi")}
    # Arguments are literals, or `eval` fails.
    texts = [remedies.CPU_TORCH, *(eval(call, vars(remedies)) for call in calls)]
    return [command for text in texts for command in re.findall("pip install [^,;]+", text)]


def shown():
    """Return all commands on the pages."""
    return [command for path in PAGES if path.is_file()
            for command in re.findall("pip install ([^`\n&;)]+)", path.read_text())]


@pytest.mark.parametrize(("commands", "least"), [(printed, 9), (shown, 30)])
def test_commands_name_what_exists(commands, least):
    requirement = needed("packaging.requirements").Requirement
    named = commands()
    assert len(named) >= least
    for command in named:
        words = shlex.split(command.removeprefix("pip install "), comments=True)
        for before, word in zip(["", *words], words):
            if checkout := CHECKOUT.fullmatch(word):
                assert {*(checkout[2] or "fast").split(",")} <= EXTRAS, command
            elif not word.startswith("-") and before not in ("--index-url", "--group"):
                assert requirement(word).name != "mpiring", f"not ours in an index: {command}"


NAMED = "pip install 'numba>=0.61' 'xxhash>=3.0'"


@pytest.mark.parametrize(("origin", "command"), [
    ({"url": ROOT.as_uri(), "dir_info": {}}, f"pip install '{ROOT}[fast]'"),
    ({"url": "file:///deleted", "dir_info": {}}, NAMED),
    ({"url": "file:///a/b.whl", "archive_info": {}}, NAMED),
    ({"url": "https://host/a.git", "vcs_info": {"vcs": "git"}}, NAMED),
    (None, NAMED)])
def test_an_extra_is_installed_from_where_mpiring_is(origin, command, monkeypatch, tmp_path):
    folder = tmp_path / "mpiring-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: mpiring\nRequires-Dist: numpy\n" + "".join(
        f'Requires-Dist: {line}; extra == "{name}"\n'
        for name in EXTRAS for line in requirements(name)))
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    install = remedies.pip_install.__wrapped__
    assert install("[fast]") == f"pip install -e '{ROOT}[fast]'", "the package is in a checkout"
    monkeypatch.setattr(remedies, "_ROOT", tmp_path)
    assert install("[fast]") == command


def test_a_checkout_without_the_package_is_none(tmp_path):
    """The images of packaging/ keep setup.cfg, and delete the package that they have installed."""
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    assert not remedies._is_checkout(tmp_path)
    (tmp_path / "mpiring").mkdir()
    assert remedies._is_checkout(tmp_path)


def test_a_copy_of_the_package_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(remedies, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert remedies.pip_install.__wrapped__("[fast]") == "pip install '/path/of/mpiring[fast]'"


def test_messages_name_files_and_commands_that_exist():
    texts = [path.read_text() for path in SOURCE]
    files = {name for text in texts for name in re.findall(
        r"\b(?:docs|examples|packaging|slurm)/[\w/]+\.\w+", text)}
    commands = {name for text in texts for name in re.findall(r"python -m mpiring ([a-z]+)", text)}
    assert len(files) > 5 and not [name for name in files if not (ROOT / name).exists()]
    assert commands and commands <= _COMMANDS.keys()
