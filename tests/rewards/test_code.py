"""The reward for code: what it reads, what it runs, and programs that try to evade their
tests."""

import ast
import asyncio
import json
import os
import textwrap
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from small_config import small_config

from asyncrl.config.schema import LocalSandbox
from asyncrl.rewards import source
from asyncrl.rewards.code import (
    SETTINGS,
    _agrees,
    _returned,
    code_tests,
    configured_sandbox,
    grade,
    refuse_missing_packages,
    share_settings,
    with_heads,
)
from asyncrl.rewards.code_forms import Cases, Source, TestsError, heads_of, read_tests
from asyncrl.rewards.contract import GroupCall, RewardError, call_reward
from asyncrl.rewards.pool import RewardPool
from asyncrl.run import launch
from asyncrl.sandbox import (
    Level,
    Limits,
    SandboxError,
    SandboxUnavailableError,
    local,
    probe,
)
from asyncrl.testing import FakeSandbox
from asyncrl.testing.sandbox import ended

ADD = "def add(a, b):\n    return a + b\n"
ECHO = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 5", "output": "15"}]


PAIRS = Cases(("1 2\n", "10 5"), ("3\n", "15"))


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        (ECHO, PAIRS),
        (json.dumps(ECHO), PAIRS),
        ([{"type": "stdin_stdout", "fn_name": None, **case} for case in ECHO], PAIRS),
        ({"inputs": ["1 2\n", ["10 5"]], "outputs": ["3\n", ["15"]], "fn_name": None}, PAIRS),
        ('{"input": ["1 2\\n", "10 5"], "output": ["3\\n", "15"]}', PAIRS),
        (
            {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]},
            Cases(("[1, [2]]",), (([3], 3),), "f"),
        ),
        (
            [{"testtype": "functional", "fn_name": "f", "input": "[1]\n2", "output": "[3]"}],
            Cases(("[[1], 2]",), (([3],),), "f"),
        ),
    ],
)
def test_reads_the_cases_of_public_sets(tests, read):
    assert read_tests(tests) == read


def test_a_column_may_name_the_function() -> None:
    case = [{"input": "1", "output": "2", "testtype": "functional"}]
    for columns in ({"fn_name": "f"}, {"metadata": '{"func_name": "f"}'}):
        found = read_tests(case, columns)
        assert isinstance(found, Cases) and found.function == "f"


CHECK = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
PYTEST = "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
UNITTEST = (
    "import unittest\n\nclass AddTest(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n"
)
MAIN = "\nif __name__ == '__main__':\n    unittest.main()\n"
FIXTURE = (
    "import pytest\n\n@pytest.mark.parametrize('a, total', [(1, 3), (2, 4)])\n"
    "def test_add(a, total, tmp_path):\n    assert add(a, 2) == total\n\n"
    "@pytest.mark.skip\ndef test_skipped():\n    assert False\n\n"
    "async def test_later():\n    with pytest.raises(TypeError):\n        add(1, 'a') == 2\n"
)


