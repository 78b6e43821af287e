"""The reward for code: what it reads, what it runs, and programs that try to evade their
tests."""

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack

import pytest
from small_config import small_config

from asyncrl.config import SandboxConfig
from asyncrl.rewards import source
from asyncrl.rewards.code import (
    SETTINGS,
    code_block,
    code_tests,
    configured_sandbox,
    passes,
    read_tests,
    share_settings,
)
from asyncrl.rewards.contract import GroupCall, RewardError, call_reward
from asyncrl.rewards.pool import RewardPool
from asyncrl.run import launch
from asyncrl.sandbox import Level, Limits, SandboxError, SandboxUnavailableError, probe
from asyncrl.testing import FakeSandbox
from asyncrl.testing.sandbox import ended

ADD = "def add(a, b):\n    return a + b\n"
ECHO = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 5", "output": "15"}]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Thus:\n```\nx = 1\n```\nor better\n```py\nx = 2\n```\nDone.", "x = 2\n"),
        ("```Python3 title=a\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("1. step\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("```c++\nint x;\n```", None),
        ("x = 1", None),
        ("```python\nx = 1", None),
        ("", None),
    ],
)
def test_takes_the_last_python_block(completion, code):
    assert code_block(completion) == code


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ("assert add(1, 2) == 3", ["assert add(1, 2) == 3"]),
        (["assert a", "assert b"], ["assert a", "assert b"]),
        ('["assert a"]', ["assert a"]),
        (ECHO, [("1 2\n", "3\n"), ("10 5", "15")]),
        (json.dumps(ECHO), [("1 2\n", "3\n"), ("10 5", "15")]),
        ("{}", ["{}"]),
        ([], None),
        ("[]", None),
        (None, None),
        (7, None),
        ([{"input": "1"}], None),
        ([{"input": "1", "output": None}], None),
        (["assert a", {"input": "", "output": ""}], None),
    ],
)
def test_reads_assertions_and_cases(tests, read):
    if read is None:
        with pytest.raises(ValueError, match="column tests contains"):
            read_tests(tests)
    else:
        assert read_tests(tests) == read


def test_compares_outputs_outside() -> None:
    def score(outputs, tests=(("1", "3\n"), ("2", "a  \n\nb\n\n")), exit_code=0):
        sandbox = FakeSandbox(
            lambda program: ended(
                json.dumps(outputs) if not isinstance(outputs, str) else outputs, exit_code
            )
        )
        passed = asyncio.run(passes(sandbox, Limits(), "code", tests))
        assert b"3" not in b"".join(
            [sandbox.programs[0].stdin, *sandbox.programs[0].files.values()]
        )  # the program cannot find the expected outputs
        return passed

    assert score([[0, "3"], [0, "a\n\nb"]]) and score([[0, "3 \n\n"], [0, "a\n\nb \n"]])
    assert not score([[0, "4"], [0, "a\n\nb"]]) and not score([[0, "3"], [0, "a\nb"]])
    assert (
        not score([[1, "3"], [0, "a\n\nb"]])
        and not score([[0, "3"]])
        and not score([[0, "3"], [0, "a\n\nb"], [0, ""]])
    )
    assert not score([[0, "3"], [0, "a\n\nb"]], exit_code=1)
    assert (
        not score("no json")
        and not score("7")
        and not score("[7, 7]")
        and not score("null")
        and not score('[[0, 3], [0, "a"]]')
    )


@pytest.fixture
def sandboxed(monkeypatch):
    """The environment of a reward process, with the best sandbox level here."""
    best = probe().best
    assert best is not None, probe().text()
    monkeypatch.setenv(SETTINGS, "{}")
    share_settings(SandboxConfig(level=best.value, wall_s=20.0))


def rewards(completions, tests):
    return call_reward("asyncrl.rewards.builtin:code_tests", group(completions, tests)).rewards


def group(completions, tests):
    return GroupCall(
        ["p"] * len(completions), completions, [[1]] * len(completions), {"tests": tests}
    )


