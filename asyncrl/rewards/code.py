"""Reward for code: runs the completion's code block against the tests of a column, in a sandbox.

Name it in the config as `asyncrl.rewards.builtin:code_tests`, and set `reward.sandbox.level`. Your
own reward gets the same sandbox from `configured_sandbox`.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import math
import os
import re
import secrets
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from asyncrl.config import SandboxConfig
from asyncrl.config.schema import SandboxService
from asyncrl.rewards.code_forms import Cases, Source, TestsError, heads_of, read_tests
from asyncrl.rewards.contract import row_of
from asyncrl.rewards.final_answer import code_blocks
from asyncrl.sandbox import Limits, Program, Result, Sandbox, open_sandbox
from asyncrl.sandbox.machine import usable_cpus

SANDBOX: TypeAdapter[SandboxConfig | None] = TypeAdapter(SandboxConfig | None)
SETTINGS = "ASYNCRL_SANDBOX"
"""Environment variable that passes the sandbox settings to reward processes."""

RUNNER = Path(__file__).with_name("in_sandbox.py")
"""The program that runs the tests in the sandbox."""
SEPARATE = "namespaces", "landlock"
"""Levels at which a signal to every process reaches only the sandbox's."""
NUMBER = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\w.])")
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re
import string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
from typing import *
"""
"""What graders of functions and of LeetCode's class Solution import before the program."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program passed its tests."""

    passed: bool
    reason: str = ""
    """What failed first. A program may have written it."""


async def code_tests(
    completions: Sequence[str],
    tests: Sequence[object],
    answer_texts: Sequence[str | None] | None = None,
    answer_ended: Sequence[bool] | None = None,
    shared_arguments: Sequence[str] = (),
    **columns: object,
) -> list[float | None]:
    """1.0 where the completion's last Python block passes all its tests, else 0.0.

    docs/how_to/sandbox.md lists the forms of column `tests` and the columns that belong to it.

    Raises:
        SandboxError: The sandbox that `reward.sandbox` asks for is not available.
        ValueError: The tests have another form, assert nothing, or import what the sandbox does
            not have.
    """
    sandbox, limits = await asyncio.to_thread(configured_sandbox)
    slots = asyncio.Semaphore(usable_cpus())
    count = len(completions)
    rows = [row_of(columns, index, count, shared_arguments) for index in range(count)]
    read: list[Cases | Source] = []
    for given, row in zip(tests, rows, strict=True):
        same = bool(read) and given == tests[0]
        read.append(read[0] if same else read_tests(given, row))
    await asyncio.to_thread(refuse_missing_packages, sandbox, read)

    async def score(code: str | None, checked: Cases | Source, row: Mapping[str, object]) -> float:
        if code is None:
            return 0.0
        async with slots:
            return float((await grade(sandbox, limits, code, checked, heads_of(row))).passed)

    programs = code_blocks(completions, answer_texts, answer_ended)
    return list(await asyncio.gather(*map(score, programs, read, rows)))


async def grade(
    sandbox: Sandbox,
    limits: Limits,
    code: str,
    tests: Cases | Source,
    heads: Sequence[str] = (),
) -> Verdict:
    """Run the code's tests. The limits apply to all of them together.

    Args:
        heads: source that the data shows the model before its answer.

    Raises:
        SandboxError: The program did not run.
    """
    if isinstance(tests, Cases):
        return await _grade_cases(sandbox, limits, code, tests, heads)
    program, before = with_heads(code, tests.entry_point, heads)
    secret = secrets.token_hex(16)
    form = "pytest" if tests.needs_pytest else "source"
    begin = {"form": form, "heads": before, "imports": tests.imports}
    given = {
        "sources": tests.sources,
        "entry_point": tests.entry_point,
        "calls_check": tests.calls_check,
    }
    stdin = json.dumps({"secret": secret, "tests": given})
    result = await sandbox.run_async(_runner(begin, program, stdin), limits)
    return _verdict(result, secret)


async def _grade_cases(
    sandbox: Sandbox, limits: Limits, code: str, tests: Cases, heads: Sequence[str]
) -> Verdict:
    separate = str(sandbox.level) in SEPARATE
    begin: dict[str, object] = {"form": "cases", "ends_others": separate}
    if tests.function is not None:
        code, before = with_heads(code, tests.function, heads)
        begin |= {"call": tests.function, "heads": [PRELUDE, *before]}
    # Another service may not separate what earlier cases left running: there, each case is a
    # program of its own.
    parts = [tests.inputs] if separate else [(case,) for case in tests.inputs]
    outputs: list[str] = []
    for inputs in parts:
        program = _runner(begin, code, json.dumps({"inputs": inputs}))
        result = await sandbox.run_async(program, limits)
        found = _outputs(_printed(result))
        if found is None or len(found) != len(inputs):
            return Verdict(False, f"a case failed, or a limit: {result.status}")
        outputs += found
    agrees = _agrees if tests.function is None else _returned
    for number, (output, expected) in enumerate(zip(outputs, tests.expected, strict=True)):
        if not agrees(output, expected):
            return Verdict(False, f"case {number}: {output[:200]!r} is not {str(expected)[:200]!r}")
    return Verdict(True)


def _runner(begin: Mapping[str, object], code: str, stdin: str) -> Program:
    files = {"solution.py": code, "begin.json": json.dumps(begin)}
    return Program.python(RUNNER.read_text(), stdin, files)