@pytest.mark.parametrize(
    ("tests", "calls_check", "needs_pytest"),
    [
        ("assert add(1, 2) == 3", False, False),
        (["assert add(1, 2) == 3", "x = 1\nassert add(x, 2) == 3"], False, False),
        ('["assert add(1, 2) == 3"]', False, False),
        (CHECK, True, False),
        (CHECK + "check(add)\n", False, False),
        (PYTEST, False, False),
        (UNITTEST + MAIN, False, False),
        (FIXTURE, False, True),
        ("def test_add(capsys):\n    assert add(1, 2) == 3", False, True),
        ("def compare(a, b):\n    assert a == b\ncompare(add(1, 2), 3)", False, False),
        ("import numpy as np\nnp.testing.assert_allclose(add(1, 2), 3)", False, False),
        ("if add(1, 2) != 3:\n    raise ValueError", False, False),
        ("import sys\nassert add(1, 2) == 3\nsys.exit(0)", False, False),
        ("assert True, 'for debugging'\nassert add(1, 2) == 3", False, False),
        ("assert globals()['add'](1, 2) == 3", False, False),
        ("import subprocess\nassert subprocess.run(['python', 'solution.py'])", False, False),
        ("def main():\n    assert add(1, 2) == 3\n\nmain()", False, False),
        ("import pytest\nwith pytest.raises(TypeError):\n    add(1, 'a')", False, False),
        (f"import pytest\n{CHECK}", True, False),
        ("try:\n    add(1, 'a')\n    assert False\nexcept TypeError:\n    pass", False, False),
        ("try:\n    assert add(1, 2)\nexcept Exception:\n    raise SystemExit(1)", False, False),
        (
            UNITTEST.replace("(unittest.TestCase)", "(Base)").replace(
                "\n\n", "\n\nclass Base(unittest.TestCase):\n    pass\n\n", 1
            ),
            False,
            False,
        ),
        ("from mock import patch\n@patch('a')\ndef test_a(a):\n    assert add(1, 2)", False, False),
    ],
)
def test_reads_source(tests, calls_check, needs_pytest):
    found = read_tests(tests, {"entry_point": "add"})
    assert isinstance(found, Source)
    assert (found.calls_check, found.needs_pytest) == (calls_check, needs_pytest)


CAUGHT = "in a block that catches its failure"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "give Python source"),
        ("[]", "give Python source"),
        ("{}", "is an expression"),
        (None, "give Python source"),
        (7, "give Python source"),
        ([{"input": "1"}], "case 0 has no output"),
        ([{"input": "1", "output": None}], "case 0 has no output"),
        ([{"input": "1", "output": "1", "checker": "c"}], r"keys \['checker'\] in case 0"),
        ([{"input": "1", "output": {}}], "which is no text"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "add the column fn_name"),
        ([{"input": "one", "output": "1", "fn_name": "f"}], "the arguments 'one'"),
        ([{"input": "1", "output": "1", "fn_name": "f"}, ECHO[0]], "mixes cases"),
        ([{"input": "1", "output": "1", "fn_name": "f()"}], "not the name of a function"),
        ({"inputs": ["1"], "outputs": []}, "not lists of the same length"),
        ({"inputs": [], "outputs": []}, "not lists of the same length"),
        ({"inputs": ["1"], "outputs": ["1"], "seconds": 3}, r"keys \['seconds'\]"),
        (["assert a", {"input": "", "output": ""}], "give Python source"),
        ("it must add", "not Python source"),
        ("eJwLKEpMTy0GAAYkAlE=", "not Python source"),
        ("", "asserts nothing"),
        ("# assert add(1, 2) == 3", "asserts nothing"),
        ("add(1, 2) == 3", r"line 1: `add\(1, 2\) == 3` is an expression"),
        (["assert add(1, 2) == 3", "add(1, 2) == 3"], "is an expression"),
        ("assert (add(1, 2) == 3, 'no')", "is always true"),
        ("def test_a():\n    add(1, 2) == 3", "line 2: .*is an expression"),
        ("assert True", "asserts nothing"),
        ("x = add(1, 2)", "asserts nothing"),
        ("print(add(1, 2))", "asserts nothing"),
        ("def helper():\n    assert add(1, 2) == 3", "nothing calls helper"),
        ("def test_a():\n    def inner():\n        assert add(1, 2) == 3", "nothing calls inner"),
        ("class A:\n    def test_a(self):\n        assert add(1, 2) == 3", "nothing calls test_a"),
        ("import sys\nsys.exit(0)\nassert add(1, 2) == 3", "ends its own process on line 2"),
        ("raise SystemExit(0)\nassert add(1, 2) == 3", "ends its own process on line 1"),
        ("import os\nassert add(1, 2) == 3\nos._exit(1)", "ends its own process on line 3"),
        (CHECK, "add the column entry_point"),
        ("import math\nassert math.pi > 3", "no name of the program"),
        (f"import numpy as np\n{ADD}np.testing.assert_equal(add(1, 2), 3)", "no name of the prog"),
        ("try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    print('no')", CAUGHT),
        (
            "def test_a():\n    try:\n        assert add(1, 2) == 3\n    except:\n        pass",
            CAUGHT,
        ),
        ("from contextlib import *\nwith suppress(Exception):\n    assert add(1, 2) == 3", CAUGHT),
        ("assert add(1, 2) == 3 or 'it must add'", "is always true"),
        ("def check(a):\n    print(a == 3)\ncheck(add(1, 2))", "asserts nothing"),
        ("if False:\n    assert add(1, 2) == 3", "asserts nothing"),
        ("def test_a():\n    yield compare, add(1, 2), 3\nassert add(0, 0) == 0", "contains yield"),
        (UNITTEST.replace("    def", "    async def"), "use unittest.IsolatedAsyncioTestCase"),
        (UNITTEST.replace("test_add", "adds"), "nothing calls adds"),
        (UNITTEST.replace("class", "@unittest.skip('later')\nclass"), "nothing calls test_add"),
        ("x = [1, 2]\nassert sum(x) == 3", "no name of the program; .* entry_point"),
    ],
)
def test_refuses_by_name_what_asserts_nothing_or_has_another_form(tests, message):
    with pytest.raises(TestsError, match=message):
        read_tests(tests)


