"""Attack a sandbox from inside, as the current user: prints one JSON report.

    python attack.py LEVEL PYTHON DIRECTORY

A separate process, so that tests can run it as root or as another user. Uses only the standard
library.
"""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl.sandbox import Level, Limits, LocalSandbox, Program, SandboxError

HERE = Path(__file__).parent
SMALL = Limits(
    wall_s=6.0,
    cpu_s=1.5,
    memory_bytes=256 << 20,
    processes=16,
    disk_bytes=4 << 20,
    files=64,
    output_bytes=64 << 10,
)

QUICK = (
    "forks",
    "large files",
    "many files",
    "deleted files",
    "deep folders",
    "spin, deaf",
    "sleep",
    "stopped",
)
"""Only the time limit ends these."""

BOMBS = {
    "forks": (
        """
import os, time
while True:
    try:
        os.fork()
    except OSError as error:
        time.sleep(0.01)
"""
    ),
    "forks, counted": (
        """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    print(count, flush=True)
"""
    ),
    "threads": (
        """
import threading, time
try:
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print("refused", flush=True)
    import os
    os._exit(3)
"""
    ),
    "memory of one": "x = []\nwhile True:\n    x.append(bytearray(8 << 20))",
    "memory of many": (
        """
import os, time
for _ in range(10):
    if os.fork() == 0:
        x = bytearray(b"x") * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    ),
    "shared memory": (
        """
import mmap
for path in (None, "/dev/zero"):
    try:
        m = mmap.mmap(-1 if path is None else open(path, "r+b").fileno(), 64 << 20)
        print("mapped", path)
    except OSError:
        print("refused")
"""
    ),
    "one large file": (
        "f = open('large', 'wb')\nwhile True:\n    f.write(b'x' * (1 << 20))\n    f.flush()"
    ),
    "large files": (
        """
import time
n = 0
while True:
    try:
        with open(f"f{n}", "wb") as f:
            f.write(b"x" * (1 << 20))
    except OSError:
        time.sleep(0.05)
    n = (n + 1) % 50
"""
    ),
    "many files": (
        """
import os, time
n = 0
while True:
    try:
        os.close(os.open(f"f{n}", os.O_CREAT | os.O_EXCL))
        n += 1
    except OSError:
        print("full", n, flush=True)
        time.sleep(0.5)
"""
    ),
    "deleted files": (
        """
import os, time
kept = []
while True:
    try:
        kept.append(open("f", "wb"))
        os.unlink("f")
        kept[-1].write(b"x" * (1 << 20))
        kept[-1].flush()
    except OSError:
        time.sleep(0.05)
"""
    ),
    "deep folders": (
        """
import os, time
depth = 0
while True:
    try:
        os.mkdir("d"); os.chdir("d"); depth += 1
    except OSError:
        print("refused", depth, flush=True)
        time.sleep(0.5)
"""
    ),
    "closed folders": (
        """
import os, time
os.mkdir("closed", 0o700)
os.mkdir("closed/inner", 0o000)
os.mkdir("shut", 0o000)
os.symlink("/", "root")
os.symlink("closed", "closed-link")
print("left")
"""
    ),
    "output": "import sys\nwhile True:\n    sys.stdout.write('x' * 65536)",
    "errors": "import sys\nwhile True:\n    sys.stderr.write('x' * 65536)",
    "spin": "while True: pass",
    "spin, deaf": (
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
"""
    ),
    "spin of many": "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "survivors": (
        """
import os, sys, time
token = sys.stdin.read()
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            sys.stdout.close(); sys.stderr.close()
            os.closerange(0, 64)
            os.execvp("sleep", [token, "600"])
        os._exit(0)
time.sleep(0.3)
print("done")
"""
    ),
    "war on the warden": (
        """
import os
for number in range(1, 65):
    for process in (1, os.getppid()):
        try:
            os.kill(process, number)
        except OSError:
            pass
print("alive")
"""
    ),
    "core": (
        """
import ctypes, os
if os.fork() == 0:
    ctypes.string_at(0)
_, status = os.wait()
print(os.WCOREDUMP(status), [n for n in os.listdir(".") if "core" in n])
"""
    ),
}


