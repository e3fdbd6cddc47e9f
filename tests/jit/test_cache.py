"""Tests that machine code is saved and loaded, and that nothing else is ever run."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from launching import HANG_S, ROOT, environment, needed

from mpiring.jit import cache, loops

FACTOR = np.int64(3)


def renewed(monkeypatch, folder):
    """Let nothing be compiled, and nothing be said, of what was before."""
    for name, value in {"_codes": {}, "_missing": set(), "_folder": folder, "_enabled": True,
                        "_warns": True, "_warned": set(), "_problem": ""}.items():
        monkeypatch.setattr(cache, name, value)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Save code in a folder of the test's own; return what has been compiled."""
    needed("numba")
    names = []
    by_numba = cache._compile_and_save
    monkeypatch.setattr(cache, "_compile_and_save",
                        lambda *arguments: (names.append(arguments[0]), by_numba(*arguments))[1])
    renewed(monkeypatch, tmp_path)
    return names


def tripled(x, n):
    for i in range(n):
        x[i] *= FACTOR


def shifted(x, n):
    for i in range(n):
        x[i] += 1


def counted(x, n):
    """Raise an exception, as numba sees it, where n is 0."""
    for i in range(0, 3, n):
        x[i] = i


def run(function, as_in_a_new_process=True):
    if as_in_a_new_process:
        cache._codes.clear()
    x = np.array([1, 2, 3])
    loops.loop("tests", function, "int64* intp")(x, 3)
    return x.tolist()


def only_file(folder):
    (file,) = folder.iterdir()
    return file


def test_code_is_made_once_and_then_loaded(made, tmp_path):
    assert run(tripled) == run(tripled) == run(tripled, as_in_a_new_process=False) == [3, 6, 9]
    assert made == ["tests"]
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_code_that_is_switched_off_is_neither_made_nor_loaded(made, tmp_path):
    run(tripled)
    for folder in (tmp_path, None):
        cache.configure(folder, enabled=False)
        assert loops.loop("tests", tripled, "int64* intp") is None
        assert loops.loop("tests", shifted, "int64* intp") is None
    assert made == ["tests"]


def in_another_process(folder, *lines):
    """Return what lines print where machine code is saved in a folder."""
    text = "\n".join(["import sys", "import numpy as np", "from pathlib import Path",
                      "from mpiring.jit import cache, sums",
                      "from mpiring.memory.reduction import Reduction",
                      f"cache.configure(Path({str(folder)!r}))", *lines])
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, text=True,
                          env=environment(), capture_output=True, timeout=HANG_S).stdout


def test_later_processes_need_no_numba(made, tmp_path):
    loops.combiner("float16")
    out = in_another_process(
        tmp_path, "sys.modules['numba'] = None", "x = np.array([1, 2.5], 'float16')",
        "Reduction('sum', x.dtype, 2).combine([x, x], x)", "print(x, list(cache._codes))")
    assert out.startswith("[2. 5.]") and "_combine_loop" in out


def test_nothing_is_loaded_to_find_that_nothing_was_saved(tmp_path):
    """LLVM takes 50 MiB of each process."""
    assert in_another_process(
        tmp_path, "print(sums.code('float32'), 'llvmlite' in sys.modules)") == "None False\n"


def test_saved_is_what_needs_no_compiling(made):
    arguments = ("tests", loops._identity, "int64* intp", tripled)
    assert cache.code(*arguments, compiles=False) is None and not made
    code = cache.code(*arguments)
    assert cache.code(*arguments, compiles=False) is code
    cache._codes.clear()
    cache._missing.clear()
    assert cache.code(*arguments, compiles=False) is not None and made == ["tests"]


def truncated(file):
    file.write_bytes(file.read_bytes()[:-40])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)


def replaced(file):
    """Let it be of another function, whole as it is."""
    copy = file.read_bytes()
    file.unlink()
    run(shifted)
    other = only_file(file.parent)
    shutil.copyfile(other, file)
    other.write_bytes(copy)