def test_tests_that_define_the_function_itself_are_refused() -> None:
    for tests, entry in (
        (ADD + CHECK, "add"),
        (f"class Solution:\n    pass\n{CHECK}", "Solution().f"),
    ):
        with pytest.raises(TestsError, match="itself, which entry_point names"):
            read_tests(tests, {"entry_point": entry})


def test_compares_outputs_outside() -> None:
    def score(outputs, tests=None, exit_code=0):
        tests = tests or Cases(("1", "2"), ("3\n", "a  \n\nb\n\n"))
        printed = json.dumps(outputs) if not isinstance(outputs, str) else outputs
        sandbox = FakeSandbox(lambda _: ended(printed, exit_code))
        passed = asyncio.run(grade(sandbox, Limits(), "code", tests)).passed
        files = sandbox.programs[0].files
        sent = [sandbox.programs[0].stdin, files["solution.py"], files["begin.json"]]
        assert b"3" not in b"".join(sent)  # the program cannot find the expected outputs
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
    function = Cases(("[1]", "[2]"), ((["3"], "3"), ("x",)), "f")
    assert score([[0, '"3"'], [0, '"x"']], function) and score([[0, '["3"]'], [0, '"x"']], function)
    assert not score([[0, '"3"'], [0, "x"]], function)
    assert not score([[0, "4"], [0, '"x"']], function)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("0.30000000000000004", "0.3", True),
        ("x = [0.1, 0.30000000000000004]", "x = [0.1, 0.3]", True),
        ("3", "3.0", True),
        ("1e-17 2.50", "0.0 2.5", True),
        ("0.31", "0.3", False),
        ("3.0", "3", False),
        ("3.0000000001", "3", False),
        ("-0.3", "0.3", False),
        ("1.2.4", "1.2.3", False),
        ("0.3 0.3", "0.3", False),
        ("0.3\n0.3", "0.3", False),
        ("{'b', 'a'}", "{'a', 'b'}", True),
        ("{'b': 1, 'a': 2}", "{'a': 1, 'b': 2}", False),
        ("{'ab', 'a'}", "{'aa', 'b'}", False),
        ("ba", "ab", False),
        ("nan", "0.3", False),
        ("1" * 5000 + ".0", "0.3", False),
        ("1" * 5000, "1.5", False),
    ],
)
def test_outputs_agree_up_to_the_digits_of_a_fraction(output, expected, same):
    assert _agrees(output, expected) is same


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("[0.30000000000000004, 1]", [0.3, 1], True),
        ('{"a": [0.30000000000000004]}', {"a": [0.3]}, True),
        ("3.0", 3, True),
        ("3", 3.0, True),
        ("2.9999999999", 3, False),
        ("0.31", 0.3, False),
        ("[1, 2]", [1], False),
        ('{"a": 1}', {"b": 1}, False),
        ("1" * 400, 1e300, False),
    ],
)
def test_results_are_equal_up_to_the_digits_of_a_fraction(output, expected, same):
    assert _returned(output, (expected,)) is same


