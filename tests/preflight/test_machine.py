"""What a run needs of this machine is refused by name before anything is made."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from small_config import small_config

from asyncrl.config import ConfigError
from asyncrl.preflight import machine
from asyncrl.preflight.machine import refuse_machine
from asyncrl.run.cluster.cluster_address import UV, ray_constants, without_uv
from asyncrl.rundir.directory import _Lock
from asyncrl.sandbox.machine import ProcessLimit


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A config of a run in `tmp_path / "runs"`, and no variables that change where Ray works."""
    for name in ("RAY_TMPDIR", "TMPDIR", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(machine, "process_limit", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    return small_config(runs_root=str(tmp_path / "runs"))


def refused(run, tmp_path, *words):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        refuse_machine(run)
    for word in words:
        assert word in str(error.value), error.value
    assert sorted(tmp_path.rglob("*")) == before


def test_an_ordinary_machine_is_accepted(run, tmp_path):
    refuse_machine(run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t" * 40, ("bytes too long", "107")),
        ("für", ("beyond ASCII",)),
    ],
)
def test_a_temporary_folder_that_ray_cannot_use(run, tmp_path, monkeypatch, variable, name, words):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv(variable, str(folder))
    refused(run, tmp_path, *words, str(folder), variable, "set RAY_TMPDIR")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    refuse_machine(run)


def test_a_relative_folder_of_ray(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "tmp")
    refused(run, tmp_path, "absolute")


def test_a_temporary_folder_that_does_not_exist_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    refused(run, tmp_path, "TMPDIR", str(tmp_path / "absent"), "create it")


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("lacks", ["bytes", "files"])
def test_a_full_temporary_folder_is_named(run, tmp_path, monkeypatch, variable, lacks):
    """Ray would wait for a file that it could not write, and name only that."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(machine, "SESSION", "")
    monkeypatch.setenv(variable, str(folder))
    real = os.statvfs

    def statvfs(place):
        if not Path(place).is_relative_to(folder):
            return real(place)
        free = 1 << 8 if lacks == "bytes" else 1 << 20  # blocks of 4 KiB
        return os.statvfs_result((4096, 4096, 0, 0, free, 9, 0, lacks == "bytes", 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    words = ("1,024 KiB left", "16 MiB") if lacks == "bytes" else ("no room for another file",)
    refused(run, tmp_path, *words, str(folder), f"set {variable} to another")


def test_ray_folder_that_is_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "ray").write_text("")
    monkeypatch.setattr(machine, "SESSION", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    refused(run, tmp_path, "is no folder", "RAY_TMPDIR")


def test_a_run_on_another_cluster_needs_no_ray_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "tmp")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    refuse_machine(run)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(run, tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(run, tmp_path, "no locks", "ASYNCRL_RUNS", str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match="no locks"):
        _Lock.acquire(tmp_path, "a title", "a way out")


def test_checkpoints_elsewhere_are_tried_too(run, tmp_path):
    (tmp_path / "file").write_text("")
    other = run.model_copy(
        update={
            "checkpoint": run.checkpoint.model_copy(update={"save": str(tmp_path / "file" / "x")})
        }
    )
    refused(other, tmp_path, "checkpoint.save", "Not a directory")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOME": "/proc/version"}, ("HOME = '/proc/version'", "auth_token")),
        ({"HOME": "/proc"}, ("HOME = '/proc'", "auth_token")),
        ({"RAY_AUTH_TOKEN_PATH": "/no/such/token"}, ("RAY_AUTH_TOKEN_PATH", "/no/such/token")),
    ],
)
def test_a_home_without_room_for_rays_token(run, tmp_path, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(run, tmp_path, *words)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    refuse_machine(run)


def test_an_unknown_user_without_home(run, tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    refused(run, tmp_path, "HOME is not set", str(os.getuid()))


def test_a_path_in_an_unknown_home(run, monkeypatch):
    with pytest.raises(ConfigError, match="set HOME"):
        _ = run.model_copy(update={"runs_root": "~no-such-user/runs"}).run_directory
    with pytest.raises(ValueError, match="set HOME"):
        small_config(model={"path": "~no-such-user/model"})


@pytest.mark.parametrize(("most", "used"), [(150, 4), (4096, 4000)])
def test_too_few_processes_are_named(run, tmp_path, monkeypatch, most, used):
    limit = ProcessLimit("`ulimit -u` of this user", most, used)
    monkeypatch.setattr(machine, "process_limit", lambda: limit)
    refused(run, tmp_path, "`ulimit -u`", f"{most:,}", "raise the limit")


def test_enough_processes_are_accepted(run, monkeypatch):
    monkeypatch.setattr(machine, "process_limit", lambda: ProcessLimit("a limit", 4096, 1000))
    refuse_machine(run)


def test_paths_in_another_encoding_than_utf8(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "iso8859-1")
    refused(run, tmp_path, "iso8859-1", "PYTHONUTF8=1")


@pytest.mark.parametrize(("given", "packs"), [(None, False), ("0", False), ("1", True)])
def test_ray_does_not_pack_the_folder_of_uv_run(monkeypatch, given, packs):
    monkeypatch.setenv(UV, given or "")
    if given is None:
        monkeypatch.delenv(UV)
    monkeypatch.setattr(ray_constants, UV, True)
    without_uv()
    assert packs == getattr(ray_constants, UV)
    assert os.environ[UV] == ("1" if packs else "0")
