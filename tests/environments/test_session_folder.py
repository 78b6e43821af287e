"""Each program has a home of its own, which ends with its session, however that ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from clock_ahead import ClockAhead, put_forward, until

from asyncrl.config import FunctionEnvironment
from asyncrl.environments.agent import own_folder, play, program_environment
from asyncrl.environments.model import SessionUrl
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.running import Ended, Limits, run_session
from asyncrl.runtime.files.temporary import SHORT
from asyncrl.sessions.answers import Answer, ChatRequest

URL = SessionUrl("http://127.0.0.1:9", "sk-of-this-session")
MEETS = """
import json, os, pathlib, sys, tempfile, time
me, other, meeting = sys.argv[1:]
home = pathlib.Path.home()
(home / "state").write_text(me)
pathlib.Path("~/.config/tool").expanduser().mkdir(parents=True)
meeting = pathlib.Path(meeting)
(meeting / me).write_text(str(home))
while not (meeting / other).exists():
    time.sleep(0.01)
temporary = tempfile.gettempdir()
print(json.dumps([str(home), (home / "state").read_text(), temporary, os.getcwd()]))
"""
"""Writes into its home, waits for the other program, and says what it finds there."""


class Silent:
    def abandon(self, nodes: Any) -> None: ...

    async def chat(self, request: ChatRequest) -> list[Answer]:
        raise AssertionError("the program asks at the URL")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process and of those that it starts. Its path is short, as
    folders with sockets need."""
    with (
        tempfile.TemporaryDirectory(dir=SHORT) as folder,
        tempfile.TemporaryDirectory(dir=SHORT) as home,
    ):
        monkeypatch.setenv("HOME", home)  # a broken run must not write into the user's own
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        assert not list(Path(home).iterdir())


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def plays(task: dict[str, Any], deadline_s: float = 60.0, **agent: Any) -> Awaitable[Ended]:
    return run_session(play, task, Silent(), Limits(5, deadline_s), agent, URL)


async def test_two_sessions_at_once_do_not_share_a_home(tmp_path: Path, place: Path) -> None:
    command = python(MEETS, "{me}", "{other}", tmp_path)
    tasks = [{"me": "a", "other": "b"}, {"me": "b", "other": "a"}]
    ended = await asyncio.gather(
        *(plays({"prompt": "p", **task}, command=command) for task in tasks)
    )
    found = [json.loads(one.output) for one in ended]
    assert [state for _, state, _, _ in found] == ["a", "b"]
    homes = [Path(home) for home, *_ in found]
    assert homes[0] != homes[1] and {home.parent for home in homes} == {place}
    assert [temporary for _, _, temporary, _ in found] == [str(home / "tmp") for home in homes]
    # So that `command: [python, my_agent.py]` finds its file.
    assert [folder for *_, folder in found] == [os.getcwd()] * 2
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("open('late', 'w').close(); import time; time.sleep(600)", "deadline"),
        ("raise SystemExit(3)", "agent_error"),
        ("import os; os.kill(os.getpid(), 9)", "agent_error"),
        ("import os; os.chmod('.', 0o500)", "done"),
        ("[(os.mkdir('deep'), os.chdir('deep')) for _ in range(2000)]", "done"),
        (
            "import shutil; home = os.environ['HOME']; shutil.rmtree(home);"
            " open(home, 'w').write('x')",
            "done",
        ),
    ],
)
def test_nothing_is_left_behind(place: Path, code: str, end: str) -> None:
    home = "import os, pathlib; os.chdir(os.environ['HOME']); os.mkdir('d');"
    writes = f"{home} open('d/file', 'w').write('x'); os.chmod('d', 0o500); {code}"

    async def played() -> Ended:
        playing = asyncio.ensure_future(plays({"prompt": "p"}, command=python(writes)))
        await until(lambda: playing.done() or any(place.glob("session_*/late")))
        put_forward(61)
        return await playing

    with asyncio.Runner(loop_factory=ClockAhead) as runner:
        assert runner.run(played()).end == end
    assert list(place.iterdir()) == []


async def test_a_home_that_is_canceled_again_is_removed(place: Path) -> None:
    """Even if its removal has to wait for a thread."""
    busy, over = threading.Event(), threading.Event()

    async with asyncio.timeout(60):
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        agent = {"command": WRITES}
        limits = Limits(5, 60)
        session = asyncio.ensure_future(
            run_session(play, {"prompt": "p"}, Silent(), limits, agent, URL)
        )
        while not any(place.glob("session_*/file")):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        occupied = loop.run_in_executor(None, lambda: (busy.set(), over.wait()))
        while not busy.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while not session.done():
            session.cancel()
            await asyncio.sleep(0.05)
        assert any(place.iterdir())
        over.set()
        await occupied
        await loop.shutdown_default_executor()
    assert list(place.iterdir()) == []