async def test_another_service_runs_each_case_as_a_program_of_its_own() -> None:
    cases = Cases(("1", "2"), ("1", "2"))
    for level, programs in ((Level.CONTAINER, 2), (Level.NAMESPACES, 1)):

        def echo(program, level=level):
            given = json.loads(program.stdin)["inputs"]
            return ended(json.dumps([[0, text] for text in given]), level=level)

        sandbox = FakeSandbox(echo, level)
        assert (await grade(sandbox, Limits(), "code", cases)).passed
        assert len(sandbox.programs) == programs


HEAD = 'from typing import List\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n'
STARTER = "class Solution:\n    def add(self, a: int) -> int:\n        "


def test_a_body_is_put_below_its_head() -> None:
    shown = {"entry_point": "add", "prompts": HEAD}
    assert heads_of(shown) == (HEAD,) and heads_of({"prompts": HEAD}) == ()
    chat = [{"role": "user", "content": f"Complete:\n```python\n{HEAD}```"}]
    assert heads_of({"entry_point": "add", "prompts": "<|user|>", "messages": chat}) == (HEAD,)
    body = "c = a + b\nreturn c\n"
    program, before = with_heads(body, "add", (HEAD,))
    assert before == () and ast.parse(program).body[1].body[-1].value.id == "c"
    indented = textwrap.indent(body, "    ")  # as the solutions of HumanEval are
    assert with_heads(indented, "add", (HEAD,)) == (program, before)
    assert with_heads(ADD, "add", (HEAD,)) == (ADD, (HEAD,))
    program, _ = with_heads("return a\n", "Solution().add", (STARTER,))
    assert ast.parse(program).body[0].body[0].body[0].value.id == "a"
    assert with_heads("no python", "add", (HEAD,))[0] == "no python"


@pytest.fixture
def sandboxed(monkeypatch):
    """The environment of a reward process, with the best sandbox level here."""
    best = probe().best
    assert best is not None, probe().text()
    monkeypatch.setenv(SETTINGS, "{}")
    share_settings(LocalSandbox(level=best.value, wall_s=20.0))


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


def test_a_list_in_the_arguments_is_the_same_for_all(sandboxed):
    setup = {"test_setup_code": ["one = add(1, 0)", "two = add(one, 1)"]}
    two = group([f"```python\n{ADD}```"] * 2, "assert add(1, two) == 3")
    found = call_reward("asyncrl.rewards.builtin:code_tests", two, setup)
    assert found.rewards == [1.0, 1.0]


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


def graded(programs, tests, **row):
    """Whether each program passes the tests, by name."""
    sandbox, limits = configured_sandbox()
    read, heads = read_tests(tests, row), heads_of(row)

    async def all_of_them():
        slots = asyncio.Semaphore(os.cpu_count() or 1)

        async def one(program):
            async with slots:
                return (await grade(sandbox, limits, program, read, heads)).passed

        return await asyncio.gather(*map(one, programs.values()))

    return dict(zip(programs, asyncio.run(all_of_them()), strict=True))


WRONG_ADD = ADD.replace("+", "-")
PROGRAMS = {"right": ADD, "wrong": WRONG_ADD, "empty": ""}
ONLY_RIGHT = {"right": True, "wrong": False, "empty": False}


