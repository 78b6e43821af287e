"""Real attempts to leave the sandbox, at each level, as root and as somebody else.

Where a machine does not reach a level, the test shows that nothing runs there.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1]
SOMEBODY = 47_110
"""A user that no system has."""

NEED_ROOT = {"mount_memory", "leave_root", "load_bpf", "performance_counters", "become_root", "device_file", "kernel_memory", "change_hostname"}
ONLY_INSIDE = {"input_is_writable", "shared_memory_left", "raise_limits"}
"""Ways out that prove nothing outside: the first is of the sandbox's own input, the test looks for the second, the third needs a capability."""
ENDS_ALIKE = {
    "forks": {"wall", "processes"},
    "forks, counted": {"exited", "processes"},
    "threads": {"exited", "processes"},
    "memory of many": {"memory"},
    "shared memory": {"memory"},
    "large files": {"wall", "disk"},
    "many files": {"wall", "files"},
    "deleted files": {"wall", "disk"},
    "deep folders": {"wall", "files"},
    "output": {"output"},
    "errors": {"output"},
    "spin": {"cpu", "wall"},
    "spin, deaf": {"cpu", "wall"},
    "spin of many": {"cpu", "wall"},
    "one large file": {"exited", "disk"},
    "sleep": {"wall"},
    "stopped": {"wall"},
}
"""Bomb → how it may end: what the kernel holds at one level is watched at the other, and a busy machine reaches the clock's limit first."""


def readable_python():
    """An interpreter that every user may read: a sandbox that gives its programs another user needs one."""
    candidates = [os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]
    return next((c for c in candidates if os.path.exists(c) and not c.startswith("/root/")), candidates[0])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that everybody can reach and write to, with a program that runs as its owner."""
    folder = Path("/tmp", f"asyncrl-test-{os.urandom(6).hex()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o1777)
    shutil.copy("/usr/bin/id", folder / "id")
    (folder / "id").chmod(0o4755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def attacked(place):
    """`attacked(level, user)`: the report of attack.py, made once."""

    @functools.cache
    def attacked(level, user):
        other = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
        environment = {"PYTHONPATH": str(PACKAGES), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(place / "temporary"), "PATH": os.environ["PATH"]}
        python = readable_python()
        command = [python, str(HERE / "attack.py"), level, python, str(place), str(place / "id")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=place, **other)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return attacked


USERS = [os.geteuid()] if os.geteuid() else [0, SOMEBODY]
DEFAULT = {("namespaces", 0), ("landlock", SOMEBODY)} if os.geteuid() == 0 else {(level, os.geteuid()) for level in ("namespaces", "landlock")}
SETUPS = [
    pytest.param(
        level,
        user,
        id=f"{level}-{'root' if user == 0 else 'somebody'}",
        marks=[] if (level, user) in DEFAULT else [pytest.mark.slow],
    )
    for level in ("namespaces", "landlock")
    for user in USERS
]


@pytest.mark.parametrize(("level", "user"), SETUPS)
def test_no_way_out(attacked, level, user):
    report = attacked(level, user)
    if "refused" in report:
        assert set(report) == {"refused"} and report["refused"]
        return
    assert report["status"] == "exited", report["stderr"]
    inside, outside = report["inside"], report["outside"]
    assert len(inside) >= 50 and inside.keys() == outside.keys()
    assert {name: why for name, (escaped, why) in inside.items() if escaped} == {}
    assert report["changed"] == []
    # The control: outside, each of them gets what it tries for.
    impossible = ONLY_INSIDE | (set() if user == 0 else NEED_ROOT)
    assert {name for name, (escaped, _) in outside.items() if not escaped} <= impossible | optional()
    assert report["changed outside"] == ["datagrams", "folder", "owned", "shared memory"]


def optional():
    """What a machine may not have at all."""
    kernel_has = {
        "tcp_over_ipv6": Path("/proc/net/if_inet6").exists(),
        "ring": Path("/proc/sys/kernel/io_uring_disabled").exists() and Path("/proc/sys/kernel/io_uring_disabled").read_text().strip() == "0",
        "page_faults": False,  # often for root alone
        "new_user_namespace": False,
        "new_namespace_by_clone": False,
        "old_calling_convention": False,
        "trace": False,
    }
    return {name for name, there in kernel_has.items() if not there}


@pytest.mark.parametrize(("level", "user"), SETUPS)
def test_bombs_end_and_leave_nothing(attacked, level, user):
    report = attacked(level, user)
    if "refused" in report:
        return  # test_no_way_out has looked at the refusal
    bombs = report["bombs"]
    assert {name: bomb["status"] for name, bomb in bombs.items() if name in ENDS_ALIKE and bomb["status"] not in ENDS_ALIKE[name]} == {}
    assert {name: bomb["status"] for name, bomb in bombs.items() if name not in ENDS_ALIKE and bomb["status"] != "exited"} == {}
    # Landlock leaves the kernel's own count to a user that nobody else has, which root alone can give.
    exact = level == "namespaces" or user == 0
    assert int((bombs["forks, counted"]["stdout"] or "0").split()[0]) <= (16 if exact else 16 * 16)
    assert {bombs[name]["status"] for name in ("forks, counted", "threads")} == {"exited"} or not exact
    assert bombs["threads"]["stdout"] == "refused\n" or not exact
    assert bombs["memory of one"]["exit_code"] == 1 and "MemoryError" in bombs["memory of one"]["stderr"]
    assert bombs["one large file"]["exit_code"] in (1, None)
    assert bombs["war on the warden"]["stdout"] == "alive\n"
    assert bombs["core"]["stdout"] == "False []\n" and bombs["closed folders"]["stdout"] == "left\n" and bombs["survivors"]["stdout"] == "done\n"
    assert max(bomb["bytes"] for bomb in bombs.values())[0] <= 64 << 10
    assert max(bomb["memory_bytes"] for bomb in bombs.values()) < 1 << 30
    assert max(bomb["seconds"] for bomb in bombs.values()) < 20
    assert report["left"] == []
