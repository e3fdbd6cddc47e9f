"""Tests what is given away: what sdist and wheel hold, and that the wheel installs and runs."""

import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from launching import HANG_S, ROOT, environment, installed, mpiexec, needed, tracked_files

import mpiring

MAX_BYTES = 2_000_000
WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def run(*words, cwd, python=sys.executable, **variables):
    """Run Python, with the package of no other folder in its path; return what it prints."""
    variables = environment(PYTHONDONTWRITEBYTECODE="1", **variables)
    del variables["PYTHONPATH"]
    ended = subprocess.run([python, *map(str, words)], cwd=cwd, env=variables, text=True,
                           capture_output=True, timeout=HANG_S)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    return ended.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return sdist, and wheel of the sdist, of a copy: nothing appears in the checkout."""
    for package in "build", "setuptools":
        needed(package)
    folder = tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    run("-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "tree")
    sdist, = (folder / "dist").glob("*.tar.gz")
    wheel, = (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def unpacked(archives, tmp_path_factory):
    """Return the folder in the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    tree, = folder.glob("mpiring-*")
    return tree


def files_in(tree):
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


def test_all_that_is_tracked_is_in_the_sdist(unpacked):
    tracked = tracked_files()
    added = {name for name in files_in(unpacked) - tracked if ".egg-info/" not in name}
    assert added == {"PKG-INFO"} and tracked <= files_in(unpacked), tracked - files_in(unpacked)
    # To setup.cfg, a section is added.
    _, differ, missing = filecmp.cmpfiles(ROOT, unpacked, tracked - {"setup.cfg"}, shallow=False)
    assert not differ and not missing
    assert os.access(unpacked / ".ci" / "run", os.X_OK)


def test_the_wheel_holds_the_package_and_nothing_else(archives, unpacked):
    package = {name for name in files_in(unpacked) if name.startswith("mpiring/")}
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about, = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(about))
        assert any(Path(name).name == "LICENSE" for name in wheel.namelist())
    assert names == package and "mpiring/py.typed" in names
    assert metadata["Author"] and metadata["Requires-Python"] == ">=3.10"
    assert metadata["Version"] == mpiring.__version__
    text = metadata.get_payload()
    assert text.startswith("# mpiring")
    assert not re.search(r"\]\((?!https://)", text), "an index has no other files"


def test_an_index_would_take_them(archives):
    needed("twine")
    run("-m", "twine", "check", "--strict", *archives, cwd=ROOT)
    for archive in archives:
        assert archive.stat().st_size < MAX_BYTES


@pytest.fixture
def fresh(tmp_path):
    """Return Python of a new environment. What mpiring depends on comes from this environment."""
    run("-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    ours = run("-c", WHERE, cwd=tmp_path).strip()
    packages = Path(run("-c", WHERE, python=python, cwd=tmp_path).strip())
    (packages / "dependencies.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


def pip(python, *words, cwd):
    """Run pip for an environment, without a network."""
    return run("-m", "pip", "--python", python, *words, "--no-index", "--no-build-isolation",
               cwd=cwd)


@pytest.mark.launch
@pytest.mark.any_mpi
def test_the_wheel_installs_in_a_fresh_environment_and_runs(archives, unpacked, fresh, tmp_path):
    """It was built of the sdist."""
    pip(fresh, "install", "--no-deps", "--ignore-installed", archives[1], cwd=tmp_path)
    packages = Path(run("-c", WHERE, python=fresh, cwd=tmp_path).strip())
    assert (packages / "mpiring" / "__init__.py").is_file()
    example = shutil.copy(unpacked / "examples" / "allreduce.py", tmp_path)
    code = ("import mpiring, runpy; assert mpiring.__file__.startswith({!r}), mpiring.__file__; "
            "runpy.run_path({!r})").format(str(packages), example)
    started = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    # mpi4py's wheel looks beside Python, then here.
    output = run("-c", started, mpiexec(), "-n", 2, fresh, "-c", code, cwd=tmp_path,
                 LD_LIBRARY_PATH=str(Path(sys.prefix) / "lib"))
    assert "rank 1 of 2: the ranks add up to 1;" in output, output


@pytest.mark.parametrize("origin", ["wheel", "folder", "editable"])
def test_the_command_that_installs_an_extra_works(origin, archives, unpacked, fresh, tmp_path):
    """As it is printed, wherever mpiring came from."""
    for package in "numba", "xxhash":
        installed(package)
    tree = shutil.copytree(unpacked, tmp_path / "a folder")
    source = {"wheel": [archives[1]], "folder": [tree], "editable": ["-e", tree]}[origin]
    pip(fresh, "install", *source, "--no-deps", "--ignore-installed", cwd=tmp_path)
    code = "from mpiring.remedies import pip_install; print(pip_install('[fast]'))"
    command = run("-c", code, python=fresh, cwd=tmp_path).strip()
    assert command == {
        "wheel": "pip install 'numba>=0.61' 'xxhash>=3.0'",
        "folder": f"pip install '{tree}[fast]'",
        "editable": f"pip install -e '{tree}[fast]'"}[origin]
    printed = pip(fresh, *shlex.split(command)[1:], "--dry-run", cwd=tmp_path)
    assert "Requirement already satisfied: numba>=0.61" in printed