@pytest.mark.parametrize("tests", [CHECK, PYTEST, UNITTEST + MAIN], ids=["check", "def", "class"])
def test_tests_that_only_define_something_run_as_their_runners_run_them(sandboxed, tests):
    assert graded(PROGRAMS, tests, entry_point="add") == ONLY_RIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        CHECK + "check(add)\n",
        "import unittest\n" + UNITTEST + "import sys\nsys.exit(unittest.main(exit=False))\n",
        UNITTEST.replace("TestCase", "IsolatedAsyncioTestCase").replace("    def", "    async def"),
        "class TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n",
        PYTEST.replace("def test", "async def test").replace("import add", "import *"),
        'from unittest.mock import patch\n\n@patch("math.pi", 2)\ndef test_add():\n'
        "    import math\n    assert add(1, math.pi) == 3\n",
        {"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [[3], 0]},
        [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}],
    ],
    ids=["called", "exit", "async class", "plain class", "async def", "patch", "apps", "livecode"],
)
def test_other_forms_run_too(sandboxed, tests):
    assert graded(PROGRAMS, tests) == ONLY_RIGHT


@pytest.mark.slow
def test_pytest_runs_what_needs_it(sandboxed):
    packages = str(Path(pytest.__file__).parents[1])
    share_settings(LocalSandbox(level=probe().best.value, wall_s=60, cpu_s=60, paths=[packages]))
    skips = "import pytest\n\ndef add(a, b):\n    pytest.skip('no')\n"
    settles = "import pytest\npytest.raises = lambda *_: open('solution.py')\n" + WRONG_ADD
    programs = {"right": ADD, "skips": skips, "replaces": settles}
    refuse_missing_packages(configured_sandbox()[0], [read_tests(FIXTURE)])
    assert graded(programs, FIXTURE) == {"right": True, "skips": False, "replaces": False}


def test_a_package_that_the_sandbox_lacks_is_named() -> None:
    sandbox = FakeSandbox(lambda program: ended(json.dumps(["numpy"])))
    refuse_missing_packages(sandbox, [read_tests(PYTEST), read_tests(UNITTEST), PAIRS])
    assert not sandbox.programs
    tried = "try:\n    import torch\nexcept ImportError:\n    pass\n" + PYTEST
    refuse_missing_packages(sandbox, [read_tests("import numpy\n" + tried)])
    assert [program.stdin for program in sandbox.programs] == [b'["numpy"]']
    for _ in range(2):
        with pytest.raises(TestsError, match=r"needs pytest, which .* reward\.sandbox\.paths"):
            refuse_missing_packages(sandbox, [read_tests(FIXTURE)])
    assert len(sandbox.programs) == 2  # it does not change


def test_a_module_that_is_not_the_program_is_named(sandboxed):
    tests = read_tests("from main import add\nassert add(1, 2) == 3")
    with pytest.raises(TestsError, match=r"needs main, .* is imported as solution"):
        refuse_missing_packages(configured_sandbox()[0], [tests])


@pytest.mark.slow
def test_a_function_may_have_the_name_of_a_builtin(sandboxed):
    programs = {"right": "def sum(a): return 7\n", "wrong": "def sum(a): return 3\n"}
    found = graded(programs, "assert sum([1, 2]) == 7", entry_point="sum")
    assert found == {"right": True, "wrong": False}


AS_A_FILE = {
    "byte order mark": "\ufeffvalue = 1",
    "forward reference": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, fields\n"
        "import typing\n@dataclass\nclass P:\n    next: P | None = None\n"
        "value = fields(P)[0].type == 'P | None' and 'next' in typing.get_type_hints(P)\n"
    ),
    "pickle": "import pickle\nclass P: pass\nvalue = type(pickle.loads(pickle.dumps(P()))) is P\n",
    "guard": "if __name__ == '__main__':\n    value = True\n",
    "guard with input": "value = True\nif __name__ == '__main__':\n    print(input())\n",
    "guard for an import": (
        "if __name__ != '__main__':\n    pass\nelse:\n    input()\nvalue = True\n"
    ),
    "guard with more": "value = True\nif 1 and not __name__ != '__main__':\n    input()\n",
    "source": "import inspect\ndef f(): return 1\nvalue = 'return 1' in inspect.getsource(f)\n",
    "exit": "value = True\nimport unittest\nif __name__ == '__main__':\n    unittest.main()\n",
}


