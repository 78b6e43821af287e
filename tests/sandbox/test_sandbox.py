"""What callers see: results, limits, refusals, cancellation, and processes that die."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asyncrl.sandbox import (
    Level,
    Limits,
    LocalSandbox,
    Program,
    SandboxError,
    SandboxUnavailableError,
    open_sandbox,
    probe,
    run,
    run_async,
)
from asyncrl.sandbox.__main__ import main
from asyncrl.sandbox.supervisor import _remove
from asyncrl.testing import FakeSandbox
from asyncrl.testing.sandbox import ended

PACKAGES = Path(__file__).parents[2]
LIMITS = Limits(wall_s=30.0)


@pytest.fixture(scope="module")
def sandbox():
    """The best level of this machine. test_escapes.py tests each level."""
    return open_sandbox(Level.LANDLOCK)


def sleeping():
    """A program, and a word that is only in its command line."""
    mark = f"600.{int.from_bytes(os.urandom(6))}"
    return Program(("sleep", mark)), mark


def processes_with(mark):
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if (
                name.isdigit()
                and Path("/proc", name, "cmdline").read_bytes()
                == b"sleep\0" + mark.encode() + b"\0"
            ):
                found.append(int(name))
    return found


def wait_for(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not (seen := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return seen


def test_results(sandbox):
    done = sandbox.run(
        Program.python(
            "import helper, sys; print(helper.N, sys.stdin.read(), 'ä'); sys.exit(3)",
            "in",
            {"helper.py": "N = 5"},
        ),
        LIMITS,
    )
    assert (done.status, done.exit_code, done.stdout, done.ok) == ("exited", 3, "5 in ä\n", False)
    assert done.level == sandbox.level and 0 < done.seconds < 30
    assert sandbox.run(Program.python("raise ValueError('no')"), LIMITS).stderr.endswith(
        "ValueError: no\n"
    )
    assert sandbox.run(Program.python("import os; os.kill(os.getpid(), 9)"), LIMITS).exit_code == -9
    assert sandbox.run(Program.python("import os; os.write(1, b'\\xff')"), LIMITS).stdout == "�"
    assert sandbox.run(Program(("cat", "a/b.txt"), files={"a/b.txt": b"x"}), LIMITS).stdout == "x"
    assert sandbox.run(Program(("sh", "-c", "echo $0; exit 0"), b""), LIMITS).ok
    with pytest.raises(SandboxError, match="cannot start 'no-such-program'"):
        sandbox.run(Program(("no-such-program",)), LIMITS)


def test_ordinary_python_works(sandbox):
    code = """
    import asyncio, multiprocessing, pathlib, random, sqlite3, subprocess, sys, tempfile, threading
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x
    assert asyncio.run(double(4)) == 8
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True,
        text=True).stdout == "1\\n"
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a").write_text("b")
    threads = [threading.Thread(target=print) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    database = sqlite3.connect("d.sqlite")
    database.execute("create table t (x)"); database.commit()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=queue.put, args=(7,)); child.start(); child.join()
    print(queue.get())
    """
    done = sandbox.run(Program.python(textwrap.dedent(code)), LIMITS)
    assert done.stdout.endswith("7\n"), done.stderr


def test_invalid_programs_and_settings_are_refused_before_a_run() -> None:
    for name in ("/etc/x", "../x", "a/../x", "a//b", "", "a\0b", "."):
        with pytest.raises(ValueError, match="relative path"):
            Program(("true",), files={name: b""})
    for argv in ((), ("",), ("a\0",)):
        with pytest.raises(ValueError, match="not a command"):
            Program(argv)
    for name in (field.name for field in dataclasses.fields(Limits)):
        for value in (0, -1, float("nan"), float("inf"), "1", True):
            with pytest.raises(ValueError, match=name):
                Limits(**{name: value})
    for path in ("/", "/proc", "/proc/1", "/etc", "/home", "/dev/shm", "/no/such/folder", __file__):
        with pytest.raises(ValueError, match="sandbox path"):
            LocalSandbox(Level.NAMESPACES, paths=[path])
    with pytest.raises(ValueError, match=r"sandbox\.service"):
        LocalSandbox(Level.CONTAINER)


def test_paths_are_shown_read_only_and_importable(sandbox, tmp_path):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "shown_module.py").write_text("N = 11")
    (tmp_path / "hidden").write_text("hidden")
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    code = f"""
    import shown_module
    def refused(path, mode):
        try: open(path, mode)
        except OSError: return True
    print(shown_module.N, refused(shown_module.__file__, "a"),
        refused({str(tmp_path / "hidden")!r}, "r"))
    """
    shown = LocalSandbox(sandbox.level, paths=[str(tmp_path / "shown")])
    assert shown.run(Program.python(textwrap.dedent(code)), LIMITS).stdout == "11 True True\n"


def test_nothing_runs_below_the_required_level(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxUnavailableError, match="only a service"):
        open_sandbox(Level.CONTAINER)
    with pytest.raises(ValueError):
        open_sandbox("none")
    assert Level.NAMESPACES.reaches(Level.LANDLOCK) and not Level.LANDLOCK.reaches(Level.NAMESPACES)
    assert Level.CONTAINER.reaches(Level.NAMESPACES) and not Level.NAMESPACES.reaches(
        Level.CONTAINER
    )


HERE = Path(__file__).parent
CLOSED = {
    # As in a container, and on systems that disable them.
    "namespaces": HERE / "without_namespaces.py",
    # As on older kernels.
    "landlock": HERE / "without_landlock.py",
}


@pytest.mark.parametrize("level", CLOSED)
def test_a_missing_level_is_explained_and_nothing_runs(level):
    code = f"""
    import sys
    from asyncrl.sandbox import *
    try:
        LocalSandbox(Level({level!r})).run(Program.python("print(1)"))
        sys.exit("it ran")
    except SandboxError as error:
        print("alone:", error)
    print(probe().text())
    try:
        print(open_sandbox({level!r}).level)
    except SandboxUnavailableError as error:
        print("refused:", error)
    """
    # A machine without user namespaces cannot make the one that forbids further ones.
    closing = (
        []
        if level == "namespaces" and Level.NAMESPACES not in probe().reached
        else [sys.executable, str(CLOSED[level])]
    )
    command = [*closing, sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
    )
    assert done.returncode == 0, done.stderr
    assert {"namespaces": "unshare: ", "landlock": "Landlock: "}[level] in done.stdout.splitlines()[
        0
    ]
    assert f"{level:<11} no: " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert (
        last == "namespaces"
        if level == "landlock" and Level.NAMESPACES in probe().reached
        else last.startswith(f"refused: sandbox level '{level}' is not available here")
    )


async def test_run_takes_source_or_a_command() -> None:
    if Level.NAMESPACES not in probe().reached:
        with pytest.raises(SandboxUnavailableError, match=r"namespaces: .+"):
            run("print(1)")
        return
    assert run("print(6 * 7)", limits=LIMITS).stdout == "42\n"
    assert run(["cat", "f"], files={"f": "text"}, limits=LIMITS).stdout == "text"
    assert (await run_async("print(input())", stdin="line", limits=LIMITS)).stdout == "line\n"


async def test_cancellation_kills_the_program(sandbox):
    program, mark = sleeping()

    task = asyncio.ensure_future(sandbox.run_async(program, LIMITS))
    await asyncio.to_thread(wait_for, lambda: processes_with(mark))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(lambda: not processes_with(mark))


def test_the_program_dies_with_its_caller(sandbox):
    program, mark = sleeping()
    code = (
        "from asyncrl.sandbox import *;"
        f" LocalSandbox(Level({sandbox.level.value!r})).run(Program({program.argv!r}),"
        " Limits(wall_s=600.0))"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PACKAGES)}
    )
    wait_for(lambda: processes_with(mark))
    caller.kill()
    caller.wait()
    wait_for(lambda: not processes_with(mark))


async def test_the_program_dies_with_its_supervisor(sandbox):
    program, mark = sleeping()

    task = asyncio.ensure_future(sandbox.run_async(program, LIMITS))
    await asyncio.to_thread(wait_for, lambda: processes_with(mark))
    supervisor = [
        int(child)
        for child in children()
        if b"asyncrl.sandbox.supervisor" in Path("/proc", child, "cmdline").read_bytes()
    ]
    os.kill(supervisor[-1], 9)
    with pytest.raises(SandboxError, match="ended without a result"):
        await task
    wait_for(lambda: not processes_with(mark))


def children():
    return [
        child
        for task in os.listdir("/proc/self/task")
        for child in Path(f"/proc/self/task/{task}/children").read_text().split()
    ]


def test_a_deep_folder_is_removed_without_recursion(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=here)
        os.symlink(outside, "link-inside", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (folder / "closed").mkdir(0o000)
    _remove(str(folder))
    assert not folder.exists() and (outside / "kept").read_text() == "kept"


def test_prints_the_supported_levels(capsys: pytest.CaptureFixture[str]) -> None:
    best = probe().best
    assert main([]) == (0 if best else 1)
    printed = capsys.readouterr().out
    assert (
        printed.endswith(f"level {best or 'none'}\n")
        and "namespaces " in printed
        and "landlock " in printed
    )


async def test_the_fake_keeps_its_programs_and_limits() -> None:
    fake = FakeSandbox(lambda program: ended(program.stdin.decode()))
    assert fake.run(Program.python("", "a")).stdout == "a"
    assert (await fake.run_async(Program.python("", "b"), LIMITS)).ok and fake.limits == [
        Limits(),
        LIMITS,
    ]
    with pytest.raises(ValueError, match="landlock"):
        FakeSandbox(lambda program: ended(level=Level.LANDLOCK)).run(Program.python(""))
