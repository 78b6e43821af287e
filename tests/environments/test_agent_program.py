"""Agents that are programs or functions of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from clock_ahead import ClockAhead, put_forward, until

from asyncrl.environments import agent
from asyncrl.environments.agent import command_columns, play, program_environment
from asyncrl.environments.model import Model, SessionUrl
from asyncrl.environments.running import AgentFailedError, Ended, Limits, run_session
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.requests import UnsupportedError

URL = SessionUrl("http://127.0.0.1:9", "sk-of-this-session")
TASK = {"prompt": "find {x}", "number": 7, "x": "not this"}


class Silent:
    async def chat(self, request: ChatRequest) -> list[Answer]:
        raise AssertionError("the program asks at the URL")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def run(deadline_s: float = 20.0, url: SessionUrl | None = URL, **agent: Any) -> Ended:
    return asyncio.run(run_session(play, TASK, Silent(), Limits(5, deadline_s), agent, url))


def test_a_program_gets_its_task_and_where_its_session_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of the run")
    monkeypatch.setenv("OPENAI_ORG_ID", "of the user")
    code = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], sys.stdin.read(),"
        " dict(os.environ)]))"
    )
    command = python(code, "--task={prompt}", "{number}", "{}", "{ x }")
    ended = run(command=command, variables={"EXTRA": "1"})
    assert ended.end == "done" and ended.reward is None
    arguments, given, variables = json.loads(ended.output)
    assert arguments == ["--task=find {x}", "7", "{}", "{ x }"]
    assert given == ""  # it has the prompt as an argument
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == URL.key
    assert variables["EXTRA"] == "1" and variables["PATH"] == os.environ["PATH"]
    assert not {"WANDB_API_KEY", "OPENAI_ORG_ID"} & set(variables)


@pytest.mark.parametrize(
    ("stdin", "expected"),
    [
        ("none", ""),
        ("task", json.dumps(TASK)),
        ("prompt", TASK["prompt"]),
        (None, TASK["prompt"]),
    ],
)
def test_what_a_program_can_read(stdin: str | None, expected: str) -> None:
    command = python("import sys; print(sys.stdin.read(), end='')")
    assert run(command=command, stdin=stdin).output == expected


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (python("raise SystemExit(3)"), "ended with exit code 3"),
        (python("raise KeyError('no key')"), "ended with exit code 1: KeyError: 'no key'"),
        (python("import os; os.kill(os.getpid(), 9)"), "ended with signal SIGKILL"),
        (
            python(r"import os; os.write(2, b'first\nno \x1b[1mkey\n...\r\xff'); os._exit(3)"),
            "ended with exit code 3: no [1mkey",
        ),
        (["/no/such/program"], "'/no/such/program' cannot start: [Errno 2]"),
    ],
)
def test_a_program_that_fails(command: list[str], note: str) -> None:
    ended = run(command=command)
    assert ended.end == "agent_error" and ended.reward is None
    assert note in ended.note


def test_a_column_that_no_task_has_is_named() -> None:
    ended = run(command=["echo", "{missing}"])
    assert ended.end == "env_error" and "environment.command names {missing}" in ended.note


def test_a_program_that_reads_nothing_and_writes_much() -> None:
    command = python("import sys; sys.stdout.write('x' * (1 << 22) + 'end')")
    ended = run(command=command, stdin="task")
    assert ended.end == "done" and len(ended.output) == 1 << 16 and ended.output.endswith("xend")


def test_a_program_ends_with_its_session_and_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "END_S", 1.0)
    note = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}.'); time.sleep(600)"
    )

    async def late() -> Ended:
        own = {"command": python(code)}
        playing = asyncio.ensure_future(
            run_session(play, TASK, Silent(), Limits(5, 60.0), own, URL)
        )
        await until(lambda: playing.done() or (note.exists() and note.read_text().endswith(".")))
        put_forward(61)
        return await playing

    with asyncio.Runner(loop_factory=ClockAhead) as runner:
        ended = runner.run(late())
    assert (ended.end, ended.note) == ("deadline", "it was not over after 60 s")
    for pid in map(int, note.read_text().rstrip(".").split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_a_child_that_holds_the_output_does_not_hold_the_session() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('done')"
    began = time.monotonic()
    ended = run(command=python(code))
    assert ended.end == "done" and ended.output == "done\n"
    assert time.monotonic() - began < 15


def blocking(task: Any, model: Model, worth: float = 1.0) -> float:
    assert model.api_key == URL.key and model.base_url.endswith("/v1")
    time.sleep(0.01)
    return worth


async def not_blocking(task: Any, model: Model, worth: float = 1.0) -> float:
    return worth


def gives_up(task: Any, model: Model) -> float:
    raise AgentFailedError("no idea")


@pytest.mark.parametrize("name", ["blocking", "not_blocking"])
def test_a_function_may_block(name: str) -> None:
    ended = run(function=f"{__name__}:{name}", arguments={"worth": 0.25})
    assert (ended.end, ended.reward) == ("done", 0.25)


def test_a_function_may_say_that_the_agent_failed() -> None:
    ended = run(function=f"{__name__}:gives_up")
    assert ended.end == "agent_error" and "no idea" in ended.note


def test_without_a_url_the_model_says_how_to_get_one() -> None:
    with pytest.raises(UnsupportedError, match=r"set environment\.url: true"):
        _ = Model(Silent()).base_url
    assert run(url=None, function=f"{__name__}:blocking").end == "env_error"


def test_columns_of_a_command() -> None:
    assert command_columns(["a", "--x={prompt}{n}", "{}", "{n}"]) == ["n", "prompt"]


def test_secrets_and_rays_variables_are_not_passed() -> None:
    process = {"HF_TOKEN": "1", "RAY_ADDRESS": "2", "ASYNCRL_RUNS": "3", "HOME": "4"}
    found = program_environment(process, {"MY_TOKEN": "5"})
    assert {name for name in found if name.lower() != "no_proxy"} == {"HOME", "MY_TOKEN"}


async def test_a_program_that_ignores_its_end_is_killed_also_if_its_session_is_canceled_again(
    tmp_path: Path,
) -> None:
    note = tmp_path / "pid"
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )

    agent = {"command": python(code)}
    playing = asyncio.ensure_future(run_session(play, TASK, Silent(), Limits(5, 60), agent, URL))
    while not note.exists() or not note.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(2):
        playing.cancel()
        await asyncio.sleep(0.1)
    await asyncio.gather(playing, return_exceptions=True)
    pid = int(note.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)
    assert not psutil.pid_exists(pid)


def leaves(task: Any, model: Model) -> float:
    sys.exit(3)


def test_a_blocking_function_that_leaves_ends_only_its_session() -> None:
    ended = run(function=f"{__name__}:leaves")
    assert ended.end == "agent_error" and "called sys.exit(3)" in ended.note
