"""What a foreign machine does to a run: refused before anything is made, or held."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_machines import SHADOWS

pytestmark = pytest.mark.hostile


def refused(place, done, *words):
    """The command failed with one line that has these words, and made nothing."""
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("asyncrl: ") and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in last, last
    assert place.entries() == ["sft.yaml"], place.entries()


@pytest.mark.slow
def test_a_long_temporary_folder_is_refused(place):
    work = place()
    long = work.path.parent / ("t" * 60)
    long.mkdir()
    done = work.run("sft", "sft.yaml", variables={"TMPDIR": str(long)})
    refused(work, done, str(long), "107", "RAY_TMPDIR")
    assert list(long.iterdir()) == []


@pytest.mark.slow
def test_a_file_system_without_locks_is_refused(place):
    work = place()
    done = work.run("sft", "sft.yaml", prefix=[sys.executable, str(WITHOUT_LOCKS)])
    refused(work, done, str(work.runs / "run"), "no locks", "ASYNCRL_RUNS")


WITHOUT_LOCKS = Path(__file__).parent / "without_locks.py"


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/", "/proc/1/cwd"])
def test_a_user_without_a_usable_home_is_refused(place, stranger, home):
    lines, user = stranger
    work = place()
    variables = {"HOME": home, "TMPDIR": "/tmp"}
    done = work.run("sft", "sft.yaml", before=lines, prefix=user, variables=variables)
    refused(work, done, "HOME", "auth_token" if home else "is not set")


@pytest.mark.slow
def test_another_users_ray_folder_is_refused(place, stranger):
    lines, user = stranger
    work = place()
    theirs = work.path.parent / "tmp"
    (theirs / "ray").mkdir(parents=True)
    theirs.chmod(0o1777)
    variables = {"HOME": str(work.path), "RAY_TMPDIR": str(theirs)}
    done = work.run("sft", "sft.yaml", before=lines, prefix=user, variables=variables)
    refused(work, done, str(theirs / "ray"), "belongs to root", "RAY_TMPDIR")


@pytest.mark.slow
def test_a_limit_on_the_users_processes_is_named(place, stranger):
    lines, user = stranger
    work = place()
    limited = [*user, "prlimit", "--nproc=150:150"]
    variables = {"HOME": str(work.path), "OPENBLAS_NUM_THREADS": "1"}
    done = work.run("sft", "sft.yaml", before=lines, prefix=limited, variables=variables)
    refused(work, done, "`ulimit -u`", "150")


@pytest.mark.slow
def test_a_limit_on_the_groups_processes_is_named(place, control_group):
    enter = control_group(("pids", "pids.max", "pids.max", "150"))
    work = place()
    refused(work, work.run("sft", "sft.yaml", prefix=enter), "pids.max", "150")


@pytest.mark.slow
def test_the_plan_shows_the_groups_processors_and_memory(place, control_group):
    enter = control_group(
        ("cpu", "cpu.cfs_quota_us", "cpu.max", "100000"),
        ("memory", "memory.limit_in_bytes", "memory.max", str(4 << 30)),
    )
    work = place()
    done = work.run("plan", "sft.yaml", prefix=enter)
    assert done.returncode == 0, done.stderr
    assert "(usable here: 1)" in done.stdout and "4.00 GiB of memory" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("latin", marks=pytest.mark.slow),
        pytest.param("plain", marks=pytest.mark.faults),
        pytest.param("ascii", marks=pytest.mark.faults),
    ],
)
def test_a_plan_in_another_encoding(place, kind):
    """The folder's name has letters beyond ASCII, and the plan has an arrow or a multiplication
    sign that Latin-1 or ASCII do not have."""
    work = place("Prüfung № 1 'x'")
    if kind == "latin":
        compile_ = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", f"{work.path.parent}/en_US"]
        if subprocess.run(compile_, capture_output=True).returncode:
            pytest.skip("localedef cannot make a locale here")
        variables = {"LANG": "en_US", "LC_ALL": None, "LOCPATH": str(work.path.parent)}
    elif kind == "plain":
        variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    else:
        variables = {"PYTHONIOENCODING": "ascii"}
    done = work.run("plan", "sft.yaml", variables=variables)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    shown = {"latin": "Pr\\xfcfung \\u2116 1", "plain": "Prüfung № 1", "ascii": "Pr\\xfcfung"}
    assert shown[kind] in done.stdout, done.stdout[-2000:]
    assert work.entries() == ["sft.yaml"]


@pytest.mark.slow
def test_a_users_modules_hide_none_of_a_librarys(place):
    work = place()
    for name in SHADOWS:
        (work.path / f"{name}.py").write_text(f"raise ValueError('the user has a {name}')\n")
    done = work.run("plan", "sft.yaml", "--brief")
    assert done.returncode == 0 and "the user has" not in done.stderr, done.stderr


HELD = """
ip link set lo up
hostname no-such-host-{number}
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
mount -t tmpfs -o size=64m,mode=1777 none /dev/shm
ulimit -n 1024
"""
AS_UV = 'exec -a uv bash run "$@"'
"""A parent that Ray takes for `uv run`. It runs the file `run`, which runs the command."""


def stop_for_a_while(started: Path) -> Callable[[subprocess.Popen[str]], None]:
    """What stops a command as Ctrl-Z does once the file exists, and continues it."""

    def stop(process):
        while process.poll() is None and not started.exists():
            time.sleep(0.2)
        for number in (signal.SIGTSTP, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(2)

    return stop


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_runs_hold_on_a_poor_machine(place, stranger):
    """Each has 64 MiB of /dev/shm, no network but loopback, no IPv6, a host name that does not
    resolve, an unknown user with HOME, LC_ALL=C, 1,024 descriptors, a folder with quotes, spaces
    and letters beyond ASCII, files with the names of modules in it, and more than Ray would upload
    for `uv run`. The second is stopped and continued as by Ctrl-Z and `fg`. Neither leaves a folder
    of its Ray session."""
    lines, user = stranger
    runs = []
    for number in range(2):
        work = place(f'Dr. O\'Neill "{number}" ü №')
        home = work.path.parent / "home"
        home.mkdir()
        home.chmod(0o777)
        for name in SHADOWS:
            (work.path / f"{name}.py").write_text(f"raise ValueError('the user has a {name}')\n")
        with (work.path / "large").open("wb") as file:
            file.truncate(600 << 20)
        (work.path / "run").write_text('"$@"\nexit $?\n')
        temporary = home / "t 'm p"
        temporary.mkdir()
        temporary.chmod(0o777)
        variables = {"HOME": str(home), "TMPDIR": str(temporary), "LC_ALL": "C", "LANG": None}
        runs.append((work, temporary, variables, HELD.format(number=number)))
    results = {}

    def start(number):
        work, _, variables, machine = runs[number]
        results[number] = work.run(
            "sft",
            "sft.yaml",
            before=lines + machine,
            prefix=[*user, "bash", "-c", AS_UV, "bash"],
            variables=variables,
            timeout_s=300,
            during=stop_for_a_while(work.runs / "run" / "metrics.jsonl") if number else None,
        )

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (work, temporary, _, _) in enumerate(runs):
        done = results[number]
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the user has" not in done.stdout + done.stderr
        assert list((work.runs / "run" / "hf").glob("*.safetensors"))
        assert [path.name for path in (temporary / "ray").glob("session*")] == []