def with_heads(
    code: str, entry_point: str | None, heads: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """(program, source to run before it). A completion that is only the body of the function is
    put below the head that ends with that function's first lines. HumanEval indents its bodies."""
    whole = tuple(head for head in heads if _defined(head) is not None)
    before = whole if entry_point is None or entry_point.isidentifier() else (PRELUDE, *whole)
    name = (entry_point or "").rpartition(".")[2]
    if not name.isidentifier() or name in (_defined(code) or ()):
        return code, before
    for head in heads:
        last = head.rstrip().rpartition("\n")[2]
        depth = len(last) - len(last.lstrip()) + 4 * last.rstrip().endswith(":")
        joined = f"{head.rstrip()}\n{textwrap.indent(textwrap.dedent(code), ' ' * depth)}"
        if depth and name in (_defined(joined) or ()):
            return joined, tuple(other for other in before if other != head)
    return code, before


def _defined(code: str) -> set[str] | None:
    """Names of the functions that the source defines; None if it is not Python source."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)} | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def refuse_missing_packages(sandbox: Sandbox, tests: Iterable[Cases | Source]) -> None:
    """Raise TestsError if tests import what the sandbox's Python does not have: the right program
    could not pass."""
    sources = [test for test in tests if isinstance(test, Source)]
    named = {name for test in sources for name in test.needs}
    named |= {"pytest" for test in sources if test.needs_pytest}
    unknown = sorted(named - {*sys.stdlib_module_names} - {*_packages.get(id(sandbox), {})})
    if unknown:
        program = Program.python(FIND, json.dumps(unknown))
        result = sandbox.run(program, Limits(wall_s=60.0, cpu_s=60.0))
        found = json.loads(result.stdout) if result.ok else []
        _packages.setdefault(id(sandbox), {}).update({name: name in found for name in unknown})
    missing = sorted(name for name in named if not _packages.get(id(sandbox), {}).get(name, True))
    if missing:
        raise TestsError(
            f"column tests needs {', '.join(missing)}, which the sandbox's Python does not have;"
            " install it for reward.sandbox.python, or name its folder in reward.sandbox.paths. The"
            " program itself is imported as solution"
        )


FIND = """
import importlib.util, json, sys
del sys.path[0]
print(json.dumps([name for name in json.load(sys.stdin) if importlib.util.find_spec(name)]))
"""
"""Prints which of the packages Python finds outside the program's folder."""
_packages: dict[int, dict[str, bool]] = {}
"""Sandbox, which `configured_sandbox` keeps for the process → package → whether it has it."""


def _verdict(result: Result, secret: str) -> Verdict:
    """What the judge printed after its secret, wherever other processes printed something."""
    _, found, said = result.stdout.rpartition(f"\n{secret} ")
    if found and said.startswith("passed\n"):
        return Verdict(True)
    reason = said.partition("\n")[0].removeprefix("failed ") if found else result.status
    return Verdict(False, reason)


def _agrees(output: str, expected: object) -> bool:
    found, wanted = _lines(output), _lines(str(expected))
    return len(found) == len(wanted) and all(map(_same_line, found, wanted))


def _same_line(found: str, wanted: str) -> bool:
    """Whether lines have the same text, apart from the digits of numbers that are no integers and
    the order of a set."""
    if found == wanted:
        return True
    ours, theirs = NUMBER.split(found), NUMBER.split(wanted)
    if len(ours) == len(theirs) and all(map(_near_text, ours, theirs)):
        return True
    # Only a line with the same characters is read: the program may have written any other.
    return sorted(found) == sorted(wanted) and _set_of(found) == _set_of(wanted) is not None


def _near_text(found: str, wanted: str) -> bool:
    """Whether texts are equal, or the second is a number that is no integer, and the first near."""
    if found == wanted:
        return True
    if not (NUMBER.fullmatch(found) and NUMBER.fullmatch(wanted)) or wanted.lstrip("+-").isdigit():
        return False
    return _near(float(found), float(wanted))


def _set_of(line: str) -> set[object] | None:
    try:
        found = ast.literal_eval(line)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, set) else None


def _near(found: object, wanted: object) -> bool:
    """Whether values are equal, apart from the last digits of numbers that are no integers."""
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_near, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(
            _near(value, wanted[key]) for key, value in found.items()
        )
    if type(found) is type(wanted) is float:
        return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return found == wanted


def _returned(output: str, expected: object) -> bool:
    """Whether the JSON text is one of the results that count."""
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        return False
    assert isinstance(expected, tuple)
    return any(_near(found, one) for one in expected)


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


def share_settings(config: SandboxConfig | None) -> None:
    """Put `reward.sandbox` into the environment, for reward processes that this process starts
    later."""
    os.environ[SETTINGS] = SANDBOX.dump_json(config).decode()


def open_configured(config: SandboxConfig) -> Sandbox:
    """The sandbox of these settings.

    Raises:
        SandboxError: the level is not available here.
        ValueError: a path may not be shown.
    """
    if isinstance(config, SandboxService):
        return open_sandbox(config.level, service=config.service)
    return open_sandbox(config.level, python=config.python, paths=config.paths)


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
        ValueError: `reward.sandbox` is not set.
    """
    return _opened(os.environ.get(SETTINGS, "null"))


@functools.cache
def _opened(settings: str) -> tuple[Sandbox, Limits]:
    config = SANDBOX.validate_json(settings)
    if config is None:
        raise ValueError("code runs only in a sandbox: set reward.sandbox (docs/how_to/sandbox.md)")
    return open_configured(config), sandbox_limits(config)