def test_assertions_pass_or_fail(sandboxed):
    programs = [
        ADD,
        ADD.replace("+", "-"),
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import sys\nprint('x' * 99)\n" + ADD + "print('more', end='')",
        (
            "def add(a, b):\n    print('called')\n    return a + b\nimport threading,"
            " time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
        ),
        "def add(a, b): raise SystemExit(0)",
        "syntax error",
        "x = '\ud800'\n" + ADD,
    ]
    found = rewards(
        [f"```python\n{program}\n```" for program in programs] + ["no code"],
        ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    )
    assert list(found) == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_programs_are_run_on_inputs(sandboxed):
    programs = [
        "a, b = map(int, input().split())\nprint(a + b)",
        "print(3)",
        "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        (
            'print(\'[[0, "3"], [0, "15"]]\')\nimport os, signal\nos.kill(os.getppid(),'
            " signal.SIGKILL)"
        ),
    ]
    assert list(rewards([f"```\n{program}\n```" for program in programs], ECHO)) == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def test_no_code_runs_without_the_sandbox_that_the_config_asks_for(monkeypatch, tmp_path):
    code = f"```\nopen({str(tmp_path / 'ran')!r}, 'w')\n```"
    monkeypatch.delenv(SETTINGS, raising=False)
    with pytest.raises(RewardError, match=r"set reward\.sandbox\.level"):
        rewards([code], "assert True")
    monkeypatch.setenv(SETTINGS, '{"level": "container"}')
    with pytest.raises(
        RewardError,
        match=r"SandboxUnavailableError: sandbox level 'container' is not available here",
    ):
        rewards([code], "assert True")
    with pytest.raises(SandboxUnavailableError):
        configured_sandbox()
    monkeypatch.setenv(SETTINGS, '{"level": "landlock", "service": "http://127.0.0.1:1"}')
    monkeypatch.setenv("ASYNCRL_SANDBOX_TOKEN", "a token of the tests")
    with pytest.raises(SandboxError, match="does not answer"):
        configured_sandbox()
    assert not (tmp_path / "ran").exists()


def test_settings_reach_a_reward_process(monkeypatch, sandboxed):
    sandbox, limits = configured_sandbox()
    assert sandbox.level == probe().best and limits == Limits(wall_s=20.0)
    assert Level(sandbox.level).reaches(Level.LANDLOCK)
    assert asyncio.run(
        code_tests(completions=["```\nx = 1\n```"], tests=["assert x == 1"], ordinal=[0])
    ) == [1.0]


class StartedPoolError(Exception):
    """Raised with the settings that the pool's processes would find."""


@pytest.mark.parametrize("starts", ["the scoring stream", "evaluation"])
def test_every_start_of_reward_processes_passes_the_settings(monkeypatch, starts):
    config = small_config(
        reward={
            "functions": {"f": {"function": "m:f"}},
            "sandbox": {"level": "landlock", "wall_s": 7.0},
        }
    )
    module = source if starts == "the scoring stream" else launch

    def start(config, *_):
        raise StartedPoolError(os.environ[SETTINGS])

    monkeypatch.setenv(SETTINGS, "{}")
    monkeypatch.setattr(module, "RewardPool", start)
    with pytest.raises(StartedPoolError, match=r'"level":"landlock".*"wall_s":7.0'):
        if module is source:
            next(source.rewarded_groups(config.reward, "reader", []))
        else:
            asyncio.run(launch._start_rewards(config, AsyncExitStack()))


def test_reward_processes_run_it(sandboxed):
    config = small_config(
        reward={
            "functions": {"code": {"function": "asyncrl.rewards.builtin:code_tests"}},
            "sandbox": {"level": probe().best.value, "wall_s": 20.0},
            "processes": 1,
            "deadline_s": 120.0,
        }
    ).reward
    with RewardPool(config) as pool:
        found = pool.submit(
            group(
                [f"```python\n{ADD}```", "```python\nwhile True: pass\n```"],
                "assert add(1, 2) == 3",
            )
        ).result(timeout=150)
    assert found.failure is None and found.parts == {"code": [1.0, 0.0]}


def test_a_degenerate_text_costs_no_time() -> None:
    for text in (
        "```" + "a" * 200_000,
        "```" + " " * 200_000,
        "```x\n" * 50_000,
        "```py\n" + "```py " * 50_000,
    ):
        began = time.process_time()
        assert code_block(text) is None
        assert time.process_time() - began < 1.0
    assert code_block("```python\r\nx = 1\r\n```\r\n") == "x = 1\r\n"
