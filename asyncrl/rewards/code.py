"""Reward for code: runs the completion's code block against the tests of a column, in a sandbox.

Name it in the config as `asyncrl.rewards.builtin:code_tests`, and set `reward.sandbox.level`. Your
own reward gets the same sandbox from `configured_sandbox`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.config import SandboxConfig
from asyncrl.sandbox import Limits, Program, Result, Sandbox, open_sandbox

__all__ = [
    "code_block",
    "code_tests",
    "configured_sandbox",
    "passes",
    "sandbox_limits",
    "share_settings",
]

SETTINGS = "ASYNCRL_SANDBOX"
"""Environment variable that passes the sandbox settings to reward processes."""

FENCE = "```"
AFTER_LANGUAGE = re.compile(r"[^\w+-]")
"""The first character after the language that a fence names."""
PYTHON = ("", "python", "py", "python3")

ASSERTIONS = """
import json, os, sys
passed = sys.stdin.readline().strip()
with open("tests.json") as file:
    tests = json.load(file)
with open("solution.py") as file:
    source = file.read()
names = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), names)
for number, test in enumerate(tests):
    exec(compile(test, f"test {number}", "exec"), names)
sys.stdout.flush()
os.write(1, f"\\n{passed}".encode())
os._exit(0)
"""
"""Prints a secret word last. Code that ends the process before its tests are done never prints
it."""

CASES = """
import json, subprocess, sys
outputs = []
for case in json.load(sys.stdin):
    command = [sys.executable, "-s", "-B", "solution.py"]
    done = subprocess.run(command, input=case.encode(), capture_output=True)
    outputs.append([done.returncode, done.stdout.decode(errors="replace")])
print(json.dumps(outputs))
"""
"""Prints the outputs. The expected ones stay outside, so the code cannot find or rewrite them."""


async def code_tests(
    completions: Sequence[str], tests: Sequence[object], **_: object
) -> list[float | None]:
    """1.0 where the completion's last Python block passes all its tests, else 0.0.

    Column `tests` contains one of these, as a value or as JSON text:

    - Python source, or a list of it. It runs after the code, in the code's namespace, such as
      `"assert add(1, 2) == 3"`.
    - A list of `{"input": text, "output": text}`: what the program must print for that standard
      input. White space at the end of each line and of the output is ignored.

    Raises:
        SandboxError: The sandbox that `reward.sandbox` asks for is not available.
        ValueError: The tests have another form.
    """
    sandbox, limits = await asyncio.to_thread(configured_sandbox)
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def score(completion: str, given: object) -> float:
        code, checked = code_block(completion), read_tests(given)
        if code is None:
            return 0.0
        async with slots:
            return float(await passes(sandbox, limits, code, checked))

    return list(await asyncio.gather(*map(score, completions, tests)))


def code_block(completion: str) -> str | None:
    """The last fenced block that is Python or names no language; None if there is none."""
    blocks = [code for language, code in _fenced(completion) if language.lower() in PYTHON]
    return textwrap.dedent(blocks[-1]) if blocks else None


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, code) of each closed block. Goes line by line: on a degenerate text, one
    regular expression would take minutes."""
    language: str | None = None
    code: list[str] = []
    for line in text.split("\n"):
        bare = line.strip(" \t\r")
        if language is None:
            if bare.startswith(FENCE):
                language = AFTER_LANGUAGE.split(bare[len(FENCE) :].lstrip(" \t"), maxsplit=1)[0]
                code = []
        elif bare == FENCE:
            yield language, "".join(f"{code_line}\n" for code_line in code)
            language = None
        else:
            code.append(line)


def read_tests(tests: object) -> list[str] | list[tuple[str, str]]:
    """The tests as assertions or as (input, output) pairs; at least one.

    Raises:
        ValueError: They have another form.
    """
    found = _from_json(tests) if isinstance(tests, str) else tests
    if isinstance(found, str):
        found = [found]
    if isinstance(found, Sequence) and found:
        if all(isinstance(test, str) for test in found):
            return [str(test) for test in found]
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in found):
            pairs = [(test["input"], test["output"]) for test in found]
            if all(isinstance(text, str) for pair in pairs for text in pair):
                return pairs
    raise ValueError(
        f"column tests contains {str(tests)[:80]!r}; give Python source, a list of it, or a list of"
        " {'input': text, 'output': text}"
    )


def _from_json(text: str) -> str | list[object]:
    try:
        found: object = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, list) else text


async def passes(
    sandbox: Sandbox, limits: Limits, code: str, tests: Sequence[str] | Sequence[tuple[str, str]]
) -> bool:
    """Whether the code passes all tests. The limits apply to all of them together.

    Raises:
        SandboxError: The program did not run.
    """
    if isinstance(tests[0], str):
        secret = secrets.token_hex(16)
        program = Program.python(
            ASSERTIONS, secret, {"solution.py": code, "tests.json": json.dumps(tests)}
        )
        return _printed(await sandbox.run_async(program, limits)).endswith(f"\n{secret}")
    inputs, expected = zip(*tests, strict=True)
    program = Program.python(CASES, json.dumps(inputs), {"solution.py": code})
    outputs = _outputs(_printed(await sandbox.run_async(program, limits)))
    return outputs is not None and list(map(_lines, outputs)) == list(map(_lines, expected))


def _outputs(printed: str) -> list[str] | None:
    """What each run of a program printed; None unless all exited with code 0. The text is not
    trusted: a program may have written it."""
    try:
        runs = json.loads(printed)
    except (ValueError, RecursionError):
        return None
    if not isinstance(runs, list) or not all(
        isinstance(run, list) and len(run) == 2 for run in runs
    ):
        return None
    return (
        [output for _, output in runs]
        if all(code == 0 and isinstance(output, str) for code, output in runs)
        else None
    )


def _printed(result: Result) -> str:
    """The standard output of a program that exited with code 0, else an empty string."""
    return result.stdout if result.ok else ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def share_settings(config: SandboxConfig) -> None:
    """Put `reward.sandbox` into the environment, for reward processes that this process starts
    later."""
    os.environ[SETTINGS] = config.model_dump_json()


def sandbox_limits(config: SandboxConfig) -> Limits:
    """The limits of one completion's tests."""
    return Limits(
        config.wall_s,
        config.cpu_s,
        config.memory_bytes,
        config.processes,
        config.disk_bytes,
        output_bytes=config.output_bytes,
    )


def configured_sandbox() -> tuple[Sandbox, Limits]:
    """The sandbox and the limits of `reward.sandbox`, in a reward process. Safe to call from any
    thread.

    Raises:
        SandboxError: The level is not available here.
        ValueError: `reward.sandbox.level` is not set.
    """
    return _opened(os.environ.get(SETTINGS, "{}"))


@functools.cache
def _opened(settings: str) -> tuple[Sandbox, Limits]:
    config = SandboxConfig.model_validate_json(settings)
    if config.level is None:
        raise ValueError(
            "code runs only in a sandbox: set reward.sandbox.level (docs/how_to/sandbox.md)"
        )
    return open_sandbox(
        config.level, service=config.service, python=config.python, paths=config.paths
    ), sandbox_limits(config)
