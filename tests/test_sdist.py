"""Tests what is given away: all that is tracked is in the sdist, and the package in the wheel."""

import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from launching import HANG_S, ROOT, environment, needed


def run(*words, cwd):
    """Run Python, with the package of no other folder in its path; return what it prints."""
    variables = environment(PYTHONDONTWRITEBYTECODE="1")
    del variables["PYTHONPATH"]
    ended = subprocess.run([sys.executable, *words], cwd=cwd, env=variables, text=True,
                           capture_output=True, timeout=HANG_S)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    return ended.stdout


def built(what, tree):
    """Return what pip would have the build back end make, without its network."""
    code = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    run("-c", code, cwd=tree)
    archive, = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def tracked():
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if found.returncode:
        assert os.environ.get("CI") != "true", found.stderr
        pytest.skip(reason="not a git checkout")
    return {name for name in found.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """Return the folder in an sdist of a copy: nothing appears in the checkout."""
    needed("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    with tarfile.open(built("sdist", folder / "tree")) as archive:
        archive.extractall(folder, filter="data")
    tree, = folder.glob("mpiring-*")
    return tree


def files_in(tree):
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


def test_all_that_is_tracked_is_in_the_sdist(tracked, unpacked):
    added = {name for name in files_in(unpacked) - tracked if ".egg-info/" not in name}
    assert added == {"PKG-INFO"} and tracked <= files_in(unpacked), tracked - files_in(unpacked)
    # To setup.cfg, a section is added.
    _, differ, missing = filecmp.cmpfiles(ROOT, unpacked, tracked - {"setup.cfg"}, shallow=False)
    assert not differ and not missing
    assert os.access(unpacked / ".ci" / "run", os.X_OK)


def test_a_wheel_of_the_sdist_holds_the_package_and_nothing_else(unpacked, tmp_path):
    tree = shutil.copytree(unpacked, tmp_path / "tree")
    package = {name for name in files_in(tree) if name.startswith("mpiring/")}
    with zipfile.ZipFile(built("wheel", tree)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about, = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(about))
        assert any(Path(name).name == "LICENSE" for name in wheel.namelist())
    assert names == package and "mpiring/py.typed" in names
    assert metadata["Author"] and metadata["Requires-Python"] == ">=3.10"
    assert "Programming Language :: Python :: 3.10" in metadata.get_all("Classifier")
    assert metadata.get_payload().startswith("# mpiring")