def test_a_program_runs_as_a_file_does(sandboxed):
    assert graded(AS_A_FILE, "assert value") == dict.fromkeys(AS_A_FILE, True)


@pytest.mark.slow
def test_results_of_numpy_are_numbers(sandboxed):
    program = "import numpy\ndef f(x):\n    return [numpy.int64(x), numpy.arange(2)]\n"
    tests = {"fn_name": "f", "inputs": [[3]], "outputs": [[3, [0, 1]]]}
    assert graded({"numpy": program}, tests) == {"numpy": True}


@pytest.mark.slow
def test_tests_and_program_see_each_other(sandboxed):
    programs = {
        "counts": "n = 0\ndef f(x):\n    global n\n    n += x.v\n",
        "uses": "n = 0\ndef f(x):\n    global n\n    n = X(x.v).v\n",
    }
    tests = ["class X:\n    def __init__(self, v): self.v = v", "f(X(2))\nassert n == 2"]
    assert graded(programs, tests) == dict.fromkeys(programs, True)
    solution = {
        "s": "class Solution:\n    def add(self, a: List[int]) -> int:\n        return sum(a)\n"
    }
    check = CHECK.replace("1, 2", "[1, 2]")
    assert graded(solution, check, entry_point="Solution().add") == {"s": True}
    assert graded({"b": "return a + b\n"}, CHECK, entry_point="add", prompts=HEAD) == {"b": True}
    assert graded({"a": ADD}, "assert globals()['add'](1, 2) == 3") == {"a": True}
    waits = "import time\ndef add(a, b):\n    time.sleep(900)\n    return a + b\n"
    patched = "import time\ntime.sleep = print\nassert add(1, 2) == 3"
    assert graded({"a": waits}, patched) == {"a": True}
    setup = {"test_setup_code": "two = add(1, 1)", "test_imports": ["import math"]}
    assert graded({"a": ADD}, ["assert add(1, two) == 3"], **setup) == {"a": True}


LIAR = "class L:\n    def __eq__(self, other): return True\ndef add(a, b): return L()\n"
EVASIONS = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit at once": "import os\nos._exit(0)\n",
    "exit in the function": "def add(a, b): raise SystemExit(0)\n",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG_ADD,
    "own check": "def check(candidate): pass\n" + WRONG_ADD,
    "own abs": "abs = lambda x: 0\n" + WRONG_ADD,
    "Python's abs": "import builtins\nbuiltins.abs = lambda x: 0\n" + WRONG_ADD,
    "equals anything": LIAR,
    "a list that equals anything": LIAR.replace("return L()", "return [L()] if b else 0"),
    "equals small numbers": (
        "class L:\n    def __eq__(self, other): return other < 10**30\ndef add(a, b): return L()\n"
    ),
    "a number that equals numbers": (
        "class L(int):\n    def __eq__(self, other): return isinstance(other, int)\n"
        "    __sub__ = lambda *_: 0\ndef add(a, b): return L()\n"
    ),
    "equals once": (
        "class L:\n    n = 0\n    def __eq__(self, other):\n        self.n += 1\n"
        "        return self.n == 1 and type(other) is int\ndef add(a, b): return L()\n"
    ),
    "in a list, equals numbers": (
        "class L:\n    def __eq__(self, other): return type(other) is int\n"
        "    def __abs__(self): return 0.0\n    __sub__ = lambda a, b: a\n"
        "def add(a, b): return L()\n"
    ),
    "mock.ANY": "from unittest import mock\ndef add(a, b): return mock.ANY\n",
    "patched at import": "import unittest\nunittest.TestCase.assertEqual = print\n" + WRONG_ADD,
    "patched in a call": (
        "import unittest\ndef add(a, b):\n    unittest.TestCase.assertEqual = print\n    return 0\n"
    ),
    "a module of its own": (
        "import sys, types\nsys.modules['unittest'] = types.SimpleNamespace(\n"
        "    TestCase=type('T', (), {}), main=print)\n"
    ),
    "skip": "import unittest\ndef add(a, b): raise unittest.SkipTest\n",
    "prints what it finds": (
        "import __main__, os, sys\nprint(vars(__main__), sys.argv)\n"
        "os.write(1, os.pread(0, 4096, 0) + b' passed\\n')\nos._exit(0)\n"
    ),
    "frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for v in frame.f_locals.values():\n"
        "        print('\\n%s passed' % (v,))\n    frame = frame.f_back\n"
    ),
    "another parser": "import ast\nast.parse = lambda *a: ast.Module([], [])\n" + WRONG_ADD,
    "two processes": "import os\nos.fork()\n" + WRONG_ADD,
    "writes the tests": "open('tests.json', 'w').write('[\"1\"]')\n" + WRONG_ADD,
}


