"""This machine's folders, locks, encoding and limits, checked before a run makes anything. Ray and
other libraries find the same problems late, and report them in words of their own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.runtime.files.temporary import SHORT, SOCKET_PATH, ProcessTemporaryFolder
from asyncrl.sandbox.machine import process_limit, usable_cpus

SESSION = "/session_2026-01-01_00-00-00_000000_{process}/sockets/plasma_store"
"""Ray's longest path of a socket in its temporary folder, which is limited to SOCKET_PATH bytes."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RAY_ITSELF, REPLICA, PART, IDLE = 180, 90, 32, 22
"""Processes and threads of Ray's own processes with the driver, of a generator replica with its
engine, of any other part, and of a worker without work: as counted on two processors. More
processors bring more threads."""
LEAST_FREE = 16 << 20
"""Bytes that a temporary folder needs, at least: for Ray's logs, and small files of libraries. Ray
itself waits for files that it could not write, and then names only those."""
SERVICES = 6
"""Workers of every run with generators: two streams, and what Serve, Ray Data and the weights
need."""


def refuse_machine(config: RunSettings) -> None:
    """Refuse a run that this machine cannot hold. Without RAY_ADDRESS, it starts Ray here.

    Raises:
        ConfigError: a folder cannot be used or is full, its file system has no locks, paths are not
            in UTF-8, or too few processes are allowed. The message names the variable or setting
            to change.
    """
    refuse_environment()
    temporary = tempfile.gettempdir()
    _refuse_full(f"the temporary folder {temporary!r}", "TMPDIR", temporary)
    for setting, directory in _directories(config):
        _refuse_unusable(setting, directory)
    if starts_ray_here():
        _refuse_ray_folder()
        _refuse_home()
        _refuse_few_processes(config)


def starts_ray_here() -> bool:
    """Whether a run of this process starts Ray on this machine. With a cluster at RAY_ADDRESS,
    the run may have no part here, and the memory and GPUs of this machine say nothing about it."""
    return os.environ.get("RAY_ADDRESS") in (None, "", "local")


def refuse_environment() -> None:
    """Raise ConfigError if paths are not in UTF-8, or if no temporary folder can be used."""
    _refuse_encoding()
    _refuse_temporary()


def _refuse_encoding() -> None:
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        raise ConfigError(
            f"Python writes paths in {encoding} here, and Ray and pyarrow in UTF-8, so paths with"
            " letters beyond ASCII would be lost; set PYTHONUTF8=1"
        )


def _refuse_temporary() -> None:
    named = os.environ.get("TMPDIR")
    if named and not _writable_folder(Path(named)):
        raise ConfigError(
            f"TMPDIR = {named!r} is no folder that this user can write to; create it, or set TMPDIR"
            " to another"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"no temporary folder can be written to ({error.strerror}); set TMPDIR to one"
        ) from None
    if ProcessTemporaryFolder.where() == SHORT and not _writable_folder(SHORT):
        raise ConfigError(
            f"TMPDIR = {named!r} is too long a path for sockets, and {SHORT} cannot be written to;"
            " set TMPDIR to a shorter path"
        )


def _directories(config: RunSettings) -> Iterator[tuple[str, Path]]:
    yield "runs_root or ASYNCRL_RUNS", config.run_directory
    if config.checkpoint.save:
        yield "checkpoint.save", config.checkpoints_directory


def _refuse_unusable(setting: str, directory: Path) -> None:
    """Try a file and a lock in the directory, or where it will be made."""
    nearest = _nearest(directory)
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = (
            f"its file system has no locks ({error.strerror}), which keep a second run out"
            if error.errno in NO_LOCKS
            else f"{nearest} cannot be written to ({error.strerror})"
        )
        raise ConfigError(f"{directory}: {why}; set {setting} to another folder") from None


