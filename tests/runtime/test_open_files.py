"""Files of a run are written without following links, and only regular files are opened."""

import errno
import os
import socket
from pathlib import Path

import pytest

from asyncrl.contracts.errors import EscapesDirectoryError
from asyncrl.runtime.files.opening import (
    DiskFullError,
    NotAFileError,
    append_to,
    make_directory,
    open_regular,
    read_text,
    replace_text,
    replacing,
)


def write(path):
    replace_text(path, "new")


def append(path):
    with append_to(path) as file:
        file.write("new")


WRITERS = pytest.mark.parametrize("writer", [write, append])


@WRITERS
def test_a_file_is_written_and_missing_directories_are_created(tmp_path, writer):
    writer(tmp_path / "a" / "b" / "file")
    assert read_text(tmp_path / "a" / "b" / "file") == "new" and os.listdir(
        tmp_path / "a" / "b"
    ) == ["file"]


@WRITERS
@pytest.mark.parametrize("where", ["file", "folder", "folder above"])
def test_no_link_is_followed_at_any_depth(tmp_path, writer, where):
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "victim").write_text("precious")
    run = tmp_path / "run"
    if where == "file":
        (run / "a" / "b").mkdir(parents=True)
        (run / "a" / "b" / "file").symlink_to(outside / "victim")
    elif where == "folder":
        (run / "a").mkdir(parents=True)
        (run / "a" / "b").symlink_to(outside)
    else:
        run.mkdir()
        (run / "a").symlink_to(outside)
    with pytest.raises(EscapesDirectoryError, match="is a symbolic link"):
        writer(run / "a" / "b" / "file")
    assert (outside / "victim").read_text() == "precious" and not list((outside / "b").iterdir())


def test_a_link_under_the_temporary_name_is_removed_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".file.{os.getpid()}").symlink_to(tmp_path / "victim")
    write(tmp_path / "file")
    assert (tmp_path / "victim").read_text() == "precious" and (
        tmp_path / "file"
    ).read_text() == "new"


def other_kinds(directory):
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "socket"))
    return listener


@pytest.mark.parametrize(
    ("name", "kind"),
    [("directory", "a directory"), ("pipe", "a named pipe"), ("socket", "a socket")],
)
def test_anything_but_a_regular_file_is_an_error_with_its_name(tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with other_kinds(tmp_path):
        for use in (write, append):
            with pytest.raises(NotAFileError, match=f"{name} is {kind}, not a file"):
                use(tmp_path / name)
        if name != "socket":  # the system refuses to open a socket
            with pytest.raises(NotAFileError, match=f"{name} is {kind}, not a file"):
                open_regular(tmp_path / name)


def test_a_device_is_not_read():
    with pytest.raises(NotAFileError, match="/dev/zero is a device"):
        open_regular(Path("/dev/zero"))


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(NotAFileError, match="is a file, not a directory"):
        make_directory(tmp_path / "a" / "b")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write(tmp_path / "file")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"file cannot be written: [\d,]+ bytes are free"):
        replace_text(tmp_path / "file", "other")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "new"


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)