def test_what_models_try_first_earns_nothing(sandboxed):
    names = ("exit at once", "own abs", "equals anything", "a number that equals numbers")
    tried = {name: EVASIONS[name] for name in names}
    tests = "assert add(1, 2) == 3\nassert abs(add(2, 2) - 4) < 1e-6\n"
    assert graded(tried, tests) == dict.fromkeys(tried, False)


LIKE = "class L:\n    def __init__(self, v): self.v = v\n    def __eq__(self, other): return "
COMPARED = {
    "assert f(1) == f(1) == 1": {"mod": True, "liar": False},
    "assert f(1) in (0, 1)": {"mod": True, "liar": False},
    "assert [f(1)] == [1] and {'a': f(1)} == {'a': 1}": {"mod": True, "liar": False},
    "assert 1 in g()": {"mod": True, "liar": False},
    "assert not f(1) != 1": {"mod": True, "liar": False},
    "class T:\n    def __eq__(self, other): return True\nassert f(1) and T() == 3": {
        "mod": True,
        "liar": True,
    },
    "import unittest\nclass A(unittest.TestCase):\n    def test(self):\n"
    "        self.assertAlmostEqual(f(1), 1)\n        self.assertEqual([f(1)], [1])\n": {
        "mod": True,
        "liar": False,
    },
    "from decimal import Decimal\nassert f(1)\nassert Decimal(1) == 1.0": {
        "mod": True,
        "liar": True,
    },
}


@pytest.mark.parametrize("tests", COMPARED)
def test_an_own_equality_counts_if_it_tells_values_apart(sandboxed, tests):
    own = "(other.v if isinstance(other, L) else other)"
    contains = "\n    def __contains__(self, item): return "
    programs = {
        "mod": f"{LIKE}{own} % 7 == self.v % 7{contains}item == 1\nf = L\ng = lambda: L(1)\n",
        "liar": f"{LIKE}{own} < 10**30{contains}True\nf = L\ng = lambda: L(1)\n",
    }
    assert graded(programs, tests) == COMPARED[tests]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3\nassert abs(add(2, 2) - 4) < 1e-6\n",
        UNITTEST.replace("class", "assert abs(add(2, 2) - 4) < 1e-6\nclass"),
        CHECK + "    assert abs(candidate(2, 2) - 4) < 1e-6\n",
    ],
    ids=["assert", "unittest", "check"],
)
def test_no_evasion_earns_a_reward(sandboxed, tests):
    programs = {"right": ADD, **EVASIONS}
    found = graded(programs, tests, entry_point="add")
    assert found == {"right": True, **dict.fromkeys(EVASIONS, False)}


