"""The process that runs one job: it confines a child, watches it, ends it, and reports.

It runs outside the sandbox, adopts the processes that the program leaves, and returns only when all
have ended. It ends everything when its standard input closes: the caller has died or canceled.

    caller ── job, one line ──► stdin                stdout ── result, one line ──► caller
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import stat
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import TypedDict

from asyncrl.sandbox import kernel, usage
from asyncrl.sandbox.confine import Ends, Users, run_child, write_files
from asyncrl.sandbox.job import Job

LOOK_EVERY_MS = 20
STOP_WITHIN_S = 10.0
"""Seconds for everything to end after SIGKILL. The kernel may have memory to free."""
LOWEST_USER, USERS = 1_800_000_000, 100_000_000
"""User ids for programs of a supervisor that is root, above the ids that systems give to people."""
SMALL_RANGE, SMALL_USERS = 61_184, 4_000
"""User ids in a container that has 65,536 ids: systemd's range for transient services."""


class JobError(Exception):
    """The job could not be run. The message goes to the caller."""


@dataclass
class _Observed:
    """What the supervisor has observed of the child."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    verdict: str | None = None
    memory_bytes: int = 0
    cpu_s: float = 0.0


class _Report(TypedDict, total=False):
    """What the warden, or a child that could not be confined, reports."""

    error: str
    exceeded: str
    """The limit that was exceeded."""
    ended: int
    """Exit code of the program; minus the signal that ended it."""
    cpu_seconds: float


def main() -> None:
    """Read a job from standard input, run it, and print the result or the error."""
    try:
        answer = supervise(Job.load(sys.stdin.buffer.readline()), sys.stdin.fileno())
    except (JobError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


def supervise(job: Job, lifeline: int) -> dict[str, object]:
    """Run a job. Returns the fields of a `Result`.

    Args:
        lifeline: Descriptor of a pipe. Everything ends when its other end closes.

    Raises:
        JobError: The program was not started, or its end is unknown.
    """
    if not usage.children_known():
        raise JobError("the kernel does not list a process's children (CONFIG_PROC_CHILDREN)")
    if os.readlink("/proc/self") != str(os.getpid()):
        # The process ids in it would mean other processes, and the supervisor kills by id.
        raise JobError("/proc belongs to another PID namespace; mount /proc for this namespace")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.keep_orphans()
    users = _own_users() if os.geteuid() == 0 else None
    folder = ""
    try:
        if job.level != "namespaces":
            folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-", dir=job.base)
            owner = users.program if users else os.geteuid()
            os.chown(folder, owner, owner if users else -1)
            write_files(job, folder, owner)
        return _run(job, users, folder, lifeline)
    finally:
        if folder:
            _remove(folder)


def _own_users() -> Users | None:
    """Two user ids that no other process has. They depend on the supervisor's process id, so that
    supervisors do not share them.

    None: this root is an ordinary user outside its container, and has no ids to assign.
    """
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    mapped = max(inside + count for inside, _, count in ranges)
    if mapped > LOWEST_USER + USERS:
        first = LOWEST_USER + 2 * os.getpid() % USERS
    elif mapped > SMALL_RANGE + SMALL_USERS:
        first = SMALL_RANGE + 2 * os.getpid() % SMALL_USERS
    elif any(inside == 0 and outside == 0 for inside, outside, _ in ranges):
        raise JobError(
            f"root has {mapped} user ids here, and the sandbox needs ids from {SMALL_RANGE} upward"
        )
    else:
        return None
    return Users(warden=first, program=first + 1)


def _run(job: Job, users: Users | None, folder: str, lifeline: int) -> dict[str, object]:
    output, errors, status, ready, go = (os.pipe() for _ in range(5))
    ends = Ends(_readable(job.stdin), output[1], errors[1], status[1], ready[1], go[0])
    child = os.fork()
    if child == 0:
        for descriptor in (output[0], errors[0], status[0], ready[0], go[1]):
            os.close(descriptor)
        run_child(job, users, folder, ends)
    for descriptor in (ends.stdin, *(pipe[1] for pipe in (output, errors, status, ready)), go[0]):
        os.close(descriptor)
    observed = _Observed()
    began = time.monotonic()
    try:
        if job.level == "namespaces":
            _map_users(child, users, ready[0], go[1])
        began = time.monotonic()
        buffers = {
            output[0]: observed.stdout,
            errors[0]: observed.stderr,
            status[0]: observed.report,
        }
        _watch(job, child, buffers, observed, began, lifeline)
    finally:
        _stop(job, child, users)
    seconds = time.monotonic() - began
    for descriptor, buffer in buffers.items():
        _drain(descriptor, buffer, job.limits.output_bytes)
    return _answer(job, observed, seconds)


def _readable(content: bytes) -> int:
    """A read-only descriptor of the content."""
    written = os.memfd_create("stdin")
    with open(written, "wb", closefd=False) as file:
        file.write(content)
    descriptor = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    return descriptor


def _map_users(child: int, users: Users | None, ready: int, go: int) -> None:
    """Map the ids of the child's user namespace. Without root, the child does this itself."""
    if os.read(ready, 1) != b"u":
        return  # the child's report says why
    if users is not None:
        text = f"0 0 1\n65533 {users.warden} 2\n"
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(text)
    os.write(go, b"m")


