"""A folder that others have written is removed whole, and nothing outside it changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.files.removal import remove_folder
from asyncrl.runtime.files.temporary import TemporaryFolder, remove_left_behind

DEPTH = 3000
"""Folders within one another: beyond Python's stack, the open files and the length of a path."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the folder `victim`. pytest could not remove a deep tree that is left."""
    (tmp_path / "victim").mkdir(mode=0o751)
    (tmp_path / "victim" / "file").write_text("kept")
    (tmp_path / "victim" / "file").chmod(0o640)
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    victim, file = tmp_path / "victim", tmp_path / "victim" / "file"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o751
    assert stat.S_IMODE(file.stat().st_mode) == 0o640 and file.read_text() == "kept"


def make_deep(folder: Path, depth: int = DEPTH) -> None:
    """Folders within one another."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=inner), "w") as file:
        file.write("x")
    os.close(inner)


def links(home: Path) -> None:
    (home / "d").mkdir()
    (home / "d" / "to file").symlink_to(home.parent / "victim" / "file")
    (home / "d" / "to folder").symlink_to(home.parent / "victim")
    (home / "d" / "to nothing").symlink_to(home / "absent")
    (home / "to folder").symlink_to(home.parent / "victim")
    (home / "d").chmod(0o500)


def without_rights(home: Path) -> None:
    (home / "a" / "b" / "c").mkdir(parents=True)
    (home / "a" / "b" / "file").write_text("x")
    for folder in ("a/b/c", "a/b", "a", "."):
        (home / folder).chmod(0)


def many(home: Path) -> None:
    for number in range(20):
        (home / f"{number}" / "same" / "same").mkdir(parents=True)
        for name in ("a b", "line\nline", "-rf", os.fsdecode(b"\xff")):
            (home / f"{number}" / "same" / name).write_text("x")
    os.mkfifo(home / "fifo")


def replaced_by_a_link(home: Path) -> None:
    home.rmdir()
    home.symlink_to(home.parent / "victim")


def replaced_by_a_file(home: Path) -> None:
    home.rmdir()
    home.write_text("x")


@pytest.mark.parametrize(
    "fill",
    [make_deep, links, without_rights, many, replaced_by_a_link, replaced_by_a_file, Path.rmdir],
)
def test_nothing_is_left(home: Path, fill: Callable[[Path], object]) -> None:
    fill(home)
    assert remove_folder(home)
    assert not os.path.lexists(home)


def test_a_user_without_special_rights_removes_all_of_its_own(home: Path) -> None:
    """The superuser may do what permissions forbid, so it tries as another user."""
    if os.getuid():
        pytest.skip("the other tests are without special rights")
    above = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            place = TemporaryFolder("removal_", above)
            for fill in (make_deep, without_rights, many):
                own = Path(place.name) / fill.__name__
                own.mkdir()
                fill(own)
                assert remove_folder(own)
            victim, own = Path(place.name) / "victim", Path(place.name) / "linked"
            own.mkdir()
            victim.mkdir(mode=0o500)
            links(own)
            assert remove_folder(own) and stat.S_IMODE(victim.stat().st_mode) == 0o500
            place.cleanup()
            code = os.path.exists(place.name)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_cannot_be_removed_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "d").mkdir()
    with monkeypatch.context() as broken:

        def refuses(*_: object, **__: object) -> None:
            raise PermissionError

        broken.setattr(os, "rmdir", refuses)
        assert not remove_folder(home)
        TemporaryFolder("test_", home).cleanup()
    assert (home / "d").exists()


def test_a_deep_tree_of_a_dead_process_does_not_stop_the_next_run(tmp_path: Path) -> None:
    old = tmp_path / "asyncrl_environment_4194305_1_abc"
    old.mkdir()
    try:
        make_deep(old)
        remove_left_behind(tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        remove_folder(old)  # pytest could not


def test_a_temporary_folder_ends_with_its_block_or_its_object(tmp_path: Path) -> None:
    with TemporaryFolder("test_", tmp_path) as name:
        assert [path.name for path in tmp_path.iterdir()] == [Path(name).name]
    assert list(tmp_path.iterdir()) == []
    folder = TemporaryFolder("test_", tmp_path)
    folder.cleanup()
    folder.cleanup()
    kept = TemporaryFolder("test_", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del kept
    assert list(tmp_path.iterdir()) == []
