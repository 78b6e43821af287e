"""What a machine allows a process, read from the files of control groups."""

import os
import resource

import psutil
import pytest

from asyncrl.sandbox import machine
from asyncrl.sandbox.machine import process_limit, usable_cpus, usable_memory

PROCESSORS = 64


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """`groups(membership, {file: text})`: these control groups, on a machine of 64 processors."""
    monkeypatch.setattr(machine, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(PROCESSORS)))

    def make(membership, files):
        (tmp_path / "own").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return make


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", PROCESSORS),
        ("9900000 100000", PROCESSORS),
    ],
)
def test_the_quota_of_a_container_counts(groups, text, count):
    groups("0::/\n", {"cpu.max": text})
    assert usable_cpus() == count


def test_the_lowest_quota_of_all_groups_above_counts(groups):
    groups(
        "0::/user.slice/job.scope\n",
        {
            "user.slice/cpu.max": "300000 100000",
            "user.slice/job.scope/cpu.max": "max 100000",
            "cgroup.controllers": "cpu",
        },
    )
    assert usable_cpus() == 3


@pytest.mark.parametrize("path", ["/docker/of-the-host", "/../elsewhere", "/"])
def test_a_container_shows_its_group_at_the_root_of_version_1(groups, path):
    """The path may be that of the host, which is not visible inside."""
    groups(
        f"3:cpu,cpuacct:{path}\n2:memory:{path}\n",
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "400000",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": 3 << 30,
            "memory/memory.usage_in_bytes": 2 << 30,
            "memory/memory.stat": f"total_inactive_file {1 << 29}\ninactive_file 7",
        },
    )
    assert usable_cpus() == 4
    assert usable_memory() == (3 << 30, (1 << 30) + (1 << 29))


def test_without_control_groups_the_affinity_counts(groups, monkeypatch):
    groups("0::/\n", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert usable_cpus() == 3
    assert usable_memory()[0] == psutil.virtual_memory().total


def test_a_quota_of_version_1_without_a_limit_is_minus_one(groups):
    groups("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert usable_cpus() == PROCESSORS


def test_memory_of_a_group_of_version_2(groups):
    groups(
        "0::/job\n",
        {
            "job/memory.max": 2 << 30,
            "job/memory.current": 3 << 29,
            "job/memory.stat": "anon 5\ninactive_file 4096",
            "memory.max": "max",
        },
    )
    assert usable_memory() == (2 << 30, (1 << 29) + 4096)


def test_the_group_with_the_fewest_free_processes_limits(groups, monkeypatch):
    groups(
        "0::/a/b\n",
        {
            "a/pids.max": "500",
            "a/pids.current": "490",
            "a/b/pids.max": "150",
            "a/b/pids.current": "7",
        },
    )
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    limit = process_limit()
    assert (limit.most, limit.used, limit.free) == (500, 490, 10)


def test_the_users_limit_counts_threads_unless_the_user_is_exempt(groups, monkeypatch):
    groups("0::/\n", {})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))
    monkeypatch.setattr(machine, "_exempt", lambda: True)
    assert process_limit() is None
    monkeypatch.setattr(machine, "_exempt", lambda: False)
    limit = process_limit()
    assert "ulimit -u" in limit.name and limit.used >= psutil.Process().num_threads()
