"""From a forked child to the program: every step that removes rights, in order.

    supervisor ─fork─► warden ─fork─► program          (`namespaces`: one more process in between)

The warden is process 1 of the namespaces, or the first process of the Landlock domain. It adopts
orphans, waits for the program, reports its end, and then ends what the program left behind. If a
step fails, that is reported and the program never starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from asyncrl.sandbox import kernel, usage
from asyncrl.sandbox.job import Job
from asyncrl.sandbox.syscalls import seccomp_filter

OWN_FOLDER = "/sandbox"
"""The program's folder, as it sees it, under `namespaces`."""
HOST = "/host"
"""Mount point of the old root while the new one is built."""
WARDEN_ID, PROGRAM_ID = 65533, 65534
"""User and group ids inside the user namespace."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Paths that are readable inside if they exist, since programs need them to start. Other files of
/etc are not readable."""
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""/dev/zero is left out: a shared mapping of it uses memory outside every limit."""
ROOT_TMPFS = "size=1m,nr_inodes=1024,mode=0755"
LOOK_EVERY_S = 0.1
"""How often the warden checks the size of a folder that is not its own file system."""
SHARED_ROOM = 16
"""Without its own user, a program shares the kernel's process count with the caller's processes.
The kernel's limit then adds this multiple of the program's limit to that count."""
SIGNALS_KEPT = 6
"""First Landlock version that confines signals."""
LEAST_LANDLOCK = 3
"""First Landlock version that controls truncation."""


@dataclass(frozen=True, slots=True)
class Users:
    """User ids that no other process has. Only a supervisor that runs as root can assign them."""

    warden: int
    program: int


@dataclass(frozen=True, slots=True)
class Ends:
    """Descriptors of the child: the program's three, the report, and a handshake."""

    stdin: int
    stdout: int
    stderr: int
    status: int
    ready: int
    go: int

    def close_all_but_status(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, self.ready, self.go):
            os.close(descriptor)


def run_child(job: Job, users: Users | None, folder: str, ends: Ends) -> NoReturn:
    """Confine this process and start the program. Reports failures on `ends.status`."""
    try:
        # Process 1 ignores signals without a handler. With Python's SIGINT handler, a program could
        # interrupt it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if job.level == "namespaces":
            _into_namespaces(job, users, ends)
        _into_landlock(job, users, folder, ends)
    except BaseException as error:
        # This process must never continue as the supervisor that it was forked from.
        _report(
            ends.status,
            error=f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}",
        )
    finally:
        os._exit(126)


def _report(status: int, **message: object) -> None:
    os.write(status, json.dumps(message).encode() + b"\n")


# -- namespaces ------------------------------------------------------------------------------------


