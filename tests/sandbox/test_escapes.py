"""Real tries to leave the sandbox, at each level, as root and as another user.

If a machine does not support a level, the test checks that nothing runs at it.
"""

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1]
OTHER_USER = 47_110
"""A user id that no system assigns."""

WORKS_ANYWHERE = {
    "read_host_file",
    "read_system_file",
    "read_through_a_symlink",
    "read_through_a_hard_link",
    "read_through_the_parent_folder",
    "list_host_folder",
    "write_outside",
    "make_folder_outside",
    "remove_outside",
    "change_times_outside",
    "truncate_outside",
    "write_system_folder",
    "list_processes",
    "tcp_over_ipv4",
    "udp",
    "listen",
    "netlink",
    "unix_socket",
    "abstract_socket",
    "datagram_pair_to_abstract",
    "signal_other",
    "signal_supervisor",
    "slow_other",
    "environment_secret",
    "inherited_descriptors",
    "shared_memory_segment",
    "anonymous_file",
    "watch_files",
    "change_personality",
    "survive_the_supervisor",
}
"""The control: escapes that succeed outside on any Linux. A container may also forbid the others
outside."""
ENDS_ALIKE = {
    "forks": {"wall", "processes"},
    "forks, counted": {"exited", "processes"},
    "threads": {"exited", "processes"},
    "memory of many": {"memory"},
    "large files": {"wall", "disk"},
    "many files": {"wall", "files"},
    "deleted files": {"wall", "disk"},
    "deep folders": {"wall", "files"},
    "closed folders": {"exited", "files"},  # files, if they are counted before it ends
    "output": {"output"},
    "errors": {"output"},
    "spin": {"cpu", "wall"},
    "spin, deaf": {"cpu", "wall"},
    "spin of many": {"cpu", "wall"},
    "one large file": {"exited", "disk"},
    "sleep": {"wall"},
    "stopped": {"wall"},
}
"""Bomb → how it may end. The kernel enforces a limit at one level, the supervisor at the other. A
busy machine may reach the time limit first."""


def readable_python():
    """An interpreter that every user may read, for a sandbox that runs programs as another user."""
    candidates = [os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]
    return next((c for c in candidates if others_may_read(Path(c))), candidates[0])


def others_may_read(path):
    """Whether a user who shares no group with this process can read the file at `path`."""
    folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return path.exists() and folders and bool(path.stat().st_mode & stat.S_IROTH)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that every user can write to, with a set-user-id program."""
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
    """`attacked(level, user)`: the report of attack.py, cached."""

    @functools.cache
    def attacked(level, user):
        other = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
        environment = {
            "PYTHONPATH": str(PACKAGES),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(place / "temporary"),
            "PATH": os.environ["PATH"],
        }
        python = readable_python()
        command = [python, str(HERE / "attack.py"), level, python, str(place), str(place / "id")]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            cwd=place,
            **other,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return attacked


USERS = [os.geteuid()] if os.geteuid() else [0, OTHER_USER]
DEFAULT = (
    {("namespaces", 0), ("landlock", OTHER_USER)}
    if os.geteuid() == 0
    else {(level, os.geteuid()) for level in ("namespaces", "landlock")}
)
SETUPS = [
    pytest.param(
        level,
        user,
        id=f"{level}-{'root' if user == 0 else 'other'}",
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
    # The control: outside, the escapes succeed.
    assert {name for name, (escaped, _) in outside.items() if not escaped} & WORKS_ANYWHERE == set()
    assert report["changed outside"] == ["datagrams", "folder", "owned", "shared memory"]


@pytest.mark.parametrize(("level", "user"), SETUPS)
def test_bombs_end_and_leave_nothing(attacked, level, user):
    report = attacked(level, user)
    if "refused" in report:
        return  # test_no_way_out checks the refusal
    bombs = report["bombs"]
    assert {
        name: bomb["status"]
        for name, bomb in bombs.items()
        if name in ENDS_ALIKE and bomb["status"] not in ENDS_ALIKE[name]
    } == {}
    assert {
        name: bomb["status"]
        for name, bomb in bombs.items()
        if name not in ENDS_ALIKE and bomb["status"] != "exited"
    } == {}
    # Under Landlock, the kernel's count is exact only for a user without other processes. Only root
    # can assign one.
    exact = level == "namespaces" or user == 0
    assert int((bombs["forks, counted"]["stdout"] or "0").split()[0]) <= (16 if exact else 16 * 16)
    assert {bombs[name]["status"] for name in ("forks, counted", "threads")} == {
        "exited"
    } or not exact
    assert bombs["threads"]["stdout"] == "refused\n" or not exact
    assert (
        bombs["memory of one"]["exit_code"] == 1
        and "MemoryError" in bombs["memory of one"]["stderr"]
    )
    assert bombs["shared memory"]["stdout"] == "refused\nrefused\n"
    assert bombs["one large file"]["exit_code"] in (1, None)
    assert bombs["war on the warden"]["stdout"] == "alive\n"
    closed = bombs["closed folders"]["status"]
    assert (
        bombs["core"]["stdout"] == "False []\n"
        and (bombs["closed folders"]["stdout"] == "left\n" or closed == "files")
        and bombs["survivors"]["stdout"] == "done\n"
    )
    assert max(bomb["bytes"] for bomb in bombs.values())[0] <= 64 << 10
    assert max(bomb["memory_bytes"] for bomb in bombs.values()) < 1 << 30
    assert max(bomb["seconds"] for bomb in bombs.values()) < 20
    assert report["left"] == []