def _refuse_ray_folder() -> None:
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    base = os.environ.get(variable, "/tmp")
    folder = os.path.join(base, "ray")
    session = folder + SESSION.format(process=os.getpid())
    title, way_out = f"Ray's temporary folder {folder!r} ({variable})", "set RAY_TMPDIR to"
    if not os.path.isabs(base):
        raise ConfigError(f"{title} is not an absolute path; {way_out} one")
    if not folder.isascii():
        raise ConfigError(f"{title} has letters beyond ASCII, which Ray cannot use; {way_out} /tmp")
    if (excess := len(session) - SOCKET_PATH) > 0:
        raise ConfigError(
            f"{title} is {excess} bytes too long: with it, the path of a socket has {len(session)}"
            f" bytes, and the system allows {SOCKET_PATH}; {way_out} a shorter path, such as /tmp"
        )
    nearest = _nearest(Path(folder))
    if not _writable_folder(nearest):
        raise ConfigError(
            f"{title}: {_owned(nearest)}, and this user cannot write to it; {way_out} a folder of"
            " your own with a short path"
        )
    _refuse_full(title, "RAY_TMPDIR", nearest)


def _refuse_full(title: str, variable: str, folder: str | Path) -> None:
    """Refuse a file system without room. `folder` is one of its folders."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < LEAST_FREE:
        raise ConfigError(
            f"{title} has {free >> 10:,} KiB left on its file system, and a run needs at least"
            f" {LEAST_FREE >> 20} MiB; free some, or set {variable} to another"
        )
    if found.f_files and not found.f_favail:  # some file systems do not count files
        raise ConfigError(
            f"{title}: its file system has no room for another file (`df -i`); remove some, or set"
            f" {variable} to another"
        )


def _refuse_home() -> None:
    """Ray writes the cluster's token below the home folder, and reads it there."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        if not os.access(named, os.R_OK):
            raise ConfigError(
                f"RAY_AUTH_TOKEN_PATH = {named!r} cannot be read; write a token there with `ray"
                " get-auth-token --generate`, or unset it"
            )
        return
    try:
        home = Path.home()
    except RuntimeError:
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} has no home folder, where Ray keeps its"
            " token; set HOME to a folder that you can write to"
        ) from None
    token = home / ".ray" / "auth_token"
    nearest = _nearest(token)
    usable = os.access(nearest, os.R_OK) if nearest == token else _writable_folder(nearest)
    if not usable:
        what = "read" if nearest == token else "written to"
        given = "" if "HOME" in os.environ else " (HOME is not set)"
        raise ConfigError(
            f"HOME = {str(home)!r}{given}: {nearest} cannot be {what}, and Ray keeps its token in"
            f" {token}; set HOME to a folder that you can write to"
        )


def _refuse_few_processes(config: RunSettings) -> None:
    limit, needed = process_limit(), _processes(config)
    if limit is not None and limit.free < needed:
        raise ConfigError(
            f"{limit.name} allows {limit.most:,} processes and threads, of which {limit.used:,} are"
            f" in use; this run needs about {needed:,}: raise the limit, or end other processes"
        )


def _processes(config: RunSettings) -> int:
    """Processes and threads that the run starts here, about. Ray starts one worker for each
    processor at once."""
    parts, replicas = config.learner.world_size, 0
    if isinstance(config, Config):
        replicas = config.engines.num_replicas if config.owns_generators else 0
        parts += config.rollout.num_workers + config.reward.tasks + SERVICES
    return RAY_ITSELF + REPLICA * replicas + max(PART * parts, IDLE * usable_cpus())


def _nearest(path: Path) -> Path:
    """The lowest folder or file of the path that this user can see."""
    for one in (path, *path.parents):
        with contextlib.suppress(OSError):
            one.stat()
            return one
    raise AssertionError("the root exists")


def _writable_folder(folder: Path) -> bool:
    """Whether a file can be made in the folder. Permissions alone do not say so."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _owned(path: Path) -> str:
    found = path.stat()
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    kind = "" if stat.S_ISDIR(found.st_mode) else " is no folder and"
    return f"{path}{kind} belongs to {owner}"