def _into_namespaces(job: Job, users: Users | None, ends: Ends) -> NoReturn:
    if users is not None:
        os.setgroups([])
    user, group = os.geteuid(), os.getegid()
    kernel.unshare()
    if users is None:
        # A user who is not root may map only their own id.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{PROGRAM_ID} {user} 1"),
            ("gid_map", f"{PROGRAM_ID} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    os.write(ends.ready, b"u")
    if os.read(ends.go, 1) != b"m":
        raise OSError("user namespace: its ids could not be mapped")
    kernel.die_with_parent()
    first = os.fork()
    if first == 0:
        _first_process(job, users, ends)
    ends.close_all_but_status()
    os.close(ends.status)
    os.waitpid(first, 0)
    os._exit(0)


def _first_process(job: Job, users: Users | None, ends: Ends) -> NoReturn:
    kernel.die_with_parent()
    kernel.set_hostname("sandbox")
    _build_root(job)
    write_files(job, OWN_FOLDER, PROGRAM_ID)
    program = os.fork()
    if program == 0:
        if users is not None:
            _become(PROGRAM_ID)
        _start(
            job, OWN_FOLDER, ends, users is not None, job.limits.processes + (users is None), None
        )
    ends.close_all_but_status()
    if users is not None:
        _become(WARDEN_ID)
    kernel.drop_privileges()
    kernel.die_with_parent()
    while not _ended(program, ends.status, 0):
        pass
    os._exit(0)  # the end of process 1 ends everything in its namespace


def _build_root(job: Job) -> None:
    """Build a new root: read-only system folders, four devices, an empty folder, no /proc."""
    kernel.mount_private()
    kernel.mount_tmpfs(job.base, ROOT_TMPFS)
    os.mkdir(job.base + HOST)
    kernel.switch_root(job.base, job.base + HOST)
    for path in _shown(job):
        _show(path)
    for device in DEVICES:
        _show(device, devices=True)
    os.mkdir(OWN_FOLDER)
    limits = job.limits
    options = (
        f"size={limits.disk_bytes},nr_inodes={limits.files + 1},mode=0700,"
        f"uid={PROGRAM_ID},gid={PROGRAM_ID}"
    )
    kernel.mount_tmpfs(OWN_FOLDER, options)
    for usual in ("/dev/shm", "/tmp", "/var/tmp"):
        if not os.path.exists(usual):  # job.paths may lie below it
            os.makedirs(os.path.dirname(usual), exist_ok=True)
            os.symlink(OWN_FOLDER, usual)
    kernel.detach(HOST)
    os.rmdir(HOST)
    kernel.protect("/", whole=False)


def _shown(job: Job) -> list[str]:
    """Paths to make visible, none of them below another."""
    shown: list[str] = []
    for path in sorted({*SYSTEM, *job.paths}):
        if not any(path == other or path.startswith(other + "/") for other in shown):
            shown.append(path)
    return shown


def _show(path: str, *, devices: bool = False) -> None:
    source = HOST + path
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    kernel.bind(source, path)
    kernel.protect(path, devices=devices)


# -- Landlock --------------------------------------------------------------------------------------


def _into_landlock(job: Job, users: Users | None, folder: str, ends: Ends) -> NoReturn:
    version = kernel.landlock_version()
    if version < LEAST_LANDLOCK:
        raise OSError(
            f"Landlock: the kernel has version {version}; version {LEAST_LANDLOCK} or later is"
            " needed (Linux 6.2)"
        )
    if users is None and version < SIGNALS_KEPT:
        raise OSError(
            f"Landlock: version {version} lets a program signal your processes; use version"
            f" {SIGNALS_KEPT} or later (Linux 6.12), or run as root"
        )
    if users is not None:
        os.setgroups([])
        _become(users.program)
    processes = job.limits.processes + 1
    if users is None:
        # The kernel counts all processes of this user, so the limit must leave room for the others.
        # The supervisor counts exactly.
        processes = usage.tasks_of_user(os.getuid()) + SHARED_ROOM * job.limits.processes
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    kernel.keep_orphans()
    kernel.drop_privileges()
    kernel.die_with_parent()
    if version >= SIGNALS_KEPT:
        kernel.restrict_signals()
    paths = {path: kernel.READ for path in _shown(job) if os.path.exists(path)}
    paths |= dict.fromkeys(DEVICES, kernel.USE_DEVICE) | {folder: kernel.OWN}
    started = os.pipe()
    program = os.fork()
    if program == 0:
        _start(job, folder, ends, users is not None, processes, paths)
    ends.close_all_but_status()
    # The other end closes when the program starts. Until then, its process cannot be inspected.
    os.close(started[1])
    os.read(started[0], 1)
    _watch(program, ends.status, job, folder)
    _kill_domain(ends.status)
    os._exit(0)


def _watch(program: int, status: int, job: Job, folder: str) -> None:
    """Wait until the program ends, the supervisor sends SIGTERM, or the folder is too large."""
    next_look = 0.0
    while not _ended(program, status, os.WNOHANG):
        if time.monotonic() >= next_look:
            exceeded = usage.folder_exceeds(folder, job.limits) or usage.deleted_exceed(
                os.getpid(), job.limits
            )
            if exceeded:
                _report(status, exceeded=exceeded)
                return
            next_look = time.monotonic() + LOOK_EVERY_S
        received = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, LOOK_EVERY_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return


def _kill_domain(status: int) -> None:
    """Send SIGKILL to everything that this process may signal, its own domain, in one system call.

    If it may also signal the supervisor, it is not confined, and does not kill.
    """
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
    else:
        _report(
            status, error="the warden could signal its supervisor, so it does not kill its domain"
        )


# -- both ------------------------------------------------------------------------------------------


def _become(user: int) -> None:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def write_files(job: Job, folder: str, owner: int) -> None:
    """Write the job's files below the folder, which no program has used yet."""
    for name, content in job.files.items():
        parent = folder
        for part in name.split("/")[:-1]:
            parent = f"{parent}/{part}"
            if not os.path.isdir(parent):
                os.mkdir(parent, 0o700)
                os.chown(parent, owner, owner)
        with open(f"{folder}/{name}", "xb") as file:
            file.write(content)
            os.fchown(file.fileno(), owner, owner)


def _ended(program: int, status: int, options: int) -> bool:
    """Reap one process. If it was the program, report its end and return True."""
    found, wait_status = os.waitpid(-1, options)
    if found != program:
        return False
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(wait_status)
    _report(status, ended=code, cpu_seconds=spent.ru_utime + spent.ru_stime)
    return True


def _start(
    job: Job,
    folder: str,
    ends: Ends,
    own_user: bool,
    processes: int,
    paths: Mapping[str, int] | None,
) -> NoReturn:
    """Become the program.

    Args:
        own_user: Whether this user has no other process or file.
        processes: RLIMIT_NPROC.
        paths: Path → rights that Landlock leaves; None without Landlock.
    """
    os.setsid()
    os.chdir(folder)
    for number, descriptor in enumerate((ends.stdin, ends.stdout, ends.stderr)):
        os.dup2(descriptor, number)
    kernel.close_others_on_exec()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _limit(job, processes)
    os.umask(0o077)
    kernel.die_with_parent()
    kernel.drop_privileges()
    if paths is not None:
        kernel.restrict_paths(paths)
    # A program with its own user, or its own root, can reach no other file that its user owns.
    kernel.install_filter(seccomp_filter(modes=paths is None or own_user, times=paths is None))
    environment = job.environment(folder)
    try:
        os.execvpe(job.argv[0], list(job.argv), environment)
    except OSError as error:
        closed = (
            "; put it, and the folders above it, where every user may read"
            if isinstance(error, PermissionError)
            else ""
        )
        raise OSError(f"cannot start {job.argv[0]!r}: {error.strerror}{closed}") from None


def _limit(job: Job, processes: int) -> None:
    limits = job.limits
    cpu = max(1, int(limits.cpu_s + 0.999))
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_CORE, 1, 1),  # with 0, a core dump handler of the host would still start
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        _, most = resource.getrlimit(what)
        bound = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(what, (min(soft, bound), bound))
