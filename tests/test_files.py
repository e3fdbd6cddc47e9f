"""Tests how files are opened in folders in which another user has prepared links and pipes."""

import json
import os
import sys

import pytest

from mpiring import files


@pytest.fixture
def victim(tmp_path):
    """Return a file of this user, which no file elsewhere may reach."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious" and list(path.parent.iterdir()) == [path]


@pytest.fixture
def shared(tmp_path):
    """Return a folder that another user may write to."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.mark.parametrize("mode", ["w", "a", "a+", "x", "r+"])
@pytest.mark.parametrize("dangling", [False, True])
def test_nothing_is_written_through_a_link(shared, victim, mode, dangling):
    (shared / "name").symlink_to(victim.with_name("new") if dangling else victim)
    with pytest.raises(OSError, match="symbolic link, which is not followed; delete it|exists"):
        open(shared / "name", mode, opener=files.regular)


@pytest.mark.parametrize("mode", ["r", "w", "a+", "r+"])
def test_a_pipe_is_refused_at_once(shared, mode):
    os.mkfifo(shared / "name")
    with pytest.raises(OSError, match="not a regular file|No such device"):
        open(shared / "name", mode, opener=files.regular)
    with pytest.raises(OSError, match="not a regular file"):
        files.read(shared / "name", 10)


def test_a_file_that_is_too_long_is_not_read(shared):
    (shared / "name").write_bytes(b"12345")
    assert files.read(shared / "name", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read(shared / "name", 4)
    os.truncate(shared / "name", 1 << 42)
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read(shared / "name", 4)


def test_only_what_nobody_else_can_have_written_is_private(shared, victim, monkeypatch):
    files.save(shared / "name", b"1")
    assert files.read(shared / "name", 9, private=True) == b"1"
    for mode in (0o620, 0o602):
        (shared / "name").chmod(mode)
        with pytest.raises(OSError, match="others may write to it"):
            files.read(shared / "name", 9, private=True)
    (shared / "name").chmod(0o600)
    (shared / "link").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        files.read(shared / "link", 9, private=True)
    assert files.read(shared / "link", 9) == b"precious", "what is not private may lie elsewhere"
    with pytest.raises(OSError, match="symbolic link"):
        files.read(shared / "link", 9, links=False)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(OSError, match="not a file of this user"):
        files.read(shared / "name", 9, private=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_is_not_followed(shared, victim):
    (shared / "link").symlink_to(victim)
    (shared / "name").write_bytes(b"of a colleague")
    os.chown(shared / "link", 1234, -1, follow_symlinks=False)
    os.chown(shared / "name", 1234, -1)
    assert files.read(shared / "name", 99) == b"of a colleague"
    with pytest.raises(OSError, match="symbolic link"):
        files.read(shared / "link", 99)


@pytest.mark.parametrize("private, mode", [(True, 0o600), (False, 0o640)])
def test_a_new_file_takes_the_place_of_an_old_one_and_of_a_link(shared, victim, private, mode):
    before = os.umask(0o027)
    try:
        (shared / "name").symlink_to(victim)
        for content in (b"old", b"new"):
            with files.replacing(shared / "name", private=private, synced=True) as new:
                new.file.write(content)
    finally:
        os.umask(before)
    assert (shared / "name").read_bytes() == b"new" and not (shared / "name").is_symlink()
    assert (shared / "name").stat().st_mode & 0o777 == mode
    assert len(list(shared.iterdir())) == 1


def test_a_file_that_is_not_complete_changes_nothing(shared):
    (shared / "name").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError):
        with files.replacing(shared / "name") as new:
            new.file.write(b"new")
            1 / 0
    assert [path.read_bytes() for path in shared.iterdir()] == [b"old"]


def test_a_folder_that_may_be_no_link(shared, victim):
    (shared / "folder").symlink_to(victim.parent)
    with pytest.raises(OSError, match="Not a directory|symbolic link"):
        with files.replacing(shared / "folder" / "name", links=False):
            pass


def test_the_folder_may_be_renamed_as_soon_as_the_file_has_its_name(tmp_path, monkeypatch):
    rename = os.rename

    def renamed_at_once(source, target, **options):
        rename(source, target, **options)
        rename(tmp_path / "written", tmp_path / "published")

    (tmp_path / "written").mkdir()
    monkeypatch.setattr(os, "rename", renamed_at_once)
    with files.replacing(tmp_path / "written" / "name", synced=True) as new:
        new.file.write(b"1")
        new.name = "another"
    assert (tmp_path / "published" / "another").read_bytes() == b"1"


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("value", [
    3, "", {}, [], [[]], {"a": [1, {"b": None}]}, {"[[[[": "]]]\"{{{{\\\"[[[\\"}, "[[[[",
    ["\\", "[[[[", "\\\\"], {"ä": ["\u1234{{{{"]}])
def test_json_of_few_levels_is_read(value):
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert files.parsed(text, 3) == value


@pytest.mark.parametrize("text", [
    nested(4), '{"a": ' * 4 + "1" + "}" * 4, "[" * 10**6, nested(10**6), '["\\\\", [[[]]]]',
    nested(2).encode("utf-16").decode("latin1"), "", '"', '{"a', "[1,]", "\udcff"])
def test_other_json_is_refused(text):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)         # so that the parser would not stop before its stack ends
    try:
        with pytest.raises(ValueError):
            files.parsed(text.encode("utf-8", "surrogateescape"), 3)
    finally:
        sys.setrecursionlimit(limit)
