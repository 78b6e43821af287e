"""The process that runs one job: it confines a child, watches it, ends it, and reports.

It lives outside the sandbox, adopts whatever the program leaves, and returns only when none of it
lives. It ends everything when its standard input closes: that is how its caller dies or cancels.

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

__all__ = ["main", "supervise"]

LOOK_EVERY_MS = 20
STOP_WITHIN_S = 10.0
"""Seconds for everything to be gone after SIGKILL. The kernel may have memory to free."""
LOWEST_USER, USERS = 1_800_000_000, 100_000_000
"""Where the ids of a supervisor that is root are: above those that systems give to people."""
SMALL_RANGE, SMALL_USERS = 61_184, 4_000
"""The same in a container that has 65,536 ids: systemd's range for services that come and go."""


class Failed(Exception):
    """The job could not be run as asked. The message goes to the caller."""


@dataclass
class _Seen:
    """What the supervisor has learned of the child."""

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
    """Read a job from standard input, run it, print what came of it."""
    try:
        answer = supervise(Job.load(sys.stdin.buffer.readline()), sys.stdin.fileno())
    except (Failed, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


def supervise(job: Job, lifeline: int) -> dict[str, object]:
    """The fields of a `Result`.

    Args:
        lifeline: everything ends when this descriptor is closed at its other end.

    Raises:
        Failed: the program was not started, or its end is unknown.
    """
    if not usage.children_known():
        raise Failed("the kernel does not list a process's children (CONFIG_PROC_CHILDREN)")
    if os.readlink("/proc/self") != str(os.getpid()):
        # Its numbers would be those of other processes, and the supervisor kills by number.
        raise Failed("/proc is that of another PID namespace; mount one for this one")
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
    """Two ids that no other process has, since each supervisor takes those of its own number.

    None: this root is an ordinary user outside, whom a container calls so, and has no ids to give.
    """
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    mapped = max(inside + count for inside, _, count in ranges)
    if mapped > LOWEST_USER + USERS:
        first = LOWEST_USER + 2 * os.getpid() % USERS
    elif mapped > SMALL_RANGE + SMALL_USERS:
        first = SMALL_RANGE + 2 * os.getpid() % SMALL_USERS
    elif any(inside == 0 and outside == 0 for inside, outside, _ in ranges):
        raise Failed(
            f"root has {mapped} user ids here, and the sandbox needs its own from {SMALL_RANGE} on"
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
    seen = _Seen()
    began = time.monotonic()
    try:
        if job.level == "namespaces":
            _map_users(child, users, ready[0], go[1])
        began = time.monotonic()
        buffers = {output[0]: seen.stdout, errors[0]: seen.stderr, status[0]: seen.report}
        _watch(job, child, buffers, seen, began, lifeline)
    finally:
        _stop(job, child, users)
    seconds = time.monotonic() - began
    for descriptor, buffer in buffers.items():
        _drain(descriptor, buffer, job.limits.output_bytes)
    return _answer(job, seen, seconds)


def _readable(content: bytes) -> int:
    """A descriptor from which the content can be read, and nothing written to."""
    written = os.memfd_create("stdin")
    with open(written, "wb", closefd=False) as file:
        file.write(content)
    descriptor = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    return descriptor


def _map_users(child: int, users: Users | None, ready: int, go: int) -> None:
    """Give the child's user namespace its ids. One who is not root lets the child do it."""
    if os.read(ready, 1) != b"u":
        return  # its report says why
    if users is not None:
        text = f"0 0 1\n65533 {users.warden} 2\n"
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(text)
    os.write(go, b"m")


def _watch(
    job: Job, child: int, buffers: dict[int, bytearray], seen: _Seen, began: float, lifeline: int
) -> None:
    """Collect output until the warden is gone or a limit is met, which is then the verdict."""
    poll = select.poll()
    for descriptor in (*buffers, lifeline):
        poll.register(descriptor, select.POLLIN)
    deadline, next_look = began + job.limits.wall_s, 0.0
    while seen.verdict is None:
        for descriptor, _ in poll.poll(LOOK_EVERY_MS):
            if descriptor == lifeline:
                raise Failed("cancelled by its caller")
            part = os.read(descriptor, 1 << 16)
            buffers[descriptor] += part
            if not part:
                poll.unregister(descriptor)
                if buffers[descriptor] is seen.report:
                    return
            if (
                buffers[descriptor] is not seen.report
                and len(buffers[descriptor]) > job.limits.output_bytes
            ):
                seen.verdict = "output"
        now = time.monotonic()
        if now >= deadline:
            seen.verdict = "wall"
        elif now >= next_look:
            seen.verdict = seen.verdict or _exceeded(job, child, seen)
            next_look = now + LOOK_EVERY_MS / 1000


def _exceeded(job: Job, child: int, seen: _Seen) -> str | None:
    """The limit that all processes together are above, or None."""
    processes = usage.descendants(os.getpid())
    # Ours: the warden, and under `namespaces` the process before it, its parent.
    ours = 2 if job.level == "namespaces" else 1
    used = usage.usage_of(processes[ours:] if processes[:1] == [child] else processes)
    seen.memory_bytes, seen.cpu_s = (
        max(seen.memory_bytes, used.memory_bytes),
        max(seen.cpu_s, used.cpu_s),
    )
    # Too many processes come first: they are why the memory and CPU time went up with them.
    if used.tasks > job.limits.processes:
        return "processes"
    if used.memory_bytes > job.limits.memory_bytes:
        return "memory"
    return "cpu" if used.cpu_s > job.limits.cpu_s else None


def _stop(job: Job, child: int, users: Users | None) -> None:
    """Kill all that is left, and return when it is gone.

    Raises:
        Failed: something lives.
    """
    if job.level != "namespaces":
        # At once, so that nothing can outrun it; below it is one process after the other.
        if users is not None:
            _kill_user(users.program)
        else:
            _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_WITHIN_S
    patient = job.level != "namespaces" and users is None
    while _reap():
        now = time.monotonic()
        if now > deadline:
            raise Failed(f"processes {usage.descendants(os.getpid())} of the sandbox do not end")
        # The warden of a Landlock domain kills all of it at once.
        for process in usage.descendants(os.getpid()):
            if not (patient and process == child and now < deadline - STOP_WITHIN_S / 2):
                _signal(process, signal.SIGKILL)
        time.sleep(0.001)


def _reap() -> bool:
    """Reap what has ended; whether there are children yet."""
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
    """SIGKILL all processes of an id of our own, in one call of the kernel."""
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            # As somebody who may not signal the supervisor. Were it otherwise, this would kill it.
            try:
                os.kill(os.getppid(), 0)
            except PermissionError:
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _drain(descriptor: int, buffer: bytearray, limit: int) -> None:
    """What is in the pipe yet: all its writers are gone."""
    while len(buffer) <= limit and (part := os.read(descriptor, 1 << 16)):
        buffer += part
    os.close(descriptor)


def _answer(job: Job, seen: _Seen, seconds: float) -> dict[str, object]:
    told: _Report = {}
    for line in bytes(seen.report).splitlines():
        told.update(json.loads(line))
    if "error" in told:
        raise Failed(told["error"])
    limits = job.limits
    cpu_s = max(seen.cpu_s, told.get("cpu_seconds", 0.0))
    code = told.get("ended")
    verdict = seen.verdict or told.get("exceeded")
    if verdict is None and max(len(seen.stdout), len(seen.stderr)) > limits.output_bytes:
        verdict = "output"
    if verdict is None and code is None:
        if job.level == "namespaces":
            raise Failed("the sandbox's own process ended before the program did")
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
        "stdout": bytes(seen.stdout[: limits.output_bytes]).decode(errors="replace"),
        "stderr": bytes(seen.stderr[: limits.output_bytes]).decode(errors="replace"),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "memory_bytes": seen.memory_bytes,
        "level": job.level,
    }


def _remove(folder: str) -> None:
    """Delete a folder that a program has filled, now that none of its processes lives.

    Follows no link, and goes as deep as the program did without recursion or open descriptors:
    folders within a folder are moved up first.
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
                    os.chmod(f"{path}/{inner}", 0o700)  # a folder moves only if it may be written
                    os.rename(f"{path}/{inner}", f"{folder}/{mark}-{moved}")
                else:
                    os.unlink(f"{path}/{inner}")
            os.rmdir(path)
    os.rmdir(folder)