def writable(file):
    file.chmod(0o620)


def piped(file):
    file.unlink()
    os.mkfifo(file)


def is_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [truncated, flipped, replaced, writable, piped, is_folder],
                         ids=lambda spoil: spoil.__name__)
def test_a_file_that_is_not_as_it_was_saved_is_never_run(spoil, made, tmp_path, caplog):
    caplog.set_level("INFO", "mpiring")
    assert run(tripled) == [3, 6, 9]
    file = only_file(tmp_path)
    spoil(file)
    made.clear()
    assert run(tripled) == [3, 6, 9] and made == ["tests"]
    assert f"{file} is not used: " in caplog.text
    if spoil is not is_folder:
        assert run(tripled) == [3, 6, 9] and made == ["tests"], "it has been made anew"


def test_a_file_of_another_user_is_not_used(made, monkeypatch, caplog):
    caplog.set_level("INFO", "mpiring")
    run(tripled)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert run(tripled) == [3, 6, 9] and len(made) == 2
    assert "not a file of this user" in caplog.text


@pytest.mark.parametrize("folder", [None, "a file"])
def test_without_a_folder_code_is_made_by_every_process(folder, made, tmp_path, monkeypatch,
                                                        caplog):
    caplog.set_level("INFO", "mpiring")
    (tmp_path / "a file").touch()
    cache.configure(folder and tmp_path / folder / "deep")
    assert run(tripled) == run(tripled) == [3, 6, 9] and len(made) == 2
    levels = [entry.levelname for entry in caplog.records if "MPIRING_TUNING_FOLDER" in entry.msg]
    assert levels == (["WARNING", "INFO"] if folder else [])
    assert only_file(tmp_path).read_bytes() == b""


@pytest.mark.parametrize("warns", [True, False])
@pytest.mark.parametrize("error", [OSError("cannot allocate memory"), MemoryError()], ids=repr)
def test_a_numba_that_cannot_be_loaded_is_done_without(error, warns, monkeypatch, caplog):
    """As where memory or descriptors are limited; numba need not be installed here."""
    tried = []

    def fails(name):
        tried.append(name)
        raise error

    renewed(monkeypatch, None)
    cache.configure(None, warns=warns)
    monkeypatch.setattr(cache.importlib, "import_module", fails)
    caplog.set_level("INFO", "mpiring")
    for function in (tripled, shifted):
        assert cache.code("tests", loops._identity, "int64* intp", function) is None
    (entry,) = caplog.records
    assert entry.levelname == ("WARNING" if warns else "INFO")
    assert (str(error) or "MemoryError") in caplog.text and "ulimit -v" in caplog.text
    assert tried == ["numba"], "once is enough"


def test_what_a_function_depends_on_is_part_of_its_name(made, monkeypatch):
    def with_number(number):
        def function(x, n):
            for i in range(n):
                x[i] *= number
        return function

    assert run(with_number(2)) == run(with_number(2)) == [2, 4, 6] and len(made) == 1
    assert run(with_number(5)) == [5, 10, 15] and len(made) == 2
    assert run(tripled) == [3, 6, 9]
    monkeypatch.setitem(globals(), "FACTOR", np.int64(7))
    assert run(tripled) == [7, 14, 21] and len(made) == 4
    monkeypatch.setattr(cache.platform, "python_version", lambda: "3.99")
    assert run(tripled) == [7, 14, 21] and len(made) == 5


def test_a_function_that_depends_on_what_nobody_can_describe_is_refused(made):
    x = np.zeros(3)

    def function(y, n):
        y[0] = x[0]

    with pytest.raises(TypeError, match="cannot depend on"):
        run(function)


def test_a_function_that_may_raise_works_but_is_not_saved(made, tmp_path):
    assert run(counted) == run(counted) == [0, 2, 3] and len(made) == 2
    assert not list(tmp_path.iterdir())
