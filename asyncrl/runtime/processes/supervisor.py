"""The parent of one process that runs a user's code. It ends everything that the process has
started, even processes that try to escape.

    pool ──lifeline (pipe)──► supervisor ──fork──► process ──► what it starts
      ▲                                               │
      └─────────────── socket: calls, answers ────────┘

The supervisor is a subreaper: a descendant whose parent dies becomes its child, not init's, even in
another session. When the process ends, or the pool closes the lifeline or dies, the supervisor
stops and kills all its descendants until none is left, and removes their temporary folder. Then it
exits with the process's code: 128 + n after signal n, the supervisor's own SIGKILL included.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time

import psutil

from asyncrl.runtime.files.temporary import ProcessTemporaryFolder, temporary_folder
from asyncrl.runtime.imports import for_users_programs, import_path
from asyncrl.runtime.output import forgive_output

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_AGAIN_S = 0.005


def command(lifeline: int, connection: int, serve: str, folder: str = "") -> list[str]:
    """The command line of a supervisor that inherits these file descriptors. It imports modules
    from where this process does, and from the current folder last.

    Args:
        serve: `module:function` that the process calls with its connection, a socket.
        folder: kind of the temporary folder that the process gets; "" = it gets none.
    """
    start = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
        " from asyncrl.runtime.processes.supervisor import main;"
        " main(*map(int, sys.argv[2:4]), *sys.argv[4:])"
    )
    # What it serves is last: `asyncrl.observe.memory` names the process after it.
    given = [json.dumps(import_path()), str(lifeline), str(connection), folder, serve]
    return [sys.executable, "-P", "-c", start, *given]


def main(lifeline: int, connection: int, folder: str, serve: str) -> None:
    """Run one process until it ends or the lifeline closes. With the kind of a `folder`, temporary
    files of the process and its descendants are in one that ends with them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # The interpreter writes to this pipe at each signal, so that poll() wakes.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    temporary = temporary_folder(folder, ProcessTemporaryFolder.where()) if folder else None
    if temporary is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary.name
    ended: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: ended.append(signal.SIGTERM))
    process = os.fork()
    if process == 0:
        os.close(lifeline)
        os.close(woken)
        os.close(waker)
        _become_process(connection, serve)
    os.close(connection)
    status = _wait(process, lifeline, woken, ended)
    # A process closes its connection before the kernel reports its exit. If the pool reacts in
    # between, the code is known only once the process is reaped.
    reaped = _kill_descendants()
    if temporary is not None:
        temporary.cleanup()
    code = os.waitstatus_to_exitcode(reaped.get(process, 0) if status is None else status)
    os._exit(code if code >= 0 else 128 - code)


def _become_process(connection: int, serve: str) -> None:
    """In the child: die with the supervisor, and serve calls until the pool disconnects."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for_users_programs()
        forgive_output()
        module, _, name = serve.partition(":")
        getattr(importlib.import_module(module), name)(socket.socket(fileno=connection))
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _wait(process: int, lifeline: int, woken: int, ended: list[int]) -> int | None:
    """The process's wait status, or None if the pool wants it to end."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.register(woken, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        with contextlib.suppress(BlockingIOError):
            while os.read(woken, 4096):
                pass
        for child, status in _reap():
            if child == process:
                return status
        if lifeline in ready or ended:
            return None


def _reap() -> list[tuple[int, int]]:
    """(Process id, wait status) of children that have ended, including adopted ones."""
    reaped = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            reaped.append(found)
    return reaped


def _kill_descendants() -> dict[int, int]:
    """Kill all descendants; return their wait statuses by process id. Stops them all first: a
    process that keeps starting others would outrun the kills."""
    this = psutil.Process()
    reaped: dict[int, int] = {}
    while left := this.children(recursive=True):
        for send in (psutil.Process.suspend, psutil.Process.kill):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    send(process)
        reaped |= _reap()
        time.sleep(LOOK_AGAIN_S)
    return reaped