def _watch(
    job: Job,
    child: int,
    buffers: dict[int, bytearray],
    observed: _Observed,
    began: float,
    lifeline: int,
) -> None:
    """Collect output until the warden ends or a limit is exceeded, which is then the verdict."""
    poll = select.poll()
    for descriptor in (*buffers, lifeline):
        poll.register(descriptor, select.POLLIN)
    deadline, next_look = began + job.limits.wall_s, 0.0
    while observed.verdict is None:
        for descriptor, _ in poll.poll(LOOK_EVERY_MS):
            if descriptor == lifeline:
                raise JobError("canceled by its caller")
            part = os.read(descriptor, 1 << 16)
            buffers[descriptor] += part
            if not part:
                poll.unregister(descriptor)
                if buffers[descriptor] is observed.report:
                    return
            if (
                buffers[descriptor] is not observed.report
                and len(buffers[descriptor]) > job.limits.output_bytes
            ):
                observed.verdict = "output"
        now = time.monotonic()
        if now >= deadline:
            observed.verdict = "wall"
        elif now >= next_look:
            observed.verdict = observed.verdict or _exceeded(job, child, observed)
            next_look = now + LOOK_EVERY_MS / 1000


def _exceeded(job: Job, child: int, observed: _Observed) -> str | None:
    """The limit that all processes together exceed, or None."""
    processes = usage.descendants(os.getpid())
    # Not the program's: the warden, and its parent under `namespaces`.
    ours = 2 if job.level == "namespaces" else 1
    used = usage.usage_of(processes[ours:] if processes[:1] == [child] else processes)
    observed.memory_bytes, observed.cpu_s = (
        max(observed.memory_bytes, used.memory_bytes),
        max(observed.cpu_s, used.cpu_s),
    )
    # Check the number of processes first: too many of them also raise memory and CPU time.
    if used.tasks > job.limits.processes:
        return "processes"
    if used.memory_bytes > job.limits.memory_bytes:
        return "memory"
    return "cpu" if used.cpu_s > job.limits.cpu_s else None


def _stop(job: Job, child: int, users: Users | None) -> None:
    """Kill all that is left, and return when it has ended.

    Raises:
        JobError: A process could not be killed.
    """
    if job.level != "namespaces":
        # Kills everything at once, so that no fork can outrun it. The loop below kills one by one.
        if users is not None:
            _kill_user(users.program)
        else:
            _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_WITHIN_S
    patient = job.level != "namespaces" and users is None
    while _reap():
        now = time.monotonic()
        if now > deadline:
            raise JobError(
                f"could not kill processes {usage.descendants(os.getpid())} of the sandbox"
            )
        # The warden of a Landlock domain gets time to kill the whole domain at once.
        for process in usage.descendants(os.getpid()):
            if not (patient and process == child and now < deadline - STOP_WITHIN_S / 2):
                _signal(process, signal.SIGKILL)
        time.sleep(0.001)


def _reap() -> bool:
    """Reap the children that have ended. Returns whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def _kill_user(user: int) -> None:
    """Send SIGKILL to all processes of one of our user ids, in one system call."""
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            # Only as a user that may not signal the supervisor: otherwise this would kill it too.
            try:
                os.kill(os.getppid(), 0)
            except PermissionError:
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _drain(descriptor: int, buffer: bytearray, limit: int) -> None:
    """Read what is left in the pipe, whose writers have all ended."""
    while len(buffer) <= limit and (part := os.read(descriptor, 1 << 16)):
        buffer += part
    os.close(descriptor)


def _answer(job: Job, observed: _Observed, seconds: float) -> dict[str, object]:
    report: _Report = {}
    for line in bytes(observed.report).splitlines():
        report.update(json.loads(line))
    if "error" in report:
        raise JobError(report["error"])
    limits = job.limits
    cpu_s = max(observed.cpu_s, report.get("cpu_seconds", 0.0))
    code = report.get("ended")
    verdict = observed.verdict or report.get("exceeded")
    if verdict is None and max(len(observed.stdout), len(observed.stderr)) > limits.output_bytes:
        verdict = "output"
    if verdict is None and code is None:
        if job.level == "namespaces":
            raise JobError("the sandbox's own process ended before the program did")
        # Before Landlock version 6 a program may signal its warden, whose user it shares.
        code = -signal.SIGKILL
    if (
        verdict is None
        and code is not None
        and (code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= limits.cpu_s))
    ):
        verdict = "cpu"
    return {
        "status": verdict or ("exited" if code is not None and code >= 0 else "signaled"),
        "exit_code": None if verdict else code,
        "stdout": bytes(observed.stdout[: limits.output_bytes]).decode(errors="replace"),
        "stderr": bytes(observed.stderr[: limits.output_bytes]).decode(errors="replace"),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "memory_bytes": observed.memory_bytes,
        "level": job.level,
    }


def _remove(folder: str) -> None:
    """Delete a folder that a program has filled, once all its processes have ended.

    Follows no links. Works at any depth without recursion or open descriptors: folders within a
    folder are moved up first.
    """
    moved, mark = 0, os.urandom(8).hex()
    while names := os.listdir(folder):
        for name in names:
            path = f"{folder}/{name}"
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                moved += 1
                if stat.S_ISDIR(os.lstat(f"{path}/{inner}").st_mode):
                    os.chmod(f"{path}/{inner}", 0o700)  # a move needs write permission
                    os.rename(f"{path}/{inner}", f"{folder}/{mark}-{moved}")
                else:
                    os.unlink(f"{path}/{inner}")
            os.rmdir(path)
    os.rmdir(folder)