@contextlib.contextmanager
def targets(directory, setuid):
    """Create everything that an escape would reach."""
    token = os.urandom(8).hex()
    folder = Path(directory, token)
    folder.mkdir()
    folder.chmod(0o777)
    for name in ("canary", "removable", "owned"):
        (folder / name).write_text(f"{name} {token}")
        (folder / name).chmod(0o666)
    victim = subprocess.Popen(["sleep", "600"], env={"CANARY_SECRET": token})
    with contextlib.ExitStack() as stack:
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        servers = {
            "tcp4": stack.enter_context(socket.create_server(("127.0.0.1", 0))),
            "tcp6": stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6)),
            "unix": unix(stack, str(folder / "socket")),
            "abstract": unix(stack, f"\0asyncrl-{token}"),
        }
        (folder / "socket").chmod(0o777)
        for server in servers.values():
            threading.Thread(target=answer, args=(server,), daemon=True).start()
        datagrams = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagrams.bind(f"\0asyncrl-d-{token}")
        datagrams.setblocking(False)
        yield (
            folder,
            datagrams,
            {
                "canary": str(folder / "canary"),
                "owned": str(folder / "owned"),
                "folder": str(folder),
                "victim": victim.pid,
                "caller": os.getpid(),
                "tcp4": servers["tcp4"].getsockname()[1],
                "tcp6": servers["tcp6"].getsockname()[1],
                "unix": str(folder / "socket"),
                "abstract": f"\0asyncrl-{token}",
                "datagrams": f"\0asyncrl-d-{token}",
                "token": token,
                "setuid": setuid,
            },
        )


def unix(stack, name):
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(name)
    server.listen()
    return server


def answer(server):
    while True:
        try:
            made, _ = server.accept()
        except OSError:
            return
        made.sendall(b"reached")
        made.close()


def try_escapes(directory, setuid, run):
    """What `run(stdin)` printed, and what has changed outside."""
    os.environ["CANARY_SECRET"] = "secret"
    with targets(directory, setuid) as (folder, datagrams, target):
        before = (folder / "owned").stat()
        leak = os.open(target["canary"], os.O_RDONLY)
        os.set_inheritable(leak, True)
        printed = run(json.dumps(target))
        os.close(leak)
        after = (folder / "owned").stat() if (folder / "owned").exists() else None
        changed = sorted(
            name
            for name, is_changed in {
                "folder": (
                    sorted(p.name for p in folder.iterdir())
                    != ["canary", "owned", "removable", "socket"]
                ),
                "owned": (
                    after is None
                    or (after.st_mode, after.st_mtime, after.st_size)
                    != (before.st_mode, before.st_mtime, before.st_size)
                ),
                "shared memory": Path("/dev/shm", target["token"]).exists(),
                "datagrams": received(datagrams),
            }.items()
            if is_changed
        )
        Path("/dev/shm", target["token"]).unlink(missing_ok=True)
    return printed, changed


def received(datagrams):
    try:
        return bool(datagrams.recv(16))
    except BlockingIOError:
        return False


def alive(token):
    """Processes whose command line has the token."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and token.encode() in Path("/proc", name, "cmdline").read_bytes():
                found.append(name)
    return found


def children():
    return Path("/proc/thread-self/children").read_text().split()


def attack(level, python, directory, setuid):
    sandbox = LocalSandbox(Level(level), python=python)
    source = (HERE / "escapes.py").read_text()
    seen = []

    def inside(stdin):
        seen.append(sandbox.run(Program.python(source, stdin), Limits(wall_s=60, cpu_s=30)))
        return seen[-1]

    def outside(stdin):
        with tempfile.TemporaryDirectory(dir=directory) as here:
            command = [python, "-c", source]
            return subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=60,
                cwd=here,
                close_fds=False,
            )

    try:
        result, changed = try_escapes(directory, setuid, inside)
    except SandboxError as error:
        return {"refused": str(error)}
    plain, plain_changed = try_escapes(directory, setuid, outside)
    token = "survivor-" + os.urandom(8).hex()

    def explode(bomb):
        name, source = bomb
        limits = dataclasses.replace(SMALL, wall_s=1.0) if name in QUICK else SMALL
        ended = sandbox.run(Program.python(source, token), limits)
        shown = {
            "stdout": ended.stdout[:200],
            "stderr": ended.stderr[-300:],
            "bytes": [len(ended.stdout), len(ended.stderr)],
        }
        return name, dataclasses.asdict(ended) | shown

    with ThreadPoolExecutor(4) as threads:
        bombs = dict(threads.map(explode, BOMBS.items()))
    folders = [
        p.name for p in Path(os.environ["TMPDIR"]).iterdir() if p.name.startswith("asyncrl-sandbox")
    ]
    return {
        "status": result.status,
        "stderr": result.stderr,
        "inside": json.loads(result.stdout or "{}"),
        "changed": changed,
        "outside": json.loads(plain.stdout or "{}"),
        "outside stderr": plain.stderr,
        "changed outside": plain_changed,
        "bombs": bombs,
        "left": folders + alive(token) + children(),
    }


if __name__ == "__main__":
    print(json.dumps(attack(*sys.argv[1:])))