LEAVES = """
import os, time
before = sorted(os.listdir('.')), os.path.exists('/tmp/kept')
os.makedirs('d/e')
open('d/e/f', 'w').close()
try:
    open('/tmp/kept', 'w').close()
except OSError:
    pass  # landlock has no folder of that name
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('beat', 'w').close()
            time.sleep(0.001)
    os._exit(0)
while not os.path.exists('beat'):
    time.sleep(0.001)
print(before)
"""


def test_a_case_finds_nothing_of_an_earlier_one(sandboxed):
    case = {"input": "", "output": "(['solution.py'], False)"}
    assert graded({"leaves": LEAVES}, [case] * 3) == {"leaves": True}


def test_no_code_runs_without_the_sandbox_that_the_config_asks_for(monkeypatch, tmp_path):
    code = f"```\nopen({str(tmp_path / 'ran')!r}, 'w')\n```"
    monkeypatch.delenv(SETTINGS, raising=False)
    with pytest.raises(RewardError, match=r"set reward\.sandbox "):
        rewards([code], "assert True")
    monkeypatch.setattr(local, "probe", lambda *_: local.Levels((), {}))
    monkeypatch.setenv(SETTINGS, '{"level": "namespaces", "wall_s": 3.0}')
    with pytest.raises(
        RewardError,
        match=r"SandboxUnavailableError: sandbox level 'namespaces' is not available here",
    ):
        rewards([code], "assert True")
    with pytest.raises(SandboxUnavailableError):
        configured_sandbox()
    monkeypatch.setenv(SETTINGS, '{"level": "landlock", "service": "http://127.0.0.1:1"}')
    monkeypatch.setenv("ASYNCRL_SANDBOX_TOKEN", "a token of the tests")
    with pytest.raises(SandboxError, match="does not answer"):
        configured_sandbox()
    assert not (tmp_path / "ran").exists()


async def test_settings_reach_a_reward_process(monkeypatch, sandboxed):
    sandbox, limits = configured_sandbox()
    assert sandbox.level == probe().best and limits == Limits(wall_s=20.0)
    assert Level(sandbox.level).reaches(Level.LANDLOCK)
    assert await code_tests(
        completions=["```\nx = 1\n```"], tests=["assert x == 1"], ordinal=[0]
    ) == [1.0]


class StartedPoolError(Exception):
    """Raised with the settings that the pool's processes would find."""


@pytest.mark.parametrize("starts", ["the scoring stream", "evaluation"])
async def test_every_start_of_reward_processes_passes_the_settings(monkeypatch, starts):
    config = small_config(
        reward={
            "functions": {"f": {"function": "m:f"}},
            "sandbox": {"level": "landlock", "wall_s": 7.0},
        }
    )
    module = source if starts == "the scoring stream" else launch

    def start(config, *_, **__):
        raise StartedPoolError(os.environ[SETTINGS])

    monkeypatch.setenv(SETTINGS, "{}")
    monkeypatch.setattr(module, "RewardPool", start)
    with pytest.raises(StartedPoolError, match=r'"wall_s":7.0.*"level":"landlock"'):
        if module is source:
            next(source.rewarded_groups(config.reward, "reader", []))
        else:
            await launch._start_rewards(config, AsyncExitStack())


def test_reward_processes_run_it(sandboxed):
    config = small_config(
        reward={
            "functions": {"code": {"function": "asyncrl.rewards.builtin:code_tests"}},
            "sandbox": {"level": probe().best.value, "cpu_s": 2.0},
            "processes": 1,
            "deadline_s": 120.0,
        }
    ).reward
    share_settings(config.sandbox)
    with RewardPool(config) as pool:
        found = pool.submit(
            group(
                [f"```python\n{ADD}```", "```python\nwhile True: pass\n```"],
                "assert add(1, 2) == 3",
            )
        ).result(timeout=150)
    assert found.failure is None and found.parts == {"code": [1.0, 0.0]}