async def test_variables_of_the_config_come_first(place: Path) -> None:
    code = "import os; print(os.environ['HOME'], os.environ['XDG_CONFIG_HOME'])"
    given = {"HOME": "/home/me", "XDG_CONFIG_HOME": "/home/me/.other"}
    ended = await plays({"prompt": "p"}, command=python(code), variables=given)
    assert ended.output == "/home/me /home/me/.other\n"


def test_caches_and_packages_of_the_user_stay() -> None:
    process = {"HOME": "/home/me", "XDG_CONFIG_HOME": "/home/me/.config", "XDG_DATA_HOME": "/d"}
    own = own_folder(Path("/t/session_1"), {**process, "PYTHONUSERBASE": "/home/me/.local"})
    assert program_environment(process, own) == {
        "HOME": "/t/session_1",
        "TMPDIR": "/t/session_1/tmp",
        "XDG_CACHE_HOME": "/home/me/.cache",
        "PYTHONUSERBASE": "/home/me/.local",
        "no_proxy": "localhost,127.0.0.1,::1",
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }


def in_pool(work: Callable[[EnvironmentPool], Awaitable[None]], command: list[str]) -> None:
    async def run() -> None:
        pool = EnvironmentPool(
            FunctionEnvironment(
                function="asyncrl.environments.agent:play",
                arguments={"command": command},
                processes=1,
            )
        )
        try:
            await work(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def playing(pool: EnvironmentPool) -> asyncio.Task[Ended]:
    return asyncio.ensure_future(pool.play({"prompt": "p"}, Silent(), url=URL))


async def until_written(place: Path) -> None:
    while not any(place.glob("asyncrl_environment_*/session_*/file")):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


WRITES = python(
    "import pathlib, time; (pathlib.Path.home() / 'file').write_text('x'); time.sleep(600)"
)


def test_nothing_is_left_behind_if_the_pool_closes_during_a_session(place: Path) -> None:
    async def work(pool: EnvironmentPool) -> None:
        playing(pool)
        await until_written(place)

    in_pool(work, WRITES)
    assert list(place.iterdir()) == []


ESCAPES = """
import os, pathlib, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        while True:
            (pathlib.Path.home() / str(time.monotonic_ns())).mkdir()
            time.sleep(0.001)
    os._exit(0)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""
"""Leaves a process in a session of its own, which goes on to write into its home."""


def test_what_a_program_leaves_in_another_session_ends_with_it(place: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def work(pool: EnvironmentPool) -> None:
        assert (await playing(pool)).end == "done"
        assert not list(place.glob("*/session_*"))
        pid = int(note.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"

    in_pool(work, python(ESCAPES, note))


def test_nothing_is_left_behind_if_the_process_of_the_sessions_is_killed(place: Path) -> None:
    async def work(pool: EnvironmentPool) -> None:
        session = playing(pool)
        await until_written(place)
        (old,) = place.iterdir()
        process = pool._processes[0]
        process.kill()
        assert (await session).end == "env_error"
        assert (await asyncio.to_thread(process._supervisor.wait, 60)) != 0
        assert not old.exists()

    in_pool(work, WRITES)
    assert list(place.iterdir()) == []


OWNS_A_POOL = """
import asyncio, json, sys
from asyncrl.config import FunctionEnvironment
from asyncrl.environments.model import SessionUrl
from asyncrl.environments.pool import EnvironmentPool

async def main():
    arguments = {"command": json.loads(sys.argv[1])}
    function = "asyncrl.environments.agent:play"
    pool = EnvironmentPool(FunctionEnvironment(function=function, arguments=arguments, processes=1))
    await pool.play({"prompt": "p"}, None, url=SessionUrl("http://127.0.0.1:9", "sk"))

asyncio.run(main())
"""


def test_nothing_is_left_behind_if_the_pools_own_process_is_killed(place: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNS_A_POOL, json.dumps(WRITES)])

    async def scenario() -> None:
        await until_written(place)
        owner.kill()
        while any(place.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(scenario(), 120))
    finally:
        owner.kill()
        owner.wait()
