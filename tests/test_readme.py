"""Runs what the README shows; `pages` says how its blocks are run."""

import re

import pages
import pytest
from launching import ROOT, launch, python

README = ROOT / "README.md"
COMMANDS = [line for example in pages.examples(README) if example.language == "sh"
            for line in example.shown.splitlines()]


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize("example", pages.parameters([README]))
def test_example(example, tmp_path):
    example.check(tmp_path)


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


def test_the_second_command_finds_all_tests_without_pytorch():
    """Files that need PyTorch are skipped as a whole; anything else they import must be found."""
    found = python("-c", 'import sys; sys.modules["torch"] = None; import pytest\n'
                   'sys.exit(pytest.main(["--collect-only", "-q", "tests"]))',
                   CI="", PYTEST_ADDOPTS="")
    assert found.returncode == 0 and " tests collected" in found.stdout, found.stdout[-5000:]
    assert "tests/test_real_mpi.py::" in found.stdout


def test_the_loop_changes_by_at_most_four_lines():
    first, _ = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in first.splitlines() if line.startswith("+")]) <= 4
